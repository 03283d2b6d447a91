"""Who sent a request."""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.accounts.account import OPEN_ACCOUNT, OPERATOR_ACCOUNT, Account


@dataclass(frozen=True, slots=True)
class Identity:
    """An account and, where one was used, its token's id."""

    account: Account
    token_id: str = ""


OPEN_IDENTITY = Identity(OPEN_ACCOUNT)
OPERATOR_IDENTITY = Identity(OPERATOR_ACCOUNT)
