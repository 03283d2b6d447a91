"""What an engine's answer must say that the engine cannot know: id, model and cached tokens.

Works on one JSON object, whole or a stream's chunk; a chunk keeps its very bytes where nothing has
to change. The usage is written last, when the cost is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from msgspec import Raw

from twinfire.accounts.prices import NANOS
from twinfire.gateway.external.answer_meter import AnswerMeter
from twinfire.gateway.external.external_job import ExternalJob, Fields, raw_json

_FIELDS = msgspec.json.Decoder(Fields)
_CHOICES = msgspec.json.Decoder(list[Fields])
_NULL = b"null"
_FAILED_REASONS = (b'"error"', b'"abort"')


class EngineError(Exception):
    """The engine says inside an answer that it failed. `status` is its own word, or 500."""

    def __init__(self, message: str, status: int = 500) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class NotJson(Exception):
    """The engine sent something that is no JSON object."""


@dataclass(slots=True)
class AnswerEdits:
    """The truth about one answer, and which chat choices have begun."""

    answer_id: bytes
    model: bytes
    """Both as JSON strings."""
    is_chat_stream: bool
    num_choices: int
    is_split: bool = False
    """Whether another engine computed the prompt, whose count of cached tokens is the true one."""
    cached_tokens: int | None = None
    """That count, None while or where it is not known."""
    shows_usage: bool = True
    """Whether the client asked for a stream's usage, which is always asked of the engine."""
    shows_usage_so_far: bool = False
    """Whether with every chunk."""
    meter: AnswerMeter = field(default_factory=AnswerMeter)
    _begun: set[int] = field(default_factory=set)
    _closing: Fields | None = None

    @classmethod
    def of(cls, job: ExternalJob, meter: AnswerMeter, *, is_split: bool) -> AnswerEdits:
        """Return the edits for the answer to `job`, which `meter` counts."""
        return cls(
            _quoted(job.answer_id),
            _quoted(job.public_name),
            job.is_chat and job.is_stream,
            job.num_choices,
            is_split,
            shows_usage=job.shows_usage,
            shows_usage_so_far=job.shows_usage_so_far,
            meter=meter,
        )

    @property
    def is_finished(self) -> bool:
        """Whether every choice has ended."""
        return self.meter.num_finished >= self.num_choices

    def chunk(self, content: bytes) -> bytes:
        """Return a stream's chunk as the client gets it, b"" for nothing. EngineError, NotJson.

        The chunk that has only the usage is kept for `closing_event`.
        """
        fields, changed = self._read(content)
        if not _is_given(fields.get("usage")):
            return msgspec.json.encode(fields) if changed else content
        if not _has_entries(fields.get("choices")):
            self._closing = fields
            return b""
        if self.shows_usage_so_far:
            changed |= self._edit_usage(fields)
        else:
            del fields["usage"]
            changed = True
        return msgspec.json.encode(fields) if changed else content

    def closing_event(self) -> bytes:
        """Return the event with the usage, b"" where the client or the engine wants none."""
        if self._closing is None or not self.shows_usage:
            return b""
        self._edit_usage(self._closing)
        return b"data: " + msgspec.json.encode(self._closing) + b"\n\n"

    def read_whole(self, content: bytes) -> Fields:
        """Return a whole answer, counted and edited but for its usage. EngineError, NotJson."""
        fields, _ = self._read(content)
        return fields

    def whole(self, fields: Fields) -> bytes:
        """Return the answer of `read_whole` with its usage, as the client gets it."""
        self._edit_usage(fields)
        return msgspec.json.encode(fields)

    def _read(self, content: bytes) -> tuple[Fields, bool]:
        """Return the object's fields and whether any of them was changed."""
        try:
            fields = _FIELDS.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            raise NotJson from None
        if _is_given(fields.get("error")):
            raise _engine_error(fields["error"])
        changed = self._replace(fields, "id", self.answer_id)
        changed |= self._replace(fields, "model", self.model)
        changed |= fields.pop("kv_transfer_params", None) is not None
        changed |= self._edit_choices(fields)
        self.meter.read(fields)
        return fields, changed

    @staticmethod
    def _replace(fields: Fields, name: str, value: bytes) -> bool:
        if name not in fields or bytes(fields[name]) == value:
            return False
        fields[name] = Raw(value)
        return True

    def _edit_choices(self, fields: Fields) -> bool:
        raw = fields.get("choices")
        if raw is None:
            return False
        is_beginning = self.is_chat_stream and len(self._begun) < self.num_choices
        may_have_failed = any(reason in bytes(raw) for reason in _FAILED_REASONS)
        if not is_beginning and not may_have_failed:
            return False
        try:
            choices = _CHOICES.decode(raw)
        except msgspec.DecodeError:
            raise NotJson from None
        changed = False
        for choice in choices:
            if bytes(choice.get("finish_reason", Raw(_NULL))) in _FAILED_REASONS:
                raise EngineError("The engine could not finish the answer.")
            changed |= is_beginning and self._begin(choice)
        if changed:
            fields["choices"] = raw_json(choices)
        return changed

    def _begin(self, choice: Fields) -> bool:
        """Give the first chunk of a chat choice its role, which some engines leave out."""
        index = int(bytes(choice.get("index", Raw(b"0"))))
        if index in self._begun or not _is_given(choice.get("delta")):
            return False
        self._begun.add(index)
        delta = _FIELDS.decode(choice["delta"])
        if _is_given(delta.get("role")):
            return False
        choice["delta"] = raw_json({"role": Raw(b'"assistant"')} | delta)
        return True

    def _edit_usage(self, fields: Fields) -> bool:
        if not _is_given(fields.get("usage")):
            return False
        usage = _FIELDS.decode(fields["usage"])
        changed = self.is_split and self._edit_cached_tokens(usage)
        if self.meter.cost_nanos is not None:
            usage["cost"] = raw_json(self.meter.cost_nanos / NANOS)
            changed = True
        if changed:
            fields["usage"] = raw_json(usage)
        return changed

    def _edit_cached_tokens(self, usage: Fields) -> bool:
        details = usage.get("prompt_tokens_details")
        if self.cached_tokens is None:
            # Only the decoding engine counted, and it counts every block it was sent.
            if not _is_given(details):
                return False
            usage["prompt_tokens_details"] = Raw(_NULL)
        else:
            known = _FIELDS.decode(details) if details is not None and _is_given(details) else {}
            count = b"%d" % self.cached_tokens
            if bytes(known.get("cached_tokens", Raw(b""))) == count:
                return False
            usage["prompt_tokens_details"] = raw_json(known | {"cached_tokens": Raw(count)})
        return True


def cached_tokens_of(answer: Fields) -> int | None:
    """Return what an engine's whole answer says of its own prefix cache."""
    try:
        usage = msgspec.json.decode(answer.get("usage", Raw(_NULL)), type=_Usage | None)
    except msgspec.DecodeError:
        return None
    if usage is None or usage.prompt_tokens_details is None:
        return None
    return usage.prompt_tokens_details.cached_tokens


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Details | None = None


class _Error(msgspec.Struct):
    message: str = "The engine failed."
    code: object = None


def _engine_error(raw: Raw) -> EngineError:
    try:
        error = msgspec.json.decode(raw, type=_Error | str)
    except msgspec.DecodeError:
        return EngineError("The engine failed.")
    if isinstance(error, str):
        return EngineError(error)
    is_status = isinstance(error.code, int) and 400 <= error.code < 600
    return EngineError(error.message, error.code if is_status else 500)  # type: ignore[arg-type]


def _quoted(text: str) -> bytes:
    return msgspec.json.encode(text)


def _has_entries(raw: Raw | None) -> bool:
    return _is_given(raw) and bytes(raw or b"").translate(None, b" \t\r\n") != b"[]"


def _is_given(raw: Raw | None) -> bool:
    return raw is not None and bytes(raw) != _NULL
