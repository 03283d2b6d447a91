"""Who a request belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field

from twinfire.accounts.limits import NO_LIMITS, Limits


@dataclass(frozen=True, slots=True)
class Account:
    """One tenant."""

    id: str
    """32 hexadecimal digits; a word for the two accounts that have no row."""
    name: str
    cache_salt: str = field(default="", repr=False)
    """Secret; part of every prefix-cache key, so that tenants share no cached prompt."""
    is_admin: bool = False
    """Whether it sees everybody's usage."""
    disabled: bool = False
    limits: Limits = NO_LIMITS
    created_s: float = 0.0
    """Unix time."""

    @property
    def has_row(self) -> bool:
        """Whether it is kept in the database."""
        return self.id not in (OPEN_ACCOUNT.id, OPERATOR_ACCOUNT.id)


OPEN_ACCOUNT = Account("open", "open")
"""Everybody, where no token is needed."""
OPERATOR_ACCOUNT = Account("operator", "operator", is_admin=True)
"""Whoever holds a key of the server's own options."""
