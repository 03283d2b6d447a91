"""What one attempt of a request costs its workers, from its choice to its end.

Holds the ledger entries themselves, so that releasing can only ever touch what was charged. Every
method may be called in any order, any number of times, also after `release`.
"""

from __future__ import annotations

from collections.abc import Callable

from twinfire.gateway.routing.ledger import LedgerEntry


class RouteCharge:
    """Charged when made; must be released by whoever got the route."""

    def __init__(
        self,
        *,
        num_context_tokens: int,
        num_choices: int,
        num_output_before: int,
        block_size: int,
        prefill: LedgerEntry,
        decode: LedgerEntry,
        decode_computes_prompt: bool,
        on_cached: Callable[[int], None],
        on_computed: Callable[[], None],
        on_end: Callable[[int, int | None], None],
    ) -> None:
        """`on_end` gets the KV blocks given back and, of finished answers, their mean length."""
        self._num_context_tokens = num_context_tokens
        self._num_choices = num_choices
        self._num_output_before = num_output_before
        self._block_size = block_size
        self._prefill = prefill
        self._decode = decode
        self._decode_computes_prompt = decode_computes_prompt
        self._on_cached = on_cached
        self._on_computed = on_computed
        self._on_end = on_end
        self._num_output_tokens = 0
        self._cached_is_known = False
        self._is_released = False

    @property
    def is_released(self) -> bool:
        """Whether nothing of it is charged any more."""
        return self._is_released

    def prefill_progress(self, num_computed: int) -> None:
        """Context tokens that are computed by now, cached ones included."""
        remaining = max(self._num_context_tokens - num_computed, 0)
        if remaining < self._prefill.charged:
            self._prefill.charge(remaining)
            # A prompt that has been computed in part is one that the worker counts.
            self._prefill.see(remaining)
            self._on_computed()
        if self._decode_computes_prompt:
            self._decode.see(max(self._decode.seen, -(-num_computed // self._block_size)))

    def prefill_done(self, cached_tokens: int | None = None) -> None:
        """The prompt is computed; `cached_tokens` is what nobody had to compute of it."""
        if cached_tokens is not None and not (self._cached_is_known or self._is_released):
            self._cached_is_known = True
            self._on_cached(cached_tokens)
        if not self._is_released:
            self._prefill.close()
            self._on_computed()

    def decode_reserved(self) -> None:
        """The decode worker has taken the context's blocks (`Reserved`)."""
        self._decode.see(self._num_context_blocks())

    def decode_started(self, cached_tokens: int | None = None) -> None:
        """The first tokens are there: the prompt is computed and its blocks are on the worker."""
        self.prefill_done(cached_tokens)
        self._see_held()

    def decode_tokens(self, count: int) -> None:
        """`count` more output tokens, of all choices together."""
        before = self._num_held_blocks()
        self._num_output_tokens += count
        held = self._num_held_blocks()
        if held != before:
            if held > self._decode.charged:
                self._decode.charge(held)
            self._see_held()

    def release(self, *, finished: bool = True) -> None:
        """The attempt is over; `finished` when its answers ran to their own end."""
        if self._is_released:
            return
        self._is_released = True
        num_blocks = self._decode.charged
        self._prefill.close()
        self._decode.close()
        ended = finished and self._num_output_tokens > 0
        per_choice = self._num_output_before + round(self._num_output_tokens / self._num_choices)
        self._on_end(num_blocks, per_choice if ended else None)

    def _see_held(self) -> None:
        self._decode.see(self._num_held_blocks())

    def _num_context_blocks(self) -> int:
        return -(-self._num_context_tokens // self._block_size)

    def _num_held_blocks(self) -> int:
        per_choice = self._num_output_tokens // self._num_choices
        first = self._num_context_tokens + per_choice
        others = (self._num_choices - 1) * -(-per_choice // self._block_size)
        return -(-first // self._block_size) + others
