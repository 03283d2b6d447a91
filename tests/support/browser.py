"""A real headless Chromium, where one is installed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

_PROGRAMS = ("chromium", "chromium-browser", "google-chrome")


@contextmanager
def chromium() -> Iterator[Browser]:
    """Start it; skips the test where there is none."""
    program = next(filter(None, map(shutil.which, _PROGRAMS)), None)
    # Its sandbox refuses to run for root.
    options = ["--no-sandbox"] if os.geteuid() == 0 else []
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
