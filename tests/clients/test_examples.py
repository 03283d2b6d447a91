"""Every program under `examples/`, with its client from the registry, against `twinfire up`.

Clients are installed once a set of requirements, outside the project's own environment.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.serve_process import ServeProcess, serve_process, up_process

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
INSTALLED = Path(tempfile.gettempdir()) / "twinfire-examples"
KEY = "example-key"
ALIAS = "@cf/moonshotai/kimi-k2.5"
CLUSTER = f"""
[gateway]
api_keys = ["{KEY}"]
[gateway.aliases]
"{ALIAS}" = "smollm2-135m"
[model]
prefill = {{ count = 1, threads = 1, kv_cache_memory = 300_000_000 }}
decode = {{ count = 1, threads = 1, kv_cache_memory = 300_000_000 }}
"""
INSTALL_LIMIT_S = 1200
RUN_LIMIT_S = 600


def installed(client: str, requirements: str, *words: str) -> Path:
    """Run the words in a folder of these requirements, unless that has been done."""
    digest = hashlib.sha256((EXAMPLES / client / requirements).read_bytes()).hexdigest()[:12]
    folder = INSTALLED / f"{client}-{digest}"
    done = folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        shutil.copy(EXAMPLES / client / requirements, folder)
        install = subprocess.run(
            words, cwd=folder, capture_output=True, text=True, timeout=INSTALL_LIMIT_S, check=False
        )
        if install.returncode != 0:
            pytest.skip(f"{client} does not install here: {install.stderr[-500:]}")
        done.touch()
    return folder


def python_of(client: str) -> str:
    commands = f"'{sys.executable}' -m venv venv && venv/bin/pip install -q -r requirements.txt"
    folder = installed(client, "requirements.txt", "sh", "-c", commands)
    return str(folder / "venv/bin/python")


def check_output(words: list[str], cwd: Path, num_checks: int) -> None:
    done = subprocess.run(
        words,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=RUN_LIMIT_S,
        check=False,
        env={**os.environ, "no_proxy": "127.0.0.1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok     ") == num_checks, done.stdout + done.stderr


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("clients")
    (folder / "cluster.toml").write_text(CLUSTER)
    with up_process(folder, str(folder / "cluster.toml"), "--accounts-db", "none") as running:
        yield running


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    options = ("--kv-cache-memory", "256MiB", "--api-key", KEY, "--accounts-db", "none")
    with serve_process(tmp_path_factory.mktemp("clients"), *options) as running:
        yield running


def test_openai_python(server: ServeProcess) -> None:
    words = [sys.executable, "-m", "examples.openai_python", server.url, "--api-key", KEY]
    check_output(words, ROOT, 5)


def test_an_example_that_fails_says_so(server: ServeProcess) -> None:
    words = [sys.executable, "-m", "examples.openai_python", server.url, "--api-key", "wrong"]
    done = subprocess.run(
        words, cwd=ROOT, capture_output=True, text=True, timeout=RUN_LIMIT_S, check=False
    )
    assert done.returncode == 1
    assert done.stdout.count("FAILED ") == 5, done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "num_checks"),
    [("openai_python", 5), ("langchain", 11), ("litellm", 5), ("openai_agents", 10)],
)
def test_python_clients(cluster: ServeProcess, client: str, num_checks: int) -> None:
    words = [python_of(client), "-m", f"examples.{client}", cluster.url, "--api-key", KEY]
    check_output(words, ROOT, num_checks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("client", "model"),
    [
        ("openai_js", "smollm2-135m"),
        ("ai_sdk_workers_ai", "smollm2-135m"),
        ("ai_sdk_workers_ai", ALIAS),
        ("opencode", "smollm2-135m"),
    ],
)
def test_javascript_clients(cluster: ServeProcess, tmp_path: Path, client: str, model: str) -> None:
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("node and npm are not installed")
    quiet = ("--no-audit", "--no-fund", "--loglevel=error")
    packages = installed(client, "package.json", "npm", "install", *quiet) / "node_modules"
    # Modules are looked for beside the program, which must not be in the source tree.
    shutil.copytree(EXAMPLES, tmp_path / "examples", ignore=shutil.ignore_patterns("node_modules"))
    folder = tmp_path / "examples" / client
    (folder / "node_modules").symlink_to(packages)
    words = ["node", "main.mjs", cluster.url, "--api-key", KEY, "--model", model]
    check_output(words, folder, 5)


def test_every_example_has_its_page_and_its_requirements() -> None:
    folders = [path for path in EXAMPLES.iterdir() if path.is_dir() and path.name[0] != "_"]
    assert len(folders) >= 7
    for folder in folders:
        page = ROOT / "docs" / "clients" / f"{folder.name.replace('_', '-')}.md"
        assert page.is_file(), f"{folder.name} has no page"
        assert f"examples/{folder.name}" in page.read_text()
        if (folder / "package.json").exists():
            assert json.loads((folder / "package.json").read_text())["dependencies"]
        else:
            assert (folder / "requirements.txt").read_text().strip()
