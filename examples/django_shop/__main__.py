"""A shop with Django: `python -m examples.django_shop`."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import requests

from examples.stage import Stage, free_port

PROJECT = Path(__file__).parent
USER = {"username": "maria", "password": "only for this example"}


def main() -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "shop.settings"
    os.environ["DJANGO_SUPERUSER_PASSWORD"] = USER["password"]
    address = f"127.0.0.1:{free_port()}"
    with Stage("shop", PROJECT, "SHOP_DATABASE_URL") as stage:
        stage.run("django", "migrate")
        stage.run("django", "createsuperuser", "--no-input", "--username=maria", "--email=m@x.org")
        command = ["django", "runserver", "--noreload", "--insecure", address]
        stage.start("web", command, lambda log: "Quit the server" in log)
        stage.start_worker()

        def call(method: str, path: str) -> Any:
            return requests.request(method, f"http://{address}/{path}", timeout=20).json()

        paid, unpaid = (call("POST", "orders")["number"] for _ in range(2))
        stage.say(f"orders {paid} and {unpaid} are placed, and must be paid within two seconds")
        call("POST", f"orders/{paid}/pay")
        stage.wait_until(
            lambda: f"the receipt of order {paid} is sent" in stage.log("worker"), "the receipt"
        )
        stage.say(f"order {paid} is paid, and a task of django.tasks has sent the receipt")
        stage.wait_until(
            lambda: call("GET", f"orders/{unpaid}")["status"] == "closed", "the end of the order"
        )
        stage.say(f"order {unpaid} is closed, and order {paid} is still paid")
        assert call("GET", f"orders/{paid}")["status"] == "paid"
        admin = f"http://{address}/admin"
        with requests.Session() as browser:
            log_in(browser, admin)

            def page() -> str:
                return browser.get(f"{admin}/delaytasks/delaytaskrow/", timeout=20).text

            stage.wait_until(lambda: len(states_of(page())) == 3, "the end of all tasks")
            found = states_of(page())
        stage.say(f"the admin shows tasks with the states {', '.join(found)}")
        assert sorted(found) == ["CANCELLED", "DONE", "DONE"]


def states_of(page: str) -> list[str]:
    """Return the states of the tasks that have ended."""
    return re.findall(r"(DONE|CANCELLED)</span>", page)


def log_in(browser: requests.Session, admin: str) -> None:
    browser.get(f"{admin}/login/", timeout=20)
    token = {"csrfmiddlewaretoken": browser.cookies["csrftoken"]}
    browser.post(f"{admin}/login/", data={**USER, **token}, timeout=20)


if __name__ == "__main__":
    main()
