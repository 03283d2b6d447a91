"""The file of `twinfire up`: defaults, overrides, and faults that name their field."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

from twinfire.cluster.cluster_file import ClusterFile, read_cluster_file
from twinfire.gateway.routing.routing_settings import RoutingSettings
from twinfire.protocol.errors import InvalidRequest

DOCUMENT = Path(__file__).parents[2] / "docs" / "cluster.md"


def read(tmp_path: Path, text: str) -> ClusterFile:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    return read_cluster_file(path)


def test_an_empty_file_is_one_prefill_and_one_decode_worker(tmp_path: Path) -> None:
    cluster = read(tmp_path, "")
    assert cluster == ClusterFile()
    assert [(role, pool.count) for role, pool in cluster.models[0].pools()] == [
        ("prefill", 1),
        ("decode", 1),
        ("mixed", 0),
    ]


def test_what_is_given_replaces_the_defaults(tmp_path: Path) -> None:
    cluster = read(
        tmp_path,
        """
        [gateway]
        port = 9000
        workers = "tcp:127.0.0.1:9100"
        [model]
        model = "some.gguf"
        names = ["m"]
        prefill = { count = 3 }
        decode = { count = 2, kv_cache_memory = 1_000_000 }
        """,
    )
    assert (cluster.gateway.port, cluster.gateway.workers) == (9000, "tcp:127.0.0.1:9100")
    assert (cluster.models[0].prefill.count, cluster.models[0].decode.kv_cache_memory) == (
        3,
        1_000_000,
    )


def test_how_a_model_guesses_tokens_ahead_is_checked_with_the_file(tmp_path: Path) -> None:
    models = "[[model]]\nmodel = 'a'\n[[model]]\nmodel = 'b'\nspeculate = 'suffix:max_drafts={}'"
    cluster = read(tmp_path, models.format(8))
    assert [model.speculate for model in cluster.models] == ["off", "suffix:max_drafts=8"]
    with pytest.raises(InvalidRequest, match=r"model\[1\]\.speculate: max_drafts is '99'; .* 64"):
        read(tmp_path, models.format(99))


def test_a_list_of_models_keeps_its_order(tmp_path: Path) -> None:
    cluster = read(tmp_path, "[[model]]\nmodel = 'a'\n[[model]]\nmodel = 'b'")
    assert [model.model for model in cluster.models] == ["a", "b"]


EXTERNAL = """
[[model]]
model = "a"
[[model]]
names = ["x", "y"]
[model.external]
engine = "sglang"
prefill = ["http://p:1"]
decode = ["http://d:2"]
bootstrap_ports = [9]
"""


def test_a_model_of_other_engines_has_no_workers_of_ours(tmp_path: Path) -> None:
    cluster = read(tmp_path, EXTERNAL)
    assert [model.model for model in cluster.models] == ["a"]
    ((names, external),) = cluster.external_models
    assert names == ("x", "y")
    assert (external.engine, external.decode, external.mixed) == ("sglang", ("http://d:2",), ())


def test_such_models_may_be_all_there_is(tmp_path: Path) -> None:
    text = "[model]\nnames = ['x']\nexternal = { engine = 'vllm', mixed = ['http://h'] }"
    cluster = read(tmp_path, text)
    assert cluster.models == ()
    assert len(cluster.external_models) == 1


def test_routing_is_told_by_its_own_table_and_the_policy_beside_it(tmp_path: Path) -> None:
    text = "pd_policy = 'never'\n[gateway.routing]\nmax_kv_fill = 0.5\nsession_ttl_s = 60"
    routing = read(tmp_path, "[gateway]\n" + text).routing
    assert routing == RoutingSettings(pd_policy="never", max_kv_fill=0.5, session_ttl_s=60)
    assert read(tmp_path, "").routing == RoutingSettings()


def test_the_documented_routing_defaults_are_the_real_ones() -> None:
    found = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", DOCUMENT.read_text(), re.MULTILINE))
    real = {
        name: value
        for name, value in msgspec.structs.asdict(RoutingSettings()).items()
        if name != "pd_policy"
    }
    assert {name: float(text.replace(",", "")) for name, text in found.items()} == real


@pytest.mark.parametrize(
    ("stanza", "message"),
    [
        ("engine = 'vllm'", r"needs URLs in `mixed`, or in both .*\(0 and 0 are given\)"),
        ("engine = 'vllm', decode = ['http://h']", r"\(0 and 1 are given\)"),
        ("engine = 'vllm', mixed = ['http://h'], decode = ['http://i']", "external.mixed"),
        ("engine = 'tgi', mixed = ['http://h']", "tgi"),
        ("mixed = ['http://h']", "engine"),
        ("engine = 'vllm', mixed = ['h:8000']", r"mixed\[0\]: `h:8000` is not an http"),
        ("engine = 'vllm', mixed = ['http://h:x']", r"mixed\[0\]: .* is not a URL"),
        ("engine = 'vllm', mixed = ['http://u:p@h']", "would show its key"),
        ("engine = 'vllm', mixed = ['http://h/v1']", "more than a host and a port"),
        ("engine = 'vllm', mixed = ['http://h', 'http://h/']", r"mixed\[1\]: .* there already"),
        (
            "engine = 'vllm', prefill = ['http://h'], decode = ['http://i'], bootstrap_ports = [1]",
            "SGLang's, not vllm's",
        ),
        (
            "engine = 'sglang', prefill = ['http://h'], decode = ['http://i'], "
            "bootstrap_ports = [1, 2]",
            "2 ports for 1 prefill servers",
        ),
        ("engine = 'vllm', mixed = ['http://h'], max_attempts = 0", "max_attempts is 0"),
        ("engine = 'vllm', mixed = ['http://h'], health_interval_s = 0", "health_interval_s is 0"),
        ("engine = 'vllm', mixd = ['http://h']", "did you mean `mixed`"),
    ],
)
def test_a_wrong_stanza_of_other_engines_names_its_field(
    tmp_path: Path, stanza: str, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path, f"[model]\nnames = ['x']\nexternal = {{ {stanza} }}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[[model]]\n[[model]]\nexternal = { engine = 'vllm', mixed = ['http://h'] }",
            r"model\[1\].names: an external model needs at least one name",
        ),
        (
            "[model]\nnames = ['x']\nprefill = { count = 1 }\n"
            "external = { engine = 'vllm', mixed = ['http://h'] }",
            "model.prefill: a model with `external` has no workers",
        ),
        ("[gateway.routing]\nmax_kv_fil = 0.5", "did you mean `max_kv_fill`"),
        ("[gateway.routing]\nmax_kv_fill = 1.5", r"<= 1.0 - at `\$.gateway.routing.max_kv_fill`"),
        ("[gateway.routing]\nageing_s = 0", "> 0.0"),
        ("[gateway.routing]\nmax_sessions = 0", ">= 1"),
        ("[gateway.routing]\npd_policy = 'never'", "write it as gateway.pd_policy"),
        ("[gateway]\ndrain_timeout_s = -1", "drain_timeout_s must not be below 0"),
        ("[gateway]\nprot = 1", "did you mean `port`"),
        ("[gateway]\nport = 'x'", "gateway.port"),
        ("[model]\nprefill = { count = -1 }", "model.prefill.count is -1"),
        ("[model]\ndecode = { count = 0 }", "nobody could decode"),
        ("[gateway]\npd_policy = 'maybe'", "maybe"),
        ("[gateway", "is not TOML"),
        ("[[model]]\n[[model]]\ndecode = { count = 0 }", r"model\[1\].decode.count"),
        ("[[model]]\nmodle = 'a'", "did you mean `model`"),
        ("model = []", "there is no model"),
    ],
)
def test_a_wrong_file_names_its_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(tmp_path, text)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"nowhere.toml: No such file"):
        read_cluster_file(tmp_path / "nowhere.toml")
