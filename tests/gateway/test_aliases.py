"""More names for a model: what answers carry, what lists show, and what is refused."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from openai import OpenAI

from support.external_gateway import CHAT, external_gateway, external_table
from support.gateway_server import ALIAS, MODEL, byte_text_side, running_gateway
from support.mock_vllm import Fabric, mock_vllm
from support.scripted_backend import ScriptedBackend
from twinfire.cli.alias_option import parse_aliases
from twinfire.cli.main import build_parser
from twinfire.cli.serve_options import serve_options
from twinfire.cli.up_command import _with_options
from twinfire.cluster.cluster_file import read_cluster_file
from twinfire.gateway.app import create_app_of_models
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.external.external_pool import ExternalPool
from twinfire.gateway.hosted_model import HostedModel, HostedModels
from twinfire.gateway.served_model import ServedModel
from twinfire.gateway.settings import GatewaySettings
from twinfire.protocol.errors import InvalidRequest

KIMI = "@cf/moonshotai/kimi-k2.5"
USER = [{"role": "user", "content": "hi"}]


def test_an_alias_answers_by_the_name_that_was_asked() -> None:
    aliases = {KIMI: MODEL, "@cf/kimi/k2.5": ALIAS}
    with (
        running_gateway(GatewaySettings(aliases=aliases)) as gateway,
        OpenAI(base_url=gateway.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        assert [card.id for card in client.models.list()] == [MODEL, ALIAS, *aliases]
        assert client.models.retrieve(KIMI).id == KIMI
        for name in (MODEL, *aliases):
            answer = client.chat.completions.create(model=name, messages=USER)
            assert answer.model == name
            stream = client.chat.completions.create(model=name, messages=USER, stream=True)
            assert {chunk.model for chunk in stream} == {name}


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"x": "nobody"}, "the alias `x` stands for `nobody`, which is not served; there are `a`"),
        ({"a": "a"}, "the alias `a` is a model's own name"),
        ({"x": "y", "y": "a"}, "the alias `x` stands for `y`"),
    ],
)
def test_an_alias_that_leads_nowhere_is_refused(aliases: dict[str, str], message: str) -> None:
    hosted = [HostedModel.of(ServedModel(("a",)), ScriptedBackend())]
    with pytest.raises(InvalidRequest, match=message):
        HostedModels(hosted, aliases)


def test_an_alias_of_a_model_that_other_engines_serve() -> None:
    async def main() -> None:
        async with mock_vllm(Fabric()) as engine:
            table = external_table("vllm", [engine.url])
            settings = GatewaySettings(aliases={KIMI: "public", "own": "t"})
            async with external_gateway(table, settings) as gateway:
                for name in ("public", KIMI):
                    answer = await gateway.post({**CHAT, "model": name})
                    assert (answer.status, answer.json()["model"]) == (200, name)
                assert [body["model"] for body in engine.bodies] == ["engine-model"] * 2
                assert (await gateway.post({**CHAT, "model": "own"})).json()["model"] == "own"
                async with gateway.session.get(gateway.url + "/v1/models") as response:
                    cards = (await response.json())["data"]
                assert [card["id"] for card in cards] == ["t", "own", "public", KIMI]

    asyncio.run(asyncio.wait_for(main(), 30))


@pytest.mark.parametrize(
    ("aliases", "message"),
    [
        ({"x": "nobody"}, "`x` stands for `nobody`, which is not served; there are `a`, `b`"),
        ({"b": "a"}, "the alias `b` is a model's own name"),
        ({"a": "b"}, "the alias `a` is a model's own name"),
        ({"b": "b"}, "the alias `b` is a model's own name"),
        ({"x": "y", "y": "b"}, "the alias `x` stands for `y`"),
    ],
)
def test_an_alias_between_own_and_external_models(aliases: dict[str, str], message: str) -> None:
    own = HostedModel.of(ServedModel(("a",), byte_text_side()), ScriptedBackend())
    external = ExternalModels([ExternalPool(("b",), external_table("vllm", ["http://h:1"]))])

    async def main() -> None:
        create_app_of_models(GatewaySettings(aliases=aliases), [own], external=external)

    with pytest.raises(InvalidRequest, match=message):
        asyncio.run(main())


def test_the_option_of_serve() -> None:
    args = build_parser().parse_args(["serve", "--alias", f"{KIMI}=m", "--alias", "b = a=c"])
    assert serve_options(args).aliases == {KIMI: "m", "b": "a=c"}


@pytest.mark.parametrize("text", ["x", "=m", "x=", " = "])
def test_an_option_that_is_no_pair(text: str) -> None:
    with pytest.raises(InvalidRequest, match="--alias takes NAME=MODEL"):
        parse_aliases([text])
    with pytest.raises(InvalidRequest, match="`a` to two models"):
        parse_aliases(["a=b", "a=c"])


def test_the_file_and_the_option_of_up_together(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[gateway.aliases]\n"{KIMI}" = "m"\nother = "m"\n')
    args = build_parser().parse_args(["up", str(path), "--alias", "other=n"])
    gateway = _with_options(read_cluster_file(path), args).gateway
    assert gateway.aliases == {KIMI: "m", "other": "n"}
