"""A client's request to an external model, and the bodies that the engines get of it.

Fields keep their order and their bytes; only what must differ does. What a client says about the
transfer of KV never reaches an engine: it would name hosts for the engine to connect to.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
from msgspec import Raw

from twinfire.gateway.dialects.json_body import decode_body
from twinfire.gateway.exchange import Exchange
from twinfire.gateway.routing.session import read_session
from twinfire.protocol.errors import InvalidRequest

Fields = dict[str, Raw]

BYTES_PER_TOKEN = 4
DEFAULT_MAX_TOKENS = 256
"""Charged for a request that does not bound its output."""
CHAT_PATH = "/v1/chat/completions"
COMPLETIONS_PATH = "/v1/completions"
TOKEN_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TRANSFER_FIELDS = (
    *("kv_transfer_params", "ec_transfer_params"),
    *("bootstrap_host", "bootstrap_port", "bootstrap_room", "bootstrap_pair_key"),
)


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Shape(msgspec.Struct):
    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    echo: bool | None = None
    prompt_logprobs: int | None = None
    prompt: Raw = Raw(b"null")
    prompt_cache_key: str | None = None
    stream_options: _StreamOptions | None = None


_ALL_USAGE = {"include_usage": Raw(b"true"), "continuous_usage_stats": Raw(b"true")}
_DECODER = msgspec.json.Decoder(_Shape)
_FIELDS_DECODER = msgspec.json.Decoder(Fields)


@dataclass(frozen=True, slots=True)
class ExternalJob:
    """One request, read once."""

    path: str
    fields: Fields
    """As the engines get them, without anything of a transfer."""
    body: bytes
    """The encoded fields; the client's own bytes where nothing had to change."""
    public_name: str
    """As the client called the model."""
    request_id: str
    answer_id: str
    is_chat: bool
    is_stream: bool
    num_choices: int
    num_sequences: int
    """Prompts times the answers to each."""
    reads_prompt_logprobs: bool
    """Whether the answer tells of prompt tokens, which only the engine that computes them can."""
    num_prompt_tokens: int
    """Estimated."""
    max_tokens: int
    session: str | None
    """As the client named it, in a header or as `prompt_cache_key`."""
    shows_usage: bool = True
    """Whether the client asked for a stream's usage, which the engines are always asked for."""
    shows_usage_so_far: bool = False
    """Whether with every chunk."""

    def with_fields(self, changes: Fields, without: tuple[str, ...] = ()) -> bytes:
        """Return the body with `changes` and without some fields."""
        fields = {name: raw for name, raw in self.fields.items() if name not in without}
        return msgspec.json.encode(fields | changes)


def raw_json(value: object) -> Raw:
    """Return `value` encoded."""
    return Raw(msgspec.json.encode(value))


def read_job(
    exchange: Exchange, path: str, names: tuple[str, ...], engine_model: str
) -> ExternalJob:
    """Return the request; InvalidRequest for one that no engine could take."""
    shape = decode_body(exchange.body, _DECODER)
    fields = _FIELDS_DECODER.decode(exchange.body)
    public_name = shape.model or names[0]
    given = len(fields)
    for name in _TRANSFER_FIELDS:
        fields.pop(name, None)
    body = exchange.body
    options = _asked_usage(shape, fields)
    if len(fields) != given or shape.model != engine_model or shape.stream:
        fields["model"] = raw_json(engine_model)
        body = msgspec.json.encode(fields)
    num_prompts = _num_prompts(shape.prompt)
    num_choices = num_prompts * (shape.n or 1)
    is_chat = path == CHAT_PATH
    return ExternalJob(
        path=path,
        fields=fields,
        body=body,
        public_name=public_name,
        request_id=exchange.request_id,
        answer_id=("chatcmpl-" if is_chat else "cmpl-") + exchange.request_id,
        is_chat=is_chat,
        is_stream=bool(shape.stream),
        num_choices=num_choices,
        num_sequences=num_prompts * max(shape.n or 1, shape.best_of or 1),
        reads_prompt_logprobs=bool(shape.echo) or shape.prompt_logprobs is not None,
        num_prompt_tokens=max(1, len(body) // BYTES_PER_TOKEN),
        max_tokens=shape.max_completion_tokens or shape.max_tokens or DEFAULT_MAX_TOKENS,
        session=read_session(exchange.headers, shape.prompt_cache_key),
        shows_usage=options.include_usage is True,
        shows_usage_so_far=(
            options.include_usage is True and options.continuous_usage_stats is True
        ),
    )


def _asked_usage(shape: _Shape, fields: Fields) -> _StreamOptions:
    """Return what the client asked for, and ask the engine for all of it in a stream.

    A stream that ends before its time is billed by what the last chunk said.
    """
    if not shape.stream:
        return _StreamOptions(include_usage=True)
    given: Fields = {}
    if shape.stream_options is not None:
        given = _FIELDS_DECODER.decode(fields["stream_options"])
    fields["stream_options"] = raw_json(given | _ALL_USAGE)
    return shape.stream_options or _StreamOptions()


def _num_prompts(prompt: Raw) -> int:
    if not bytes(prompt).lstrip().startswith(b"["):
        return 1
    items = msgspec.json.decode(prompt)
    assert isinstance(items, list)
    if not items:
        raise InvalidRequest("`prompt` is empty.", "prompt")
    return 1 if isinstance(items[0], int) else len(items)
