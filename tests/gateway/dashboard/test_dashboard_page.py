"""The page in a real browser, over a gateway whose worker is scripted."""

from __future__ import annotations

import json
from array import array
from collections.abc import Iterator, Sequence

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from support.browser import chromium, opened
from support.gateway_server import ALIAS, RunningGateway, running_gateway
from support.raw_http import request
from support.scripted_backend import ScriptedBackend, worker_info
from support.scripted_worker import idle_load
from twinfire.gateway.gateway import Gateway
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.sampling import SamplingParams

ADMIN = "the-admin-key"
CALLED = b'{"city": "Oslo", "unit": "celsius"}'


def answer(prompt: array[int], sampling: SamplingParams, choice: int) -> Sequence[int]:
    """A call where the output is held to a grammar, else words with markup in them."""
    if sampling.grammar is not None:
        return list(
            b'<tool_call>\n{"name": "get_weather", "arguments": ' + CALLED + b"}\n</tool_call>"
        )
    return list(b"<b>Plain</b> words.")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as running:
        yield running


@pytest.fixture(scope="module")
def server() -> Iterator[RunningGateway]:
    with running_gateway(
        make_backend=lambda: ScriptedBackend(
            answer, cached_tokens=3, tokens_per_step=4, worker_info=worker_info(4096)
        )
    ) as running:
        yield running


def say(page: Page, text: str) -> None:
    page.get_by_role("textbox", name="Your message").fill(text)
    page.keyboard.press("Enter")


def test_the_overview_shows_workers_and_what_they_do(
    browser: Browser, server: RunningGateway
) -> None:
    with opened(browser, server.url) as page:
        expect(page.get_by_role("status").first).to_have_text("Ready")
        pool = page.get_by_role("region", name="Mixed pool")
        expect(pool.get_by_role("listitem")).to_contain_text("worker")
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert request(server.server.address, "POST", "/v1/chat/completions", body).status == 200
        chart = page.get_by_role("img", name="Time to first token: P50")
        expect(chart).to_be_visible()
        expect(page.locator(".tile", has_text="First token")).to_contain_text("P90")
        # The charts answer to the keyboard.
        chart.focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        expect(page.locator(".chart").first.locator(".legend-when")).to_contain_text("ago")


def test_a_worker_that_speculates_shows_what_its_drafts_came_to(browser: Browser) -> None:
    def report(gateway: Gateway) -> None:
        (hosted,) = gateway.models
        load = idle_load(1)
        hosted.metrics.observe_load(msgspec.structs.replace(load, drafted=(4, 4), accepted=(4, 2)))

    with (
        running_gateway(adjust=report) as own,
        opened(browser, own.url) as page,
    ):
        card = page.get_by_role("region", name="Mixed pool").get_by_role("listitem")
        expect(card).to_contain_text("75 % · 2.5 tok a step")


def test_requests_appear_as_they_end_and_can_be_opened(
    browser: Browser, server: RunningGateway
) -> None:
    with opened(browser, f"{server.url}") as page:
        page.get_by_role("link", name="Requests").click()
        expect(page.get_by_role("heading", name="Requests")).to_be_visible()
        body = {"messages": [{"role": "user", "content": "hi"}], "temperature": -1}
        assert request(server.server.address, "POST", "/v1/chat/completions", body).status == 400
        page.get_by_label("Failures only").check()
        row = page.get_by_role("row", name="chat/completions").first
        expect(row).to_contain_text("400")
        row.get_by_role("button").click()
        expect(row).to_contain_text("Request id")
        page.get_by_label("Filter requests").fill("nobody is called this")
        expect(page.get_by_text("No request is like that.")).to_be_visible()


def test_the_playground_answers_and_shows_what_was_cached(
    browser: Browser, server: RunningGateway
) -> None:
    with opened(browser, server.url) as page:
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("combobox", name="Model").select_option(ALIAS)
        say(page, "Hello")
        turn = page.locator(".turn.assistant").last
        # Markup of the model is text.
        expect(turn).to_contain_text("<b>Plain</b> words.")
        expect(turn).to_contain_text("3 of")
        expect(turn).to_contain_text("Ended by stop")
        say(page, "And again")
        expect(page.locator(".turn.assistant")).to_have_count(2)
        expect(page.locator(".turn.assistant").last).to_contain_text("Ended by stop")
    _, (prompt, _) = server.backend.submitted[-2:]
    assert b"<b>Plain</b>" in bytes(token for token in prompt if token < 256)


def test_a_tool_call_is_shown_and_answered(browser: Browser, server: RunningGateway) -> None:
    with opened(browser, server.url) as page:
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("button", name="Take an example").click()
        say(page, "How warm is it in Oslo?")
        call = page.get_by_role("region", name="Call of get_weather")
        expect(call.locator("pre")).to_have_text(json.dumps(json.loads(CALLED), indent=2))
        page.get_by_label("Tool choice").select_option("none")
        page.get_by_label("Result of get_weather").fill("4 degrees")
        page.get_by_role("button", name="Give the results").click()
        expect(page.locator(".turn.assistant").last).to_contain_text("Plain")


def test_a_call_that_is_cut_off_is_said_to_be(browser: Browser, server: RunningGateway) -> None:
    with opened(browser, server.url) as page:
        page.get_by_role("link", name="Playground").click()
        page.get_by_role("button", name="Take an example").click()
        page.locator("#max-tokens").fill("60")
        say(page, "How warm is it in Oslo?")
        expect(page.get_by_role("alert")).to_contain_text("cut off")
        expect(page.get_by_label("Result of get_weather")).to_have_count(0)
        # What was said before goes on without it.
        page.get_by_label("Tool choice").select_option("none")
        say(page, "Hello")
        expect(page.locator(".turn.assistant").last).to_contain_text("Ended by stop")


def test_faults_are_told_where_they_happen(browser: Browser, server: RunningGateway) -> None:
    with opened(browser, server.url) as page:
        page.get_by_role("link", name="Playground").click()
        page.get_by_label("Tools").fill("[")
        say(page, "Hello")
        expect(page.get_by_role("alert")).to_contain_text("Tools must be JSON")


def test_usage_and_a_phone_s_width(browser: Browser, server: RunningGateway) -> None:
    phone = {"width": 360, "height": 740}
    with opened(browser, server.url, viewport=phone, color_scheme="dark") as page:
        page.get_by_role("link", name="Usage").click()
        expect(page.get_by_role("rowheader", name="open")).to_be_visible()
        page.get_by_role("button", name="30 days").click()
        expect(page.get_by_role("rowheader", name="open")).to_be_visible()
        for name in ("Overview", "Requests", "Playground"):
            page.get_by_role("link", name=name).click()
            expect(page.get_by_role("heading", name=name, exact=True)).to_be_attached()
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= phone["width"], f"{name} is {width} wide"


def test_signing_in_with_the_administrators_key(browser: Browser) -> None:
    with running_gateway(GatewaySettings(admin_key=ADMIN)) as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.url}/dashboard")
        field = page.get_by_label("Key or token")
        field.fill("wrong")
        page.keyboard.press("Enter")
        expect(page.get_by_role("alert")).to_be_visible()
        page.get_by_label("Key or token").fill(ADMIN)
        page.keyboard.press("Enter")
        expect(page.get_by_role("region", name="Mixed pool")).to_be_visible()
        context.close()


def test_a_gateway_that_goes_away_is_said_and_found_again(browser: Browser) -> None:
    with running_gateway() as server:
        context = browser.new_context()
        page = context.new_page()
        page.goto(f"{server.url}/dashboard")
        expect(page.get_by_role("status").first).to_have_text("Ready")
    expect(page.locator("#banner")).to_contain_text("Trying again")
    expect(page.get_by_role("region", name="Mixed pool")).to_be_visible()
    context.close()
