"""Draws the pictures of docs/images/django: `python -m tests.ui.django_pictures`.

It needs Chromium, and pngquant makes the pictures small.
"""

from __future__ import annotations

import os
import tempfile
import threading
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

from tests.ui.chromium import chromium, draw_page, find_chromium

FOLDER = Path(__file__).parents[2] / "docs/images/django"
SIZE = {"width": 1280, "height": 800}


class _Silent(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None: ...


def draw() -> None:
    os.environ["ADMIN_DATABASE_URL"] = f"sqlite:///{tempfile.mkdtemp()}/shop.sqlite3"
    from tests.integration import django_admin_settings  # noqa: F401 - sets Django up

    from django.contrib.auth.models import User  # isort: skip
    from django.contrib.staticfiles.handlers import StaticFilesHandler
    from django.core.management import call_command
    from django.core.wsgi import get_wsgi_application
    from django.test import Client

    call_command("migrate", verbosity=0)
    failed = _fill()
    client = Client()
    client.force_login(User.objects.create_superuser("maria"))
    server = make_server("127.0.0.1", 0, StaticFilesHandler(get_wsgi_application()),
                         handler_class=_Silent)  # fmt: skip
    threading.Thread(target=server.serve_forever, daemon=True).start()
    _draw_pages(f"http://127.0.0.1:{server.server_port}", client.cookies["sessionid"].value, failed)
    server.shutdown()
    server.server_close()


def _fill() -> int:
    """Make tasks; return the id of a task that failed."""
    from delaytasks.runtime import runtime_of
    from tests.integration.django_admin_tests import delays
    from tests.ui.pictures import rename
    from tests.world.recording import runner_of

    @delays.processor("pay.notify", retries="1ms")
    def notify(body: Any) -> None:
        raise ConnectionError("partner.example did not answer within 10 s")

    delays.processor("order.close")(lambda body: None)
    for number in range(1, 14):
        order = {"order": 7000 + number, "total": "49.90"}
        tag = "pay.notify" if number % 5 == 0 else "order.close"
        delays.schedule_delay(tag, order, 0, key=f"order-{number}", meta={"tenant": "acme"})
    for _ in range(3):
        runner_of(delays).run_due("default", range(10), limit=100)
    for number in range(14, 200):
        delays.schedule_delay("order.close", {"order": 7000 + number}, 600 * number,
                              key=f"order-{number}")  # fmt: skip
    delays.cancel(tag="order.close", key="order-20")
    rename(runtime_of(delays).store, __file__, "/srv/shop/delays.py")
    return int(delays.find(tag="pay.notify", status="FAILED").tasks[0].id)


def _draw_pages(address: str, session: str, failed: int) -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    pages = f"{address}/admin/delaytasks/"
    with chromium(find_chromium()) as browser:
        context = browser.new_context(viewport=SIZE)
        context.add_cookies([{"name": "sessionid", "value": session, "url": address}])
        page = context.new_page()
        page.goto(f"{pages}delaytaskrow/?tag=order.close")
        draw_page(page, FOLDER / "tasks.png", 800)
        page.check("#action-toggle")
        page.select_option("select[name=action]", "reschedule")
        page.click("div.actions button[type=submit]")
        draw_page(page, FOLDER / "confirm.png", 800)
        page.goto(f"{pages}delaytaskrow/{failed}/change/")
        page.click("summary >> nth=0")
        draw_page(page, FOLDER / "task.png", 1400)


if __name__ == "__main__":
    draw()
