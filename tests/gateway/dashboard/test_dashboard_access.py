"""Who sees the dashboard's data, and what the page may do."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import httpx
import pytest

from support.gateway_server import byte_text_side
from support.scripted_backend import ScriptedBackend
from twinfire.accounts.account_store import AccountStore
from twinfire.accounts.limits import NO_LIMITS
from twinfire.gateway.app import create_app, gateway_of
from twinfire.gateway.dashboard import assets
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings

HERE, ELSEWHERE = "127.0.0.1", "10.1.2.3"
ADMIN, CLIENT = "admin-key", "client-key"
OPERATORS, TENANTS = "operators", "tenants"
"""Accounts; as a key, a token of theirs."""
API = ("/dashboard/api/snapshot", "/dashboard/api/stream", "/dashboard/api/usage")
STATIC = Path(assets.__file__).parent / "static"


def status_of(
    settings: GatewaySettings,
    host: str,
    key: str | None,
    *,
    path: str = API[0],
    name: str = "localhost:8000",
    with_accounts: bool = False,
) -> int:
    """The answer's status to a client at `host` that calls the server `name`."""

    async def main() -> int:
        app = create_app(settings, ScriptedBackend(), ServedModel(("t",), byte_text_side()))
        shown = key
        if with_accounts:
            store = AccountStore(gateway_of(app).database)
            for account in (OPERATORS, TENANTS):
                store.create(account, NO_LIMITS, is_admin=account == OPERATORS)
                token, _ = store.create_token(account)
                shown = token if key == account else shown
        transport = httpx.ASGITransport(app, client=(host, 1234))
        headers = {"host": name}
        if shown is not None:
            headers["authorization"] = f"Bearer {shown}"
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            answer = await client.get(path, headers=headers)
        await gateway_of(app).close()
        return answer.status_code

    return asyncio.run(main())


@pytest.mark.parametrize("path", [API[0], API[2]])
@pytest.mark.parametrize(
    ("api_keys", "admin_key", "host", "key", "expected"),
    [
        ((), None, HERE, None, 200),
        ((), None, ELSEWHERE, None, 401),
        ((), None, ELSEWHERE, "anything", 401),
        ((CLIENT,), None, HERE, None, 401),
        ((CLIENT,), None, HERE, CLIENT, 200),
        ((CLIENT,), None, ELSEWHERE, CLIENT, 401),
        ((), ADMIN, HERE, None, 401),
        ((), ADMIN, HERE, ADMIN, 200),
        ((), ADMIN, ELSEWHERE, ADMIN, 200),
        ((), ADMIN, ELSEWHERE, ADMIN + "x", 401),
        ((CLIENT,), ADMIN, HERE, CLIENT, 401),
    ],
)
def test_hosts_and_keys(
    path: str,
    api_keys: tuple[str, ...],
    admin_key: str | None,
    host: str,
    key: str | None,
    expected: int,
) -> None:
    settings = GatewaySettings(api_keys=api_keys, admin_key=admin_key)
    assert status_of(settings, host, key, path=path) == expected


@pytest.mark.parametrize("host", [HERE, ELSEWHERE])
@pytest.mark.parametrize("admin_key", [None, ADMIN])
@pytest.mark.parametrize(("key", "expected"), [(OPERATORS, 200), (TENANTS, 403)])
def test_administrators_tokens_open_it_and_tenants_do_not(
    host: str, admin_key: str | None, key: str, expected: int
) -> None:
    settings = GatewaySettings(admin_key=admin_key)
    assert status_of(settings, host, key, with_accounts=True) == expected


def test_once_there_is_a_token_nobody_comes_in_without_one() -> None:
    assert status_of(GatewaySettings(), HERE, None, with_accounts=True) == 401


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("localhost", 200),
        ("LOCALHOST:8000", 200),
        ("127.0.0.1:8000", 200),
        ("[::1]:8000", 200),
        ("evil.example", 403),
        ("localhost.evil.example:8000", 403),
        ("127.0.0.1.evil.example", 403),
        ("", 403),
    ],
)
def test_a_name_that_leads_here_from_elsewhere_opens_nothing(name: str, expected: int) -> None:
    assert status_of(GatewaySettings(), HERE, None, name=name) == expected


def test_a_key_opens_it_under_any_name() -> None:
    settings = GatewaySettings(admin_key=ADMIN)
    assert status_of(settings, ELSEWHERE, ADMIN, name="gateway.example") == 200


def test_streams_are_guarded_too() -> None:
    assert status_of(GatewaySettings(), ELSEWHERE, None, path=API[1]) == 401


def get(path: str, headers: dict[str, str] | None = None) -> httpx.Response:
    async def main() -> httpx.Response:
        app = create_app(
            GatewaySettings(), ScriptedBackend(), ServedModel(("t",), byte_text_side())
        )
        transport = httpx.ASGITransport(app, client=(ELSEWHERE, 1234))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            return await client.get(path, headers=headers)

    return asyncio.run(main())


def test_the_page_is_confined() -> None:
    page = get("/dashboard")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    rules = dict(
        rule.strip().partition(" ")[::2]
        for rule in page.headers["content-security-policy"].split(";")
    )
    assert rules["default-src"] == "'none'"
    assert {rules[name] for name in ("script-src", "style-src", "img-src", "connect-src")} == {
        "'self'"
    }
    assert rules["frame-ancestors"] == "'none'"
    assert page.headers["x-content-type-options"] == "nosniff"
    assert page.headers["referrer-policy"] == "no-referrer"


def test_files_are_revalidated_by_their_content() -> None:
    first = get("/dashboard/static/style.css")
    assert first.headers["content-type"] == "text/css; charset=utf-8"
    tag = first.headers["etag"]
    again = get("/dashboard/static/style.css", {"if-none-match": tag})
    assert (again.status_code, again.content) == (304, b"")


def test_a_slash_leads_to_the_page() -> None:
    answer = get("/dashboard/")
    assert (answer.status_code, answer.headers["location"]) == (308, "../dashboard")


@pytest.mark.parametrize("name", ["..%2Froutes.py", "routes.py", "none.js", "%2e%2e/assets.py"])
def test_nothing_but_the_page_s_files_is_served(name: str) -> None:
    assert get(f"/dashboard/static/{name}").status_code == 404


def test_the_files_refer_to_nothing_elsewhere_and_to_all_that_is_there() -> None:
    referred: set[str] = set()
    for path in STATIC.iterdir():
        text = path.read_text()
        outside = re.findall(r"(?:https?:)?//[\w.]+\.[a-z]{2,}[^\s\"')]*", text)
        allowed = [url for url in outside if "www.w3.org/" in url]
        assert outside == allowed, f"{path.name} refers to {outside}"
        referred |= set(re.findall(r"(?:static/|from \"\./)([\w.]+)", text))
        for forbidden in ("innerHTML", "eval(", "document.write", ' style="'):
            assert forbidden not in text, f"{path.name} has {forbidden}"
    assert referred == {path.name for path in STATIC.iterdir()} - {"index.html"}


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_text_has_the_contrast_of_wcag_aa_in_light_and_dark() -> None:
    style = (STATIC / "style.css").read_text()
    light, dark = (
        dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", block))
        for block in re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    )
    dark = light | dark
    pairs = [
        (text, ground)
        for text in ("text", "muted", "accent", "prefill", "decode", "mixed", "good", "bad")
        for ground in ("bg", "surface", "sunken")
    ]
    pairs += [("bad", "bad-soft"), ("on-accent", "accent")]
    for colors in (light, dark):
        for text, ground in pairs:
            bright, dim = sorted((luminance(colors[text]), luminance(colors[ground])), reverse=True)
            ratio = (bright + 0.05) / (dim + 0.05)
            assert ratio >= 4.5, f"{text} on {ground}: {ratio:.2f}"
