"""Chromium, driven by Playwright, for tests and pictures."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
MODES: dict[str, dict[str, Any]] = {
    "light": {"viewport": {"width": 1280, "height": 850}, "color_scheme": "light"},
    "dark": {"viewport": {"width": 1280, "height": 850}, "color_scheme": "dark"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "light"},
}


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def chromium(program: str | None) -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        started = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-quic"]
        )
        yield started
        started.close()


@contextmanager
def watched(browser: Any, **options: Any) -> Iterator[Any]:
    """Yield a tab whose errors, refused scripts and requests to other hosts raise an error."""
    context = browser.new_context(**options)
    opened, problems = context.new_page(), list[str]()
    opened.on("pageerror", lambda error: problems.append(str(error)))

    def hear(message: Any) -> None:
        if message.type == "error" and not re.search("status of 40[0-4]", message.text):
            problems.append(message.text)

    def see(sent: Any) -> None:
        if "//127.0.0.1:" not in sent.url:
            problems.append(sent.url)

    opened.on("console", hear)
    opened.on("request", see)
    try:
        yield opened
    finally:
        context.close()
    assert problems == []


def draw_page(page: Any, picture: Path, tallest: int) -> None:
    """Write the upper part of a page as a picture. The program pngquant makes it small."""
    page.wait_for_load_state()
    height = min(page.evaluate("document.documentElement.scrollHeight"), tallest)
    clip = {"x": 0, "y": 0, "width": page.viewport_size["width"], "height": height}
    page.screenshot(path=picture, full_page=True, clip=clip)
    if shutil.which("pngquant"):
        command = ["pngquant", "128", "--force", "--output", str(picture), str(picture)]
        subprocess.run(command, check=True)
