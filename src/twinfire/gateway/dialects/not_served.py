"""Fields that are known but not served: refused by name, unless their value asks for nothing."""

from __future__ import annotations

from collections.abc import Callable

from twinfire.gateway.dialects.requests import (
    ChatRequest,
    CompletionRequest,
    NotServed,
    SamplingFields,
)
from twinfire.protocol.errors import InvalidRequest

AsksForNothing = Callable[[object], bool]


def _is_absent(value: object) -> bool:
    return value is None


def _one_of(*values: object) -> AsksForNothing:
    return lambda value: (
        value is None or any(type(value) is type(known) and value == known for known in values)
    )


_SHARED: tuple[tuple[str, AsksForNothing], ...] = (
    *((name, _is_absent) for name in NotServed.__struct_fields__),
    ("use_beam_search", _one_of(False)),
)

_CHAT: tuple[tuple[str, AsksForNothing], ...] = (
    *_SHARED,
    ("modalities", _one_of(["text"])),
    ("audio", _is_absent),
    ("mm_processor_kwargs", _is_absent),
)

_COMPLETION: tuple[tuple[str, AsksForNothing], ...] = (*_SHARED, ("suffix", _one_of("")))


def refuse_unserved_chat(request: ChatRequest) -> None:
    """Raise InvalidRequest naming the first field that this server does not serve."""
    _refuse(request, _CHAT)
    _refuse_best_of(request.best_of, request.n)


def refuse_unserved_completion(request: CompletionRequest) -> None:
    """Raise InvalidRequest naming the first field that this server does not serve."""
    _refuse(request, _COMPLETION)
    _refuse_best_of(request.best_of, request.n)


def _refuse(request: SamplingFields, table: tuple[tuple[str, AsksForNothing], ...]) -> None:
    for name, asks_for_nothing in table:
        if not asks_for_nothing(getattr(request, name)):
            raise unserved(name)


def _refuse_best_of(best_of: object, n: int | None) -> None:
    num_choices = 1 if n is None else n
    if best_of is not None and (isinstance(best_of, bool) or best_of != num_choices):
        raise InvalidRequest(
            f"`best_of` must equal `n` ({num_choices}): choices are not ranked here.", "best_of"
        )


def unserved(name: str) -> InvalidRequest:
    """Return the refusal of a field."""
    return InvalidRequest(f"`{name}` is not supported by this server.", name, "unsupported")
