"""Workers of one model with a head and without: one pool, and streams that are the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from support.default_head_folder import write_default_head
from support.default_model import default_model_path
from support.real_prompts import real_prompts
from support.running_worker import INFO
from support.scripted_cluster import ScriptedGateway, WorkerPrograms
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.gateway.backends.pool_fit import unfit_reason
from twinfire.protocol.messages import Fingerprint
from twinfire.protocol.sampling import SamplingParams

FINGERPRINT = Fingerprint("weights", "bf16", ("target:1:1:16:bf16",), 32, "1")


def test_a_pool_takes_workers_with_any_head_and_none() -> None:
    first = msgspec.structs.replace(INFO, fingerprint=FINGERPRINT)
    for draft in ("", "draft:1:1:16:bf16,key", "draft:1:1:16:bf16,other"):
        fingerprint = msgspec.structs.replace(FINGERPRINT, draft=draft)
        info = msgspec.structs.replace(INFO, fingerprint=fingerprint)
        assert unfit_reason(info, None, first) == unfit_reason(info, FINGERPRINT, None) == ""
        assert fingerprint.matches(FINGERPRINT)
    other = msgspec.structs.replace(FINGERPRINT, model_key="others")
    assert not other.matches(FINGERPRINT)
    worker = msgspec.structs.replace(INFO, fingerprint=other)
    assert "model_key" in unfit_reason(worker, None, first)


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["unix", "nixl"])
def test_processes_with_other_heads_hand_over(tmp_path: Path, transport: str) -> None:
    if transport == "nixl":
        pytest.importorskip("nixl_cu12", reason="NIXL is not installed (extra `nixl`)")
    model = default_model_path()
    heads = [write_default_head(tmp_path / f"head{seed}", seed) for seed in range(2)]
    prompts = real_prompts(open_checkpoint(model).tokenizer(), [40, 64, 100])

    async def scenario() -> None:
        address = f"unix:{tmp_path}/gw" if transport == "unix" else "tcp:127.0.0.1:0"
        gateway = ScriptedGateway(address)
        await gateway.listen()
        programs = WorkerPrograms(tmp_path, model, gateway.address, transport)

        def start(role: str, speculate: str) -> int:
            settings = {"kv_cache_bytes": 100 << 20, "max_model_len": 512, "kv_checksums": True}
            return programs.start(role, speculate=speculate, **settings).pid  # type: ignore[arg-type]

        hybrid = [f"hybrid:adaptive=false,head={head}" for head in heads]
        try:
            async with asyncio.timeout(120):
                plain = await gateway.ready("mixed", start("mixed", "off"))
                decode = await gateway.ready("decode", start("decode", hybrid[0]))
                expected = [
                    await gateway.finished(gateway.submit(plain, prompt.tolist(), sampling(index)))
                    for index, prompt in enumerate(prompts)
                ]
                for speculate in ("off", *hybrid):
                    prefill = await gateway.ready("prefill", start("prefill", speculate))
                    for index, prompt in enumerate(prompts):
                        request = gateway.submit(
                            prefill, prompt.tolist(), sampling(index), decode=decode
                        )
                        answer = await gateway.finished(request)
                        assert answer.tokens == expected[index].tokens
                        assert answer.finish == expected[index].finish
                assert decode.load is not None
                assert sum(decode.load.drafted) > 0
        finally:
            programs.close()
            gateway.close()

    asyncio.run(scenario())


@pytest.mark.slow
def test_processes_with_one_head_draft_from_the_first_step_on(tmp_path: Path) -> None:
    model = default_model_path()
    prompts = real_prompts(open_checkpoint(model).tokenizer(), [40, 64, 100])
    speculate = f"eagle3:adaptive=false,head={write_default_head(tmp_path / 'head')}"

    async def scenario() -> None:
        gateway = ScriptedGateway(f"unix:{tmp_path}/gw")
        await gateway.listen()
        programs = WorkerPrograms(tmp_path, model, gateway.address, "unix")

        def start(role: str) -> int:
            settings = {"kv_cache_bytes": 100 << 20, "max_model_len": 512}
            return programs.start(role, speculate=speculate, **settings).pid  # type: ignore[arg-type]

        try:
            async with asyncio.timeout(120):
                decode = await gateway.ready("decode", start("decode"))
                prefill = await gateway.ready("prefill", start("prefill"))
                # A draft is of use in the first step alone: the third token is never computed.
                short = SamplingParams(max_tokens=3, seed=1, temperature=0.0, ignore_eos=True)
                for prompt in prompts:
                    request = gateway.submit(prefill, prompt.tolist(), short, decode=decode)
                    await gateway.finished(request)
                while decode.load is None or sum(decode.load.drafted) < len(prompts):
                    await asyncio.sleep(0.05)
        finally:
            programs.close()
            gateway.close()

    asyncio.run(scenario())


def sampling(seed: int) -> SamplingParams:
    return SamplingParams(max_tokens=40, seed=seed, temperature=0.8 * (seed % 2), ignore_eos=True)
