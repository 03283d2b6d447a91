"""The dashboard of a real cluster in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import expect

from support.browser import chromium, opened
from support.serve_process import up_process

CLUSTER = """
[gateway]
pd_policy = "always"
[model]
prefill = { count = 1, threads = 1, kv_cache_memory = 300_000_000 }
decode = { count = 1, threads = 1, kv_cache_memory = 300_000_000 }
"""


@pytest.mark.slow
def test_a_prompt_s_way_from_the_playground_to_the_log(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    options = (str(tmp_path / "cluster.toml"), "--accounts-db", "none")
    with (
        chromium() as browser,
        up_process(tmp_path, *options) as cluster,
        opened(browser, cluster.url) as page,
    ):
        for role in ("Prefill", "Decode"):
            pool = page.get_by_role("region", name=f"{role} pool")
            expect(pool.get_by_role("listitem")).to_contain_text(f"{role.lower()}-0")
        page.get_by_role("link", name="Playground").click()
        page.locator("#max-tokens").fill("12")
        page.get_by_role("textbox", name="Your message").fill("What is a prefix cache? " * 20)
        page.keyboard.press("Enter")
        answer = page.locator(".turn.assistant")
        expect(answer).to_contain_text("prefill-0 → decode-0, always", timeout=60_000)
        expect(answer).to_contain_text("prompt tokens")
        page.get_by_role("button", name="Take an example").click()
        page.locator("#max-tokens").fill("64")
        page.get_by_role("textbox", name="Your message").fill("How warm is it in Oslo?")
        page.keyboard.press("Enter")
        call = page.get_by_role("region", name="Call of get_weather")
        expect(call.locator("pre")).to_contain_text('"city": ', timeout=60_000)
        page.get_by_role("link", name="Requests").click()
        row = page.get_by_role("row", name="chat/completions").last
        expect(row).to_contain_text("prefill-0 → decode-0")
        row.get_by_role("button").click()
        for part in ("prefill", "first decode"):
            expect(row.locator(".details")).to_contain_text(part)
