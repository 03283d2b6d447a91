"""A call as one JSON object with its name and its arguments, which several families write."""

from __future__ import annotations

import msgspec

from twinfire.gateway.text.answer_sink import AnswerSink
from twinfire.gateway.text.hold_back import Emit, GrowingText, Markers, Steps

_ARGUMENTS = frozenset(("arguments", "parameters"))
_KNOWN_KEYS = _ARGUMENTS | {"name", "type", "id", "function"}


def read_json_call(
    text: GrowingText, sink: AnswerSink, end: Markers | None, *, bare: bool = False
) -> Steps[bool]:
    """Read `{"name": …, "arguments": {…}}`; False where it is no call, which the sink never saw.

    Broken arguments go on to `end`, or to the end of the text. A `bare` call stands where an answer
    in JSON could stand too: it has only the keys of a call and names a tool that there is.
    """
    return (yield from _JsonCall(text, sink, end, bare).read())


class _JsonCall:
    def __init__(
        self, text: GrowingText, sink: AnswerSink, end: Markers | None, bare: bool
    ) -> None:
        self._text = text
        self._sink = sink
        self._end = end
        self._bare = bare
        self._name = ""
        self._early_arguments: str | None = None
        """They came before the name."""
        self._started = False

    def read(self) -> Steps[bool]:
        text = self._text
        if not (yield from text.expect("{")):
            return False
        while not (yield from text.expect("}", after_space=True)):
            if not (yield from self._member()):
                return self._started
            if not (yield from text.expect(",", after_space=True)):
                # Models forget the last bracket; the call itself is whole.
                yield from text.expect("}", after_space=True)
                break
        if not self._started and self._is_callable():
            self._start()
            self._sink.arguments(self._early_arguments or "{}")
        return self._started

    def _member(self) -> Steps[bool]:
        text = self._text
        yield from text.skip_space()
        key = yield from self._string()
        if key is None or not (yield from text.expect(":", after_space=True)):
            return False
        yield from text.skip_space()
        if key == "name":
            self._name = (yield from self._string()) or ""
            return self._is_callable()
        if key in _ARGUMENTS:
            return (yield from self._arguments())
        if self._bare and key not in _KNOWN_KEYS:
            return False
        return (yield from text.json_value(_drop))

    def _arguments(self) -> Steps[bool]:
        first = yield from self._text.peek()
        if first != "{" and first != '"' and first != "n":
            return False
        if first == "{" and self._name:
            self._start()
            if not (yield from self._text.json_value(self._sink.arguments)):
                yield from self._rest_of_broken()
                return False
            return True
        pieces: list[str] = []
        if not (yield from self._text.json_value(pieces.append)):
            return False
        self._early_arguments = _unwrapped("".join(pieces))
        if self._early_arguments is not None and self._name:
            self._start()
            self._sink.arguments(self._early_arguments)
        return self._early_arguments is not None

    def _rest_of_broken(self) -> Steps[None]:
        if self._end is None:
            yield from self._text.rest(self._sink.arguments)
        else:
            yield from self._text.until(self._end, self._sink.arguments)

    def _string(self) -> Steps[str | None]:
        if (yield from self._text.peek()) != '"':
            return None
        pieces: list[str] = []
        if not (yield from self._text.json_value(pieces.append)):
            return None
        try:
            return msgspec.json.decode("".join(pieces), type=str)
        except msgspec.DecodeError:
            return None

    def _is_callable(self) -> bool:
        if self._bare and self._name not in self._sink.tools:
            return False
        return self._sink.is_name(self._name)

    def _start(self) -> None:
        self._started = True
        self._text.forget()
        self._sink.start_call(self._name)


def _unwrapped(value: str) -> str | None:
    """Return arguments that came as JSON null or as a string with JSON inside; None for neither."""
    if value.startswith("{"):
        return value
    if value == "null":
        return "{}"
    try:
        inner = msgspec.json.decode(value, type=str)
    except msgspec.DecodeError:
        return None
    return inner if inner.lstrip().startswith("{") else None


def _drop(text: str) -> None:
    pass


DROP: Emit = _drop
"""Takes text that nobody needs."""
