"""A real headless Chromium, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Error, Page, Route, expect, sync_playwright

_WAIT_MS = 20_000
_LOUD = ("error", "warning")
_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start it; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    # Its sandbox refuses to run for root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
    expect.set_options(timeout=_WAIT_MS)
    with sync_playwright() as playwright:
        try:
            browser = playwright.chromium.launch(executable_path=program, args=options)
        except Error as error:
            if program is not None:
                raise
            pytest.skip(f"there is no Chromium: {error.message.splitlines()[0]}")
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def opened(browser: Browser, url: str, **options: object) -> Iterator[Page]:
    """Open the page, let nothing out to other servers, and demand that the console stays empty."""
    context = browser.new_context(**options)  # type: ignore[arg-type]
    page = context.new_page()
    page.set_default_timeout(_WAIT_MS)
    complaints: list[str] = []
    page.on("console", lambda said: said.type in _LOUD and complaints.append(said.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))

    def guard(route: Route) -> None:
        if route.request.url.startswith(url):
            route.continue_()
        else:
            complaints.append(f"asked for {route.request.url}")
            route.abort()

    page.route("**/*", guard)
    page.goto(f"{url}/dashboard")
    yield page
    context.close()
    assert complaints == []
