"""Draws the pictures of docs/images/django: `python -m tests.ui.django_pictures`.

It needs Chromium, and pngquant makes the pictures small.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

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
    from sqlalchemy import func, update

    from delaytasks.runtime import runtime_of
    from tests.integration.django_admin_tests import delays
    from tests.recording import runner_of

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
    store = runtime_of(delays).store
    tasks, attempts = store.schema.tasks, store.schema.attempts
    with store.database.begin() as connection:
        for table, column in ((tasks, tasks.c.error_stack), (attempts, attempts.c.error)):
            renamed = func.replace(column, __file__, "/srv/shop/delays.py")
            connection.execute(update(table).values({column.name: renamed}))
            worker = update(table).where(table.c.worker.is_not(None))
            connection.execute(worker.values(worker="celery@shop-1"))
    return int(delays.find(tag="pay.notify", status="FAILED").tasks[0].id)


def _draw_pages(address: str, session: str, failed: int) -> None:
    from playwright.sync_api import sync_playwright

    FOLDER.mkdir(parents=True, exist_ok=True)
    pages = f"{address}/admin/delaytasks/"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"),
            args=["--no-sandbox", "--disable-gpu", "--disable-quic"],
        )
        context = browser.new_context(viewport=SIZE)  # type: ignore[arg-type]
        context.add_cookies([{"name": "sessionid", "value": session, "url": address}])
        page = context.new_page()
        page.goto(f"{pages}delaytaskrow/?tag=order.close")
        _save(page, "tasks")
        page.check("#action-toggle")
        page.select_option("select[name=action]", "reschedule_tasks")
        page.click("div.actions button[type=submit]")
        _save(page, "confirm")
        page.goto(f"{pages}delaytaskrow/{failed}/change/")
        page.click("summary >> nth=0")
        _save(page, "task", 1400)
        browser.close()


def _save(page: Any, name: str, height: int = 800) -> None:
    page.wait_for_load_state()
    picture = FOLDER / f"{name}.png"
    whole = page.evaluate("document.documentElement.scrollHeight")
    clip = {"x": 0, "y": 0, "width": SIZE["width"], "height": min(whole, height)}
    page.screenshot(path=picture, full_page=True, clip=clip)
    if shutil.which("pngquant"):
        subprocess.run(["pngquant", "64", "--force", "--output", picture, picture], check=True)


if __name__ == "__main__":
    draw()
