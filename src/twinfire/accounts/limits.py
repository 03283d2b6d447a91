"""How much an account may use; None is no limit."""

from __future__ import annotations

from dataclasses import dataclass, fields

from twinfire.protocol.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Limits:
    """Rates are token buckets that hold one minute's worth. A day is one of UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Prompt and output tokens, cached ones included."""
    concurrency: int | None = None
    """Requests at once."""
    budget_tokens_per_day: int | None = None
    budget_nanos_per_day: int | None = None
    """Billionths of the price table's currency."""
    models: tuple[str, ...] | None = None
    """Public names that may be used; None for all."""

    def __post_init__(self) -> None:
        for name in NUMERIC_LIMITS:
            value = getattr(self, name)
            if value is not None and not 1 <= value < 2**63:
                raise InvalidRequest(f"`{name}` is {value}; it must be from 1 to 2^63 - 1", name)

    def allows_model(self, *names: str) -> bool:
        """Whether a model that is known by any of `names` may be used."""
        return self.models is None or any(name in self.models for name in names)


NUMERIC_LIMITS = tuple(field.name for field in fields(Limits) if field.name != "models")
NO_LIMITS = Limits()
