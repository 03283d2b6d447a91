"""What travels between a gateway and a worker.

One stream per pair multiplexes every request. Gateway to worker: `Hello`, `Submit`, `Cancel`.
Worker to gateway: `Loading` while it starts, `Ready` once, then one `StepFrame` per engine step
with all new tokens, and `Rejected` for a request that was not admitted. Token ids only, no text.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.startup_stages import Stage

PROTOCOL_VERSION = 1
"""Raised whenever a message changes shape; peers of another version are refused."""

Role = Literal["mixed", "prefill", "decode"]
FinishReason = Literal["stop", "length", "cancelled", "error"]
ALL_CHOICES = -1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A gateway introduces itself; the first message on a link."""

    protocol_version: int
    gateway_id: str


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request for `sampling.n` choices after one prompt."""

    request_id: int
    """The gateway's counter; never the client's id."""
    prompt: bytes
    """u32 token ids (`tokens.pack_ids`)."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs earlier when the worker schedules by priority."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only among equal salts."""


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop one choice, or all of them; unknown ids are ignored."""

    request_id: int
    choice: int = ALL_CHOICES


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of the worker's start; `total` 0 when it is not known."""

    stage: str
    done: int = 0
    total: int = 0


class WorkerInfo(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway must know of a worker."""

    instance_id: str
    """Names this life of the process."""
    role: Role
    pid: int
    model: str
    architecture: str
    dtype: str
    vocab_size: int
    """Rows of the output head; ids at or above it cannot be drawn or fed."""
    max_model_len: int
    block_size: int
    num_kv_blocks: int
    kv_bytes_per_block: int
    weight_bytes: int
    max_num_seqs: int
    startup_stages: tuple[Stage, ...] = ()


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker takes requests from now on."""

    info: WorkerInfo


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The worker cannot start or cannot go on; it exits after this."""

    message: str


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag="rejected"):
    """A request was not admitted. `status` is the HTTP class of the fault (400, 429, 503)."""

    request_id: int
    message: str
    status: int = 400
    param: str | None = None
    code: str | None = None


class LogprobRows(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens, row by row.

    `token_logprobs` f32 [rows] and `ranks` u32 [rows] (1 = most likely) are of the tokens
    themselves; `top_ids` u32 and `top_logprobs` f32 are [rows, k], most likely first.
    """

    k: int
    token_logprobs: bytes
    ranks: bytes
    top_ids: bytes
    top_logprobs: bytes


class PromptDone(msgspec.Struct, frozen=True, array_like=True):
    """A prompt has been computed; sent once per request, with its first tokens."""

    request_id: int
    cached_tokens: int
    """Prompt tokens that nobody computed for this request."""
    queue_s: float
    """From arrival at the worker to the first scheduled token."""
    prefill_s: float
    """From the first scheduled token to the first drawn one."""
    prompt_logprobs: LogprobRows | None = None
    """Of prompt tokens 1.. (the first has no context)."""


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in a step."""

    request_id: int
    choice: int
    tokens: bytes
    """u32 new output ids, the ending token included."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The request's own stop id that ended it; None for the model's end token."""
    logprobs: LogprobRows | None = None


class Load(msgspec.Struct, frozen=True, array_like=True):
    """A worker's state after a step. Counters run from the start of its life."""

    step: int
    """The liveness counter."""
    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    step_tokens: int
    """Tokens computed in this step."""
    preemptions: int
    prefix_queries: int
    """Prompt tokens looked up in the prefix cache."""
    prefix_hits: int
    """Those found."""


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything one engine step produced for one gateway."""

    load: Load
    prompts: tuple[PromptDone, ...] = ()
    deltas: tuple[ChoiceDelta, ...] = ()


ToWorker = Hello | Submit | Cancel
ToGateway = Loading | Ready | Failed | Rejected | StepFrame
