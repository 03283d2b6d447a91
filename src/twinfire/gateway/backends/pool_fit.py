"""Whether a worker computes the same as the others of its pool, and what differs if not.

Instruction set, threads, memory and draft heads are not compared: they change neither the results
nor the form in which blocks travel.
"""

from __future__ import annotations

from twinfire.protocol.messages import Fingerprint, WorkerInfo

_COMPARED = tuple(name for name in Fingerprint.__struct_fields__ if name != "draft")


def unfit_reason(info: WorkerInfo, expected: Fingerprint | None, other: WorkerInfo | None) -> str:
    """Return why a worker may not join; empty when it may.

    It has to match `expected` where that is given, else `other`, which is in the pool already.
    """
    sizes = {
        "block_size": info.block_size,
        "num_kv_blocks": info.num_kv_blocks,
        "max_model_len": info.max_model_len,
        "vocab_size": info.vocab_size,
    }
    for name, size in sizes.items():
        if size < 1:
            return f"the worker's {name} is {size}"
    differences: list[str] = []
    if other is not None:
        differences += _differences(info, other, ("vocab_size", "block_size"))
    wanted = expected if expected is not None else (other.fingerprint if other else None)
    if wanted is not None and info.fingerprint is not None:
        differences += _differences(info.fingerprint, wanted, _COMPARED)
    elif (wanted is None) != (info.fingerprint is None) and (expected or other):
        one = "the pool" if info.fingerprint is None else "the worker"
        differences.append(f"only {one} has a fingerprint")
    return "; ".join(dict.fromkeys(differences))


def _differences(theirs: object, ours: object, names: tuple[str, ...]) -> list[str]:
    return [
        f"the worker's {name} is {getattr(theirs, name)!r}, the pool's is {getattr(ours, name)!r}"
        for name in names
        if getattr(theirs, name) != getattr(ours, name)
    ]
