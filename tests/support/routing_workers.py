"""Workers and reports as a router sees them, and a clock that tests move."""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.protocol.messages import Load, Peer, Role, WorkerInfo

BLOCK_TOKENS = 32


@dataclass
class ManualClock:
    """Seconds that pass when told."""

    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def worker_info(
    instance_id: str,
    role: Role = "mixed",
    *,
    num_kv_blocks: int = 1000,
    max_model_len: int = 16_384,
) -> WorkerInfo:
    return WorkerInfo(
        instance_id=instance_id,
        role=role,
        pid=1,
        model="model",
        architecture="llama",
        dtype="bf16",
        vocab_size=1000,
        max_model_len=max_model_len,
        block_size=BLOCK_TOKENS,
        num_kv_blocks=num_kv_blocks,
        kv_bytes_per_block=1 << 20,
        weight_bytes=0,
        max_num_seqs=64,
        peer=Peer(instance_id, "unix:/none"),
        max_num_batched_tokens=1024,
    )


def load_report(
    *,
    running: int = 0,
    kv_blocks_used: int = 0,
    prefill_tokens_waiting: int = 0,
    prefill_tokens_per_s: float = 0.0,
    decode_step_s: float = 0.0,
    last_charge: int = 0,
) -> Load:
    return Load(
        step=1,
        running=running,
        waiting=0,
        kv_blocks_used=kv_blocks_used,
        kv_blocks_total=1000,
        step_tokens=0,
        preemptions=0,
        prefix_queries=0,
        prefix_hits=0,
        prefill_tokens_waiting=prefill_tokens_waiting,
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_step_s=decode_step_s,
        last_charge=last_charge,
    )


def chain(*names: int) -> list[bytes]:
    """Hashes of a chain of blocks: equal prefixes of names give equal hashes."""
    hashes, parent = [], b""
    for name in names:
        parent = (parent + b"/%d" % name)[-32:].rjust(32, b"0")
        hashes.append(parent)
    return hashes
