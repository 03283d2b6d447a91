"""Draws the next token of each row, and reports log-probabilities.

Candidates first, noise only for candidates: the vocabulary is never sorted. The draw is the
Gumbel-max trick (Gumbel 1954; Maddison et al. 2014) with counter-based noise, so a row's token
depends on its own logits, parameters, seed and position only. Host arrays only; the heavy
reductions come from the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from twinfire.engine.choice_grammar import ChoiceGrammar
from twinfire.engine.logit_processors import changes_logits, process_logits
from twinfire.engine.noise import NoiseKey, bits_reaching, gumbel, noise_bits, noise_key
from twinfire.engine.token_history import TokenHistory
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.protocol.messages import LogprobRows
from twinfire.protocol.sampling import SamplingParams

Logits = npt.NDArray[np.float32]
Scaled = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_FIRST_CANDIDATES = 64
_CANDIDATE_GROWTH = 8


@dataclass(frozen=True, slots=True)
class SampleRow:
    """What one row of logits needs for its draw."""

    params: SamplingParams
    choice: int
    position: int
    """Of the token to be drawn, counted from the prompt's start."""
    history: TokenHistory
    grammar: ChoiceGrammar | None = None
    """Where the output is in the request's grammar, where it has one."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A drawn token."""

    token_id: int
    logprobs: LogprobRows | None
    is_dead_end: bool = False
    """Whether the grammar and the request's other limits left no token; `token_id` is none then."""


class Sampler:
    """Pure function of its inputs, given a set of reductions."""

    def __init__(self, ops: SamplingOps) -> None:
        self._ops = ops

    def sample(
        self,
        logits: Logits,
        rows: list[SampleRow],
        places: Sequence[int] | None = None,
        raw_argmax: Ids | None = None,
    ) -> list[Sample]:
        """Draw one token for each of `rows` from its row of `logits` [*, vocab], which is modified.

        `places` are the rows' numbers in `logits`, the first ones by default. `raw_argmax` [*] is
        that of all of `logits` before anything modified it, for callers that draw in turns.
        """
        if places is None:
            places = range(len(rows))
        if raw_argmax is None:
            raw_argmax = self.argmax(logits)
        return [
            self._sample_one(logits, place, int(raw_argmax[place]), row)
            for place, row in zip(places, rows, strict=True)
        ]

    def argmax(self, logits: Logits) -> Ids:
        """Return each row's most likely token [*]."""
        return self._ops.argmax(logits)

    def _sample_one(self, logits: Logits, place: int, greedy_id: int, row: SampleRow) -> Sample:
        report = self._report_before(logits, place, row)
        changes = changes_logits(row.params, row.history.num_output)
        if row.grammar is not None:
            self._ops.keep_allowed(logits[place], row.grammar.allowed())
        if changes:
            process_logits(logits[place], row.params, row.history)
        if row.grammar is not None or (changes and row.params.greedy):
            greedy_id = int(self._ops.argmax(logits[place : place + 1])[0])
        if row.grammar is not None and not logits[place, greedy_id] > -np.inf:
            return Sample(greedy_id, None, is_dead_end=True)
        token_id = greedy_id if row.params.greedy else self._draw(logits[place], row)
        return Sample(token_id, report.of(token_id) if report else None)

    def score(self, logits: Logits, token_ids: Ids, num_top: int) -> LogprobRows:
        """Report `token_ids` [rows] under `logits` [rows, vocab] with the `num_top` most likely."""
        log_normaliser = self._ops.logsumexp(logits)
        own = np.take_along_axis(logits, token_ids[:, None], axis=1)
        ranks = 1 + np.count_nonzero(logits > own, axis=1)
        top_values, top_ids = self._top(logits, num_top)
        return _pack(
            own[:, 0] - log_normaliser, ranks, top_ids, top_values - log_normaliser[:, None]
        )

    def _top(self, logits: Logits, num_top: int) -> tuple[Logits, Ids]:
        if num_top == 0:
            return np.empty((len(logits), 0), np.float32), np.empty((len(logits), 0), np.int64)
        return self._ops.top_k(logits, min(num_top, logits.shape[1]))

    def _report_before(self, logits: Logits, index: int, row: SampleRow) -> _RowReport | None:
        if row.params.logprobs < 0:
            return None
        raw = logits[index : index + 1]
        top_values, top_ids = self._top(raw, row.params.logprobs)
        # The row is kept only where processing would overwrite it.
        changes = changes_logits(row.params, row.history.num_output) or row.grammar is not None
        kept = raw.copy() if changes else raw
        normaliser = float(self._ops.logsumexp(raw)[0])
        return _RowReport(kept[0], normaliser, top_ids, top_values - normaliser)

    def _draw(self, row_logits: Logits, row: SampleRow) -> int:
        params = row.params
        key = noise_key(params.seed, row.choice, row.position)
        vocab_size = len(row_logits)
        restricted = 0 < params.top_k < vocab_size or params.min_p > 0.0 or params.top_p < 1.0
        if not restricted:
            return self._draw_unrestricted(row_logits, params.temperature, key)
        scaled, ids = self._candidates(row_logits, params)
        return int(ids[np.argmax(scaled + gumbel(noise_bits(key, ids.astype(np.uint32))))])

    def _draw_unrestricted(self, row_logits: Logits, temperature: float, key: NoiseKey) -> int:
        """Exact Gumbel-max over the vocabulary, with noise turned to floats for a few ids only.

        No token below the best candidates can win unless its noise exceeds what it lacks; the bits
        of the noise tell which do, by one integer comparison each.
        """
        values, ids = self._ops.top_k(row_logits[None], min(_FIRST_CANDIDATES, len(row_logits)))
        ids = ids[0]
        scores = values[0].astype(np.float64) / temperature
        lowest = float(scores[-1])
        scores = scores + gumbel(noise_bits(key, ids.astype(np.uint32)))
        best = int(np.argmax(scores))
        needed = bits_reaching(float(scores[best]) - lowest)
        if needed >= 1 << 32:
            return int(ids[best])
        bits = noise_bits(key, np.arange(len(row_logits), dtype=np.uint32))
        rivals = np.nonzero(bits >= np.uint32(needed))[0]
        if len(rivals) == 0:
            return int(ids[best])
        rival_scores = row_logits[rivals].astype(np.float64) / temperature + gumbel(bits[rivals])
        best_rival = int(np.argmax(rival_scores))
        if rival_scores[best_rival] > scores[best]:
            return int(rivals[best_rival])
        return int(ids[best])

    def _candidates(self, row_logits: Logits, params: SamplingParams) -> tuple[Scaled, Ids]:
        """Return what min-p, top-k and top-p leave: scaled logits, descending, and their ids."""
        if 0 < params.top_k < len(row_logits):
            scaled, ids = self._top_scaled(row_logits, params.top_k, params.temperature)
            scaled, ids = _apply_min_p(scaled, ids, params.min_p)
            return _apply_top_p(scaled, ids, params.top_p, _logsumexp(scaled))
        if params.min_p > 0.0:
            scaled, ids = self._min_p_candidates(row_logits, params)
            return _apply_top_p(scaled, ids, params.top_p, _logsumexp(scaled))
        normaliser = _logsumexp(row_logits.astype(np.float64) / params.temperature)
        num_candidates = _FIRST_CANDIDATES
        while True:
            num_candidates = min(num_candidates, len(row_logits))
            scaled, ids = self._top_scaled(row_logits, num_candidates, params.temperature)
            mass = float(np.exp(scaled - normaliser).sum())
            if mass >= params.top_p or num_candidates == len(row_logits):
                return _apply_top_p(scaled, ids, params.top_p, normaliser)
            num_candidates *= _CANDIDATE_GROWTH

    def _min_p_candidates(self, row_logits: Logits, params: SamplingParams) -> tuple[Scaled, Ids]:
        scaled = row_logits.astype(np.float64) / params.temperature
        ids = np.nonzero(scaled >= scaled.max() + np.log(params.min_p))[0]
        order = np.argsort(-scaled[ids], kind="stable")
        return scaled[ids][order], ids[order]

    def _top_scaled(self, row_logits: Logits, k: int, temperature: float) -> tuple[Scaled, Ids]:
        values, ids = self._ops.top_k(row_logits[None], k)
        return values[0].astype(np.float64) / temperature, ids[0]


@dataclass(frozen=True, slots=True)
class _RowReport:
    """Log-probabilities of one row, taken before anything changed it."""

    raw: Logits
    normaliser: float
    top_ids: Ids
    top_logprobs: Logits

    def of(self, token_id: int) -> LogprobRows:
        value = self.raw[token_id]
        rank = 1 + int(np.count_nonzero(self.raw > value))
        return _pack(
            np.array([value - self.normaliser], np.float32),
            np.array([rank]),
            self.top_ids,
            self.top_logprobs,
        )


def _apply_min_p(scaled: Scaled, ids: Ids, min_p: float) -> tuple[Scaled, Ids]:
    if min_p <= 0.0:
        return scaled, ids
    kept = scaled >= scaled[0] + np.log(min_p)
    return scaled[kept], ids[kept]


def _apply_top_p(
    scaled: Scaled, ids: Ids, top_p: float, log_normaliser: float
) -> tuple[Scaled, Ids]:
    """Keep the most likely tokens up to the one that crosses `top_p`; at least one."""
    if top_p >= 1.0:
        return scaled, ids
    probabilities = np.exp(scaled - log_normaliser)
    mass_before = np.cumsum(probabilities) - probabilities
    num_kept = max(1, int(np.count_nonzero(mass_before < top_p)))
    return scaled[:num_kept], ids[:num_kept]


def _logsumexp(scaled: Scaled) -> float:
    largest = scaled.max()
    return float(largest + np.log(np.exp(scaled - largest).sum()))


def _pack(
    token_logprobs: npt.NDArray[np.floating],
    ranks: npt.NDArray[np.integer],
    top_ids: npt.NDArray[np.integer],
    top_logprobs: npt.NDArray[np.floating],
) -> LogprobRows:
    return LogprobRows(
        k=top_ids.shape[1],
        token_logprobs=token_logprobs.astype("<f4").tobytes(),
        ranks=ranks.astype("<u4").tobytes(),
        top_ids=top_ids.astype("<u4").tobytes(),
        top_logprobs=top_logprobs.astype("<f4").tobytes(),
    )
