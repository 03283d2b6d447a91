"""What an operator may choose about the HTTP side, and the limits put on a request.

Plain values only: nothing here reads files, options or the environment.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from twinfire.accounts.prices import PriceTable
from twinfire.gateway.accounting.access_mode import AccessMode

WorkersAiStreams = Literal["auto", "native", "openai"]
"""How streams of `/ai/run` look; `auto` goes by the model's name."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Upper bounds of what one request may ask for; a request above one is refused."""

    max_body_bytes: int = 16 * 1024 * 1024
    max_prompts: int = 1024
    """Prompts in one completions request."""
    max_choices: int = 4096
    """Prompts times n."""
    max_logprobs: int = 20
    """Alternatives per token, for output and prompt alike."""
    max_stops: int = 64
    max_stop_chars: int = 1024
    """Length of one stop string."""
    max_stop_token_ids: int = 1024
    max_bad_words: int = 256
    max_bad_word_chars: int = 256
    max_logit_bias: int = 1024
    max_request_id_chars: int = 256
    max_cache_salt_chars: int = 1024
    max_grammar_chars: int = 256 * 1024
    """Of the schema, regular expression or grammar of an output, or of all tools together."""
    max_grammar_depth: int = 100
    """How deep their brackets may be nested."""
    max_request_s: float | None = None
    """How long a request may take in all, whatever it asks for itself; None for no limit."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """What one connection may do. Times in seconds."""

    max_connections: int = 4096
    """Fewer where the system gives the process fewer files."""
    max_header_bytes: int = 64 * 1024
    """The request line and all headers together."""
    max_headers: int = 200
    header_timeout_s: float = 20.0
    """From the connection, or a request's first byte, to the end of its headers."""
    body_timeout_s: float = 60.0
    """From there to the end of the body."""
    idle_timeout_s: float = 75.0
    """Between requests."""
    stall_timeout_s: float = 60.0
    """A client that takes nothing of its answer for so long is dropped."""


@dataclass(frozen=True, slots=True)
class TlsPair:
    """Files in PEM of the server's certificate chain and its key."""

    certificate: str
    key: str


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    """Choices of the operator. Times in seconds."""

    aliases: Mapping[str, str] = field(default_factory=dict)
    """More public names, each with the name of the model that it stands for."""
    api_keys: tuple[str, ...] = ()
    """Any of them opens the inference paths; none needed when empty."""
    access: AccessMode = "auto"
    """Whether requests without a token are served."""
    prices: PriceTable = field(default_factory=PriceTable)
    """What requests cost."""
    database: str | None = None
    """File or URL of what must outlive the process; None keeps it for the process's life."""
    admin_key: str | None = None
    """Opens `/cluster/` to every host; None leaves it to this one and to the keys above."""
    otlp_endpoint: str | None = None
    """URL of the OpenTelemetry collector that gets traces of requests; None makes none."""
    keep_alive_s: float = 15.0
    """A stream that has been silent for this long gets a comment line."""
    accept_wait_s: float = 5.0
    """How long a stream waits for the worker to take the request before its 200 is sent."""
    drain_timeout_s: float = 30.0
    """How long running requests may go on after the server was asked to stop."""
    allow_request_chat_template: bool = False
    """Whether a request may bring its own chat template."""
    vllm_metric_names: bool = False
    """Publish every metric under vLLM's prefix too."""
    workers_ai_streams: WorkersAiStreams = "auto"
    text_threads: int = 2
    """Threads that render and tokenise long prompts."""
    inline_text_chars: int = 2048
    """Prompts up to this length are tokenised on the event loop: a thread costs more."""
    http: HttpLimits = HttpLimits()
    tls: TlsPair | None = None
    limits: RequestLimits = field(default_factory=RequestLimits)
