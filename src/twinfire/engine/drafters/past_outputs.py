"""What each tenant's requests said lately, to guess what the next one says.

A tenant's outputs are found by that tenant alone: a guess that came true faster would tell another
that the text exists. Bounded by tokens for each tenant and for all; the oldest output goes first,
and of all the tenant that was silent for longest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence

from twinfire.engine.drafters.suffix_index import SuffixIndex

SEPARATOR = 0xFFFFFFFF
"""Between outputs; no token of any vocabulary, so that no match reaches over it."""
_FULL_TENANTS = 16
"""So many tenants may keep all they are allowed to."""
_TENANT_TOKENS = 1 << 10
"""A tenant counts as so many at least: its tables take room however little it said."""
_CONTEXT_TOKENS = 8
"""Kept of what stood before an output, so that its beginning can be found."""


class PastOutputs:
    """One index per tenant."""

    def __init__(self, anchors: Sequence[int], max_tokens: int) -> None:
        """`max_tokens` are of each tenant; 0 keeps nothing."""
        self._anchors = anchors
        self._max_tokens = max_tokens
        self._tenants: OrderedDict[str, _TenantOutputs] = OrderedDict()
        self._num_charged = 0
        """What all tenants count as, in tokens."""

    @property
    def num_tokens(self) -> int:
        """Kept of all tenants."""
        return sum(outputs.num_tokens for outputs in self._tenants.values())

    @property
    def num_tenants(self) -> int:
        """Of which anything is kept."""
        return len(self._tenants)

    def index(self, tenant: str) -> SuffixIndex | None:
        """Return where the tenant's outputs are found; None where there are none."""
        outputs = self._tenants.get(tenant)
        return outputs.index if outputs is not None else None

    def learn(self, tenant: str, tokens: array[int], num_prompt_tokens: int) -> None:
        """Keep an output with the few tokens before it, and drop the oldest beyond the bounds."""
        start = max(0, num_prompt_tokens - _CONTEXT_TOKENS)
        kept = tokens[start : start + self._max_tokens - 1]
        if len(tokens) <= num_prompt_tokens or not kept:
            return
        outputs = self._tenants.get(tenant)
        if outputs is None:
            outputs = self._tenants[tenant] = _TenantOutputs(self._anchors)
            self._num_charged += self._charge(outputs)
        self._tenants.move_to_end(tenant)
        self._num_charged -= self._charge(outputs)
        outputs.add(kept, self._max_tokens)
        self._num_charged += self._charge(outputs)
        while self._num_charged > _FULL_TENANTS * self._max_tokens:
            _, silent = self._tenants.popitem(last=False)
            self._num_charged -= self._charge(silent)

    def _charge(self, outputs: _TenantOutputs) -> int:
        return max(outputs.num_tokens, min(_TENANT_TOKENS, self._max_tokens))


class _TenantOutputs:
    """Outputs of one tenant, oldest first, each with a separator behind it."""

    def __init__(self, anchors: Sequence[int]) -> None:
        self.index = SuffixIndex(array("I"), anchors)
        self._lengths: deque[int] = deque()

    @property
    def num_tokens(self) -> int:
        return len(self.index.tokens) - self.index.first_token

    def add(self, tokens: array[int], max_tokens: int) -> None:
        index = self.index
        index.tokens.extend(tokens)
        index.tokens.append(SEPARATOR)
        index.add_until(len(index.tokens))
        self._lengths.append(len(tokens) + 1)
        while self.num_tokens > max_tokens:
            index.first_token += self._lengths.popleft()
        # Places move only when as much was dropped as is kept, so that it costs little a token.
        if index.first_token > max_tokens:
            index.drop(index.first_token)
