"""Our gateway before real vLLM servers: as plain engines, then as a prefill/decode pair over NIXL.

Starts vLLM's CPU build (one server for `plain`, two for `pair`), puts an external pool before
it and holds its answers to what the engine itself says: text, events, usage, ids, a client that
leaves. Says what differs and whether the pair could be started at all.

    python benchmarks/external_vllm.py plain --vllm DIR/vllm --model DIR/smollm2-135m-bf16
    python benchmarks/external_vllm.py pair --vllm DIR/vllm --model DIR/smollm2-135m-bf16 \
        --nixl DIR/nixl

`DIR/nixl` comes of `pip install --no-deps --target DIR/nixl nixl nixl-cu12`, where vLLM's own
environment lacks NIXL.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import uvicorn

from twinfire.gateway.app import create_app_of_models
from twinfire.gateway.external.external_models import ExternalModels
from twinfire.gateway.external.external_pool import ExternalPool
from twinfire.gateway.external.external_table import ExternalTable
from twinfire.gateway.settings import GatewaySettings

CHAT = "/v1/chat/completions"
PUBLIC, SERVED = "public", "served"
FIRST_PORT = 8102
FIRST_SIDE_CHANNEL_PORT = 5600
START_LIMIT_S = 900
CONNECTOR = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
PROMPT = "Explain in plain words why a prompt is computed before the first token. " * 12


@dataclass(frozen=True, slots=True)
class Engine:
    url: str
    process: subprocess.Popen[bytes]
    log: Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=["plain", "pair"])
    parser.add_argument("--vllm", type=Path, required=True, help="folder of its environment")
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--nixl", type=Path, help="folder that has NIXL's modules, for `pair`")
    args = parser.parse_args()
    return asyncio.run(run(args.mode, args.vllm, args.model, args.nixl))


async def run(mode: str, vllm: Path, model: Path, nixl: Path | None) -> int:
    engines: list[Engine] = []
    try:
        for index in range(1 if mode == "plain" else 2):
            engines.append(start_engine(vllm, model, index, nixl, is_pair=mode == "pair"))
        for engine in engines:
            started_s = time.monotonic()
            if not await becomes_healthy(engine):
                print(f"the engine did not start; the end of its log:\n{tail(engine.log)}")
                return 1
            print(f"{engine.url} is ready after {time.monotonic() - started_s:.0f} s more")
        urls = [engine.url for engine in engines]
        table = ExternalTable(
            engine="vllm",
            engine_model=SERVED,
            **(
                {"prefill": (urls[0],), "decode": (urls[1],)} if urls[1:] else {"mixed": (urls[0],)}
            ),
        )
        async with gateway(table) as (url, pool), aiohttp.ClientSession() as session:
            num_wrong = await check(session, url, urls, pool)
        print("all as it should be" if not num_wrong else f"{num_wrong} checks failed")
        return 1 if num_wrong else 0
    finally:
        for engine in engines:
            stop(engine)


def engine_pools(urls: list[str]) -> dict[str, tuple[str, ...]]:
    return {"prefill": (urls[0],), "decode": (urls[1],)} if urls[1:] else {"mixed": (urls[0],)}


def start_engine(
    vllm: Path, model: Path, index: int, nixl: Path | None, *, is_pair: bool
) -> Engine:
    port = FIRST_PORT + index
    environment = os.environ | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": str(index),
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "1800",
        "HF_HUB_OFFLINE": "1",
        "LD_PRELOAD": str(vllm / "lib" / "libiomp5.so"),
        "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(FIRST_SIDE_CHANNEL_PORT + index),
        "UCX_TLS": "tcp,shm,self",
    }
    if nixl is not None:
        environment["PYTHONPATH"] = str(nixl)
    command = ["nice", "-n", "10", str(vllm / "bin" / "vllm"), "serve", str(model)]
    command += ["--served-model-name", SERVED, "--host", "127.0.0.1", "--port", str(port)]
    command += ["--max-model-len", "4096", "--dtype", "bfloat16", "--enable-prompt-tokens-details"]
    if is_pair:
        command += ["--kv-transfer-config", json.dumps(CONNECTOR)]
    log = Path(tempfile.mkstemp(prefix=f"vllm-{index}-", suffix=".log")[1])
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    return Engine(f"http://127.0.0.1:{port}", process, log)


def stop(engine: Engine) -> None:
    if engine.process.poll() is None:
        # The engine's own children are in its process group.
        os.killpg(engine.process.pid, signal.SIGTERM)
        try:
            engine.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(engine.process.pid, signal.SIGKILL)
            engine.process.wait()


async def becomes_healthy(engine: Engine) -> bool:
    end_s = time.monotonic() + START_LIMIT_S
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < end_s and engine.process.poll() is None:
            try:
                async with session.get(engine.url + "/health") as response:
                    if response.status == 200:
                        return True
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(1)
    return False


def tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-30:])


@asynccontextmanager
async def gateway(table: ExternalTable) -> AsyncIterator[tuple[str, ExternalPool]]:
    pool = ExternalPool((PUBLIC,), table)
    external = ExternalModels([pool])
    app = create_app_of_models(GatewaySettings(), [], external=external)
    await external.start()
    config = uvicorn.Config(app, port=0, lifespan="off", log_level="warning")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}", pool
    finally:
        server.should_exit = True
        await serving
        await external.close()


async def check(
    session: aiohttp.ClientSession, url: str, engines: list[str], pool: ExternalPool
) -> int:
    """Return how many of the checks failed, and print each."""
    is_pair = len(engines) > 1
    results: list[bool] = []

    def expect(what: str, is_so: bool, seen: object = "") -> None:
        results.append(is_so)
        print(f"{'ok  ' if is_so else 'FAIL'} {what} {seen}")

    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "max_tokens": 24,
        "temperature": 0,
    }
    asked, direct = {**body, "model": PUBLIC}, {**body, "model": SERVED}
    # Its own answer comes last, so that the pair's prompt is not in its prefix cache yet.
    first = await post(session, url, asked)
    own = await (
        by_hand(session, engines, direct) if is_pair else post(session, engines[0], direct)
    )
    again = await post(session, url, asked)
    text = own["choices"][0]["message"]["content"]
    for answer in (first, again):
        said = answer["choices"][0]["message"]["content"]
        expect("the text is the engine's own", said == text, "" if said == text else [said, text])
        expect("the model is the public one", answer["model"] == PUBLIC, answer["model"])
    cached = [
        (one["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") for one in (first, again)
    ]
    expect(
        "the first prompt was not cached, the second was", not cached[0] and bool(cached[1]), cached
    )
    events = await stream(session, url, {**asked, "stream_options": {"include_usage": True}})
    streamed = "".join(
        choice["delta"].get("content") or "" for event in events for choice in event["choices"]
    )
    expect("the stream says the same", streamed == text)
    expect("one id in all events", len({event["id"] for event in events}) == 1)
    expect("the stream tells its usage", events[-1]["usage"]["completion_tokens"] > 0)
    two = await post(session, url, {**asked, "n": 2, "temperature": 1})
    expect("two answers", len(two["choices"]) == 2)
    async with session.post(url + CHAT, json={**asked, "temperature": -1}) as response:
        fault = await response.json()
        expect("a bad request is refused", response.status == 400, str(fault.get("error"))[:80])
    async with session.post(url + CHAT, json={**asked, "stream": True}) as response:
        await response.content.readline()
    await asyncio.sleep(1)
    loads = [
        one.ledger.load for one in (*pool.engines.prefill.servers, *pool.engines.decode.servers)
    ]
    expect("a client that left is charged no more", not any(loads), loads)
    expect("the engine serves on", bool(await post(session, url, asked)))
    if is_pair:
        # The pair computes the last prompt token in a step of its own, whose roundings differ.
        lone = (await post(session, engines[0], direct))["choices"][0]["message"]["content"]
        print("note an engine alone says", "the same" if lone == text else [lone, text])
        expect("prompts were handed over", pool.tallies.split >= 4, pool.tallies)
    return results.count(False)


async def by_hand(session: aiohttp.ClientSession, engines: list[str], body: dict) -> dict:
    """Return the pair's own answer, its handle carried from one engine to the other."""
    asks = {"do_remote_decode": True, "do_remote_prefill": False}
    asks |= dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    held = await post(session, engines[0], {**body, "max_tokens": 1, "kv_transfer_params": asks})
    return await post(
        session, engines[1], {**body, "kv_transfer_params": held["kv_transfer_params"]}
    )


async def post(session: aiohttp.ClientSession, url: str, body: dict) -> dict:
    async with session.post(url + CHAT, json=body) as response:
        answer = await response.json()
        if response.status != 200:
            raise SystemExit(f"{url} answered {response.status}: {answer}")
        return answer


async def stream(session: aiohttp.ClientSession, url: str, body: dict) -> list[dict]:
    async with session.post(url + CHAT, json={**body, "stream": True}) as response:
        lines = (await response.text()).split("\n")
    datas = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    return [json.loads(data) for data in datas if data != "[DONE]"]


if __name__ == "__main__":
    sys.exit(main())
