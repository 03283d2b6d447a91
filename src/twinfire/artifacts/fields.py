"""Typed reading of a file's named values (a JSON object, or GGUF metadata).

Owns the wording of "missing", "wrong type" and "out of range": every fault is a ModelError that
names the file and the field. Knows no architecture.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from twinfire.protocol.errors import ModelError

MAX_INTEGER = 2**31 - 1
"""No size, count or token id of a model is above this."""


class Fields:
    """Values by name. `source` is how errors call the file."""

    def __init__(self, values: Mapping[str, object], source: str) -> None:
        self._values = values
        self.source = source

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def raw(self, name: str) -> object:
        """Return the value as it was read; None when it is absent."""
        return self._values.get(name)

    def fault(self, name: str, problem: str) -> ModelError:
        """Return the error that blames one field."""
        return ModelError(f"{self.source}: field '{name}' {problem}")

    def optional_integer(self, name: str, minimum: int = 0) -> int | None:
        """Return an integer in [minimum, MAX_INTEGER], None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise self.fault(name, f"must be an integer, got {shown(value)}")
        if not minimum <= value <= MAX_INTEGER:
            raise self.fault(name, f"is {value}, outside [{minimum}, {MAX_INTEGER}]")
        return value

    def integer(self, name: str, default: int | None = None, minimum: int = 1) -> int:
        """Return an integer >= minimum; without a default the field is required."""
        value = self.optional_integer(name, minimum)
        if value is None:
            value = default
        if value is None:
            raise self.fault(name, "is missing")
        return value

    def optional_number(self, name: str) -> float | None:
        """Return a finite number, None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self.fault(name, f"must be a number, got {shown(value)}")
        if not math.isfinite(value):
            raise self.fault(name, f"must be finite, got {value}")
        return float(value)

    def number(self, name: str, default: float | None = None, above: float | None = None) -> float:
        """Return a finite number > above; without a default the field is required."""
        value = self.optional_number(name)
        if value is None:
            value = default
        if value is None:
            raise self.fault(name, "is missing")
        if above is not None and value <= above:
            raise self.fault(name, f"is {value}, must be above {above}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a boolean, `default` when absent."""
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.fault(name, f"must be true or false, got {shown(value)}")
        return value

    def optional_text(self, name: str) -> str | None:
        """Return a string, None when absent."""
        value = self._values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.fault(name, f"must be a string, got {shown(value)}")
        return value

    def text(self, name: str) -> str:
        """Return a string; ModelError when it is missing."""
        value = self.optional_text(name)
        if value is None:
            raise self.fault(name, "is missing")
        return value

    def texts(self, name: str) -> list[str]:
        """Return a list of strings, empty when absent."""
        value = self._values.get(name)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.fault(name, f"must be a list of strings, got {shown(value)}")
        return value

    def nested(self, name: str) -> Fields | None:
        """Return the fields of an inner object, None when absent."""
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.fault(name, f"must be an object, got {shown(value)}")
        return Fields(value, f"{self.source}: {name}")


def read_json_fields(path: Path) -> Fields:
    """Read a JSON object; ModelError naming the file when it is absent or not one."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from None
    try:
        values = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(values, dict):
        raise ModelError(f"{path} must hold a JSON object")
    return Fields(values, str(path))


def shown(value: object) -> str:
    """Return a value for an error message, cut to a readable length."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
