"""What travels between a gateway and a worker.

One stream per pair multiplexes every request. Gateway to worker: `Hello`, `Submit`, `Reserve`,
`Cancel`, `SetRole`, `DrainWorker`, `ResyncCache`, `Refused`. Worker to gateway: `Loading` while it
starts, `Ready`, then one `StepFrame` per engine step with all new tokens, `Alive` in between,
`CacheEvents`, and `Rejected` or `HandOffFailed` for a request that was not served. Token ids only,
no text. What workers say to each other is in `peer_messages`.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.startup_stages import Stage

PROTOCOL_VERSION = 3
"""Raised whenever a message changes shape; peers of another version are refused."""

Role = Literal["mixed", "prefill", "decode"]
FinishReason = Literal["stop", "length", "cancelled", "error", "timeout"]
ALL_CHOICES = -1


class Hello(msgspec.Struct, frozen=True, array_like=True, tag="hello"):
    """A gateway introduces itself; the first message on a link."""

    protocol_version: int
    gateway_id: str


class Peer(msgspec.Struct, frozen=True, array_like=True):
    """Where another worker is reached."""

    instance_id: str
    """Of the life that is meant; a later process at the same address is another peer."""
    control: str
    """Address of its peer links (`addresses`)."""
    data: str = ""
    """Where its KV connector is reached; only the connector of that kind reads it."""


class HandOff(msgspec.Struct, frozen=True, array_like=True):
    """Asks a prefill worker to give the request, once its prompt is computed, to `decode`."""

    decode: Peer
    num_uncached_tokens: int | None = None
    """Tokens of prompt and output that the gateway expects to be computed; None is all."""


class PrefixPull(msgspec.Struct, frozen=True, array_like=True):
    """Another worker that holds more of the prompt's blocks than this one may."""

    holder: Peer
    num_blocks: int
    """Leading blocks that it is believed to hold."""


class Submit(msgspec.Struct, frozen=True, array_like=True, tag="submit"):
    """A request for the choices of one prompt.

    A resumed request carries what its choices have output already: their tokens count as computed
    work to repeat, not as new output, and drawing goes on where it stopped.
    """

    request_id: int
    """The gateway's counter; never the client's id."""
    prompt: bytes
    """u32 token ids (`tokens.pack_ids`)."""
    sampling: SamplingParams
    priority: int = 0
    """Lower runs earlier when the worker schedules by priority."""
    cache_salt: str = ""
    """Prefix-cache entries are shared only among equal salts."""
    attempt: int = 0
    """Which try of the request this is; with gateway and request id it names a hand-off."""
    choices: tuple[int, ...] = ()
    """Indices of the choices to compute; empty means all `sampling.n`."""
    outputs: tuple[bytes, ...] = ()
    """What each of `choices` has output (u32 ids); empty when nothing was."""
    timeout_s: float | None = None
    """What is left of the request's time; None for no limit."""
    hand_off: HandOff | None = None
    pull: PrefixPull | None = None
    prediction: bytes = b""
    """What the client expects the output to be (u32 ids); drafts come from it, never tokens."""


class Reserve(msgspec.Struct, frozen=True, array_like=True, tag="reserve"):
    """Tells a decode worker that `prefill_instance` will hand it this request.

    It takes blocks only when that worker opens the hand-off.
    """

    submit: Submit
    prefill_instance: str


class SetRole(msgspec.Struct, frozen=True, array_like=True, tag="set_role"):
    """Changes what gateways ask of a worker, without a restart."""

    role: Role


class DrainWorker(msgspec.Struct, frozen=True, array_like=True, tag="drain"):
    """Take nothing new, finish what runs, serve reads until nobody needs them, end."""


class ResyncCache(msgspec.Struct, frozen=True, array_like=True, tag="resync_cache"):
    """Asks for all block hashes anew, after a gap in `CacheEvents`."""


class Refused(msgspec.Struct, frozen=True, array_like=True, tag="refused"):
    """The gateway takes nothing from this worker, and closes the link.

    `message` says why, for whoever runs the worker; dialling again helps once that has changed.
    """

    message: str


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """Stop one choice, or all of them; unknown ids are ignored."""

    request_id: int
    choice: int = ALL_CHOICES


class Loading(msgspec.Struct, frozen=True, array_like=True, tag="loading"):
    """Progress of the worker's start; `total` 0 when it is not known."""

    stage: str
    done: int = 0
    total: int = 0


class Fingerprint(msgspec.Struct, frozen=True, array_like=True):
    """What must be equal for two workers to serve one model and to exchange KV.

    Instruction set, thread count and memory layout are not among it: blocks travel in one layout.
    """

    model_key: str
    """Content key of the weight files."""
    weight_format: str
    """The format computed with: bf16, int8, q4_0 ..."""
    kv_groups: tuple[str, ...]
    """Those of the model, each as `name:layers:heads:head_dim:dtype`."""
    block_size: int
    kernel_version: str
    """Changes whenever the kernels' results do."""
    draft: str = ""
    """The groups of a draft head and its content key, empty without one. It need not be equal:
    blocks then travel without these groups, and nothing that is said depends on them."""

    def matches(self, other: Fingerprint) -> bool:
        """Whether all is equal that has to be."""
        return msgspec.structs.replace(self, draft=other.draft) == other


SHORT_ID_CHARS = 8
"""Of an instance id, where a person reads it."""


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
    host: str = ""
    fingerprint: Fingerprint | None = None
    """What must be equal for two workers to exchange KV."""
    peer: Peer | None = None
    """Where other workers reach this one; None where it exchanges no KV."""
    max_num_batched_tokens: int = 0
    draining: bool = False
    """It takes nothing new; what it was given goes on."""
    name: str = ""
    """As whoever started it calls it; others may have the same."""

    @property
    def short_name(self) -> str:
        """What logs call it: its name, or the beginning of its instance id."""
        return self.name or self.instance_id[:SHORT_ID_CHARS]


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The worker takes requests from now on; sent again when its role changes or it drains."""

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


class HandOffTimes(msgspec.Struct, frozen=True, array_like=True):
    """Where the time of a handed-over prompt went, and what moved; durations on one clock each."""

    prefill_instance: str
    reserve_wait_s: float
    """From the hand-off's opening to the blocks on the decode worker."""
    transfer_s: float
    """From the commit's arrival to the last block in place: what the transfer added."""
    accept_s: float
    """From the last block in place to the first tokens sent."""
    num_blocks: int
    """Blocks moved."""
    num_bytes: int


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
    computed_tokens: int = 0
    """Prompt tokens that were computed for this request."""
    pulled_tokens: int = 0
    """Of `cached_tokens`, those that came from another worker."""
    hand_off: HandOffTimes | None = None
    """Present when another worker computed the prompt."""
    embedding: bytes = b""
    """The pooled hidden state as f32, not normed; empty where none was asked for."""


class PrefillProgress(msgspec.Struct, frozen=True, array_like=True):
    """How far a prompt is, after each step that computed some of it."""

    request_id: int
    num_computed_tokens: int
    """Cached ones included."""


class Preempted(msgspec.Struct, frozen=True, array_like=True):
    """A choice lost its blocks and waits to be computed anew."""

    request_id: int
    choice: int
    num_tokens: int
    """Prompt and output that have to be computed, less what the cache still holds."""


class ChoiceDelta(msgspec.Struct, frozen=True, array_like=True):
    """What one choice gained in a step; several tokens where drafts were accepted."""

    request_id: int
    choice: int
    tokens: bytes
    """u32 new output ids, the ending token included."""
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The request's own stop id that ended it; None for the model's end token."""
    logprobs: LogprobRows | None = None
    ends_with_text: bool = False
    """Whether it ended by "stop" without an ending token, its grammar allowing nothing more."""
    drafted: int = 0
    """Draft tokens that were verified for this delta."""
    accepted: int = 0
    """Those of them that are among its tokens."""


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
    prefill_tokens_waiting: int = 0
    """Uncomputed prompt tokens of requests that are queued or running."""
    kv_blocks_held: int = 0
    """Of the used blocks, those kept for other workers to read or reserved for what they send."""
    hand_offs_open: int = 0
    prefill_tokens_per_s: float = 0.0
    """Measured over the last steps that computed prompts; 0 before the first."""
    decode_step_s: float = 0.0
    """Measured length of the last steps that only decoded; 0 before the first."""
    last_charge: int = 0
    """The receiving gateway's newest request id that this report accounts for."""
    drafted: tuple[int, ...] = ()
    """Draft tokens verified by position, the first after the newest token at 0; empty where the
    worker does not speculate."""
    accepted: tuple[int, ...] = ()
    """Those accepted, by position."""


class StepFrame(msgspec.Struct, frozen=True, array_like=True, tag="step"):
    """Everything one engine step produced for one gateway."""

    load: Load
    prompts: tuple[PromptDone, ...] = ()
    deltas: tuple[ChoiceDelta, ...] = ()
    progress: tuple[PrefillProgress, ...] = ()
    preempted: tuple[Preempted, ...] = ()


class Alive(msgspec.Struct, frozen=True, array_like=True, tag="alive"):
    """Sent every second. `step` is the engine's own counter: it stands still when the engine does.

    An idle engine counts its waits, so that standing still always means being stuck.
    """

    step: int


class Reserved(msgspec.Struct, frozen=True, array_like=True, tag="reserved"):
    """A decode worker has taken the blocks of a hand-off."""

    request_id: int
    attempt: int
    cached_tokens: int
    """Prompt tokens that it had itself."""


class HandOffFailed(msgspec.Struct, frozen=True, array_like=True, tag="hand_off_failed"):
    """A hand-off ended without its request being accepted; nothing of it is held here any more."""

    request_id: int
    attempt: int
    message: str
    retry: bool = True
    """Whether another attempt could succeed."""


class CacheEvents(msgspec.Struct, frozen=True, array_like=True, tag="cache_events"):
    """Full blocks that can be found from now on, and no longer.

    `sequence` rises by one with each; after a gap the receiver asks for all anew. With `reset` the
    worker holds nothing but `stored`.
    """

    sequence: int
    stored: bytes = b""
    """sha256 hashes, 32 bytes each."""
    removed: bytes = b""
    reset: bool = False


WorkerCommand = Submit | Reserve | Cancel | SetRole | DrainWorker | ResyncCache | Refused
ToWorker = Hello | WorkerCommand
ToGateway = (
    Loading | Ready | Failed | Rejected | StepFrame | Alive | Reserved | HandOffFailed | CacheEvents
)
