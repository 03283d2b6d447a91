"""The file of `twinfire up`: defaults, overrides, and faults that name their field."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinfire.cluster.cluster_file import ClusterFile, read_cluster_file
from twinfire.protocol.errors import InvalidRequest


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


def test_a_list_of_models_keeps_its_order(tmp_path: Path) -> None:
    cluster = read(tmp_path, "[[model]]\nmodel = 'a'\n[[model]]\nmodel = 'b'")
    assert [model.model for model in cluster.models] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
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
