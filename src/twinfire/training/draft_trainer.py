"""The training loop of a draft head: training-time test over cached features (arXiv:2503.01840).

Loss of pass i: 0.8^i times the cross-entropy between the target's distribution over the draft
vocabulary and the head's. A step is one optimiser step over a few samples; everything that decides
the next one is in the checkpoint, so that a killed run goes on where its last checkpoint was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it
from torch import Tensor

from twinfire.protocol.errors import InvalidRequest
from twinfire.training.acceptance import AcceptanceCurve
from twinfire.training.draft_chains import chain_logits
from twinfire.training.draft_module import DraftModule
from twinfire.training.feature_store import FeatureStore
from twinfire.training.sample import Sample
from twinfire.training.target_states import TextStates

LOSS_DECAY = 0.8
"""Weight of a pass over that of the pass before it, as in the paper's own training code."""


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """Choices of a run."""

    num_passes: int = 4
    """Drafts in a chain that the head is trained for."""
    num_epochs: int = 3
    samples_per_step: int = 2
    learning_rate: float = 1e-3
    num_warmup_steps: int = 50
    prompt_weight: float = 0.3
    """Of a position in the prompt, against 1 in the answer."""
    max_grad_norm: float = 0.5
    checkpoint_s: float = 120.0
    holdout_every: int = 20
    """Each so many-th sample is only tested on."""
    seed: int = 0


@dataclass(frozen=True, slots=True)
class TargetTables:
    """What the head takes from the target, frozen. bfloat16."""

    embedding: Tensor
    """[vocab, hidden]"""
    head_rows: Tensor
    """[draft_vocab, hidden] rows of the output head that are in the draft vocabulary."""
    draft_ids: Tensor
    """[draft_vocab] their token ids, ascending."""


class DraftTrainer:
    """Trains `module` in place. `progress` is told (step, steps in all, loss)."""

    def __init__(
        self,
        module: DraftModule,
        samples: Sequence[Sample],
        store: FeatureStore,
        tables: TargetTables,
        settings: TrainSettings,
        checkpoint_path: Path,
    ) -> None:
        self.module = module
        self._samples = samples
        self._store = store
        self._tables = tables
        self._settings = settings
        self._checkpoint_path = checkpoint_path
        numbers = range(len(samples))
        self.holdout = [number for number in numbers if number % settings.holdout_every == 0]
        self._trained_on = [number for number in numbers if number % settings.holdout_every]
        self._steps_per_epoch = max(1, len(self._trained_on) // settings.samples_per_step)
        self.num_steps = self._steps_per_epoch * settings.num_epochs
        self._optimiser = torch.optim.AdamW(
            module.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0
        )
        self.step = 0
        self._resume()

    def run(
        self,
        progress: Callable[[int, int, float], None],
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """Train to the end, or until `should_stop`; the last state is on disk either way."""
        saved_s = time.monotonic()
        while self.step < self.num_steps and not should_stop():
            loss = self._one_step()
            progress(self.step, self.num_steps, loss)
            if time.monotonic() - saved_s > self._settings.checkpoint_s:
                self._save()
                saved_s = time.monotonic()
        self._save()

    @torch.no_grad()
    def evaluate(self, numbers: Sequence[int]) -> dict[str, AcceptanceCurve]:
        """Return the acceptance of greedy drafts on the answers of some samples, by domain."""
        curves: dict[str, AcceptanceCurve] = {}
        for number in numbers:
            sample = self._samples[number]
            tokens = torch.tensor(sample.tokens)
            num_passes = self._settings.num_passes
            num_rows = len(tokens) - 1 - num_passes
            first = max(sample.answer_start - 2, 0)
            if num_rows <= first:
                continue
            right = [
                self._tables.draft_ids[logits[:num_rows].argmax(-1)]
                == tokens[2 + index : 2 + index + num_rows]
                for index, logits in enumerate(self._passes(number, self._store.states(number)))
            ]
            curve = curves.setdefault(sample.domain, AcceptanceCurve())
            curve.add(torch.stack(right, dim=1)[first:])
        return curves

    def _one_step(self) -> float:
        settings = self._settings
        for group in self._optimiser.param_groups:
            group["lr"] = self._learning_rate()
        epoch, within = divmod(self.step, self._steps_per_epoch)
        order = torch.randperm(
            len(self._trained_on), generator=torch.Generator().manual_seed(settings.seed + epoch)
        )
        start = within * settings.samples_per_step
        total = 0.0
        for place in order[start : start + settings.samples_per_step].tolist():
            loss = self._loss(self._trained_on[place]) / settings.samples_per_step
            loss.backward()  # type: ignore[no-untyped-call]
            total += float(loss.detach())
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), settings.max_grad_norm)
        self._optimiser.step()
        self._optimiser.zero_grad(set_to_none=True)
        self.step += 1
        return total

    def _learning_rate(self) -> float:
        """Linear warm-up, then half a cosine down to a twentieth."""
        settings = self._settings
        if self.step < settings.num_warmup_steps:
            return settings.learning_rate * (self.step + 1) / settings.num_warmup_steps
        span = max(1, self.num_steps - settings.num_warmup_steps)
        done = (self.step - settings.num_warmup_steps) / span
        return settings.learning_rate * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * done)))

    def _loss(self, number: int) -> Tensor:
        sample = self._samples[number]
        states = self._store.states(number)
        with torch.no_grad():
            target = F.linear(states.final, self._tables.head_rows).float().softmax(-1)
        positions = torch.arange(len(sample.tokens))
        weight = torch.where(
            positions >= sample.answer_start - 1, 1.0, self._settings.prompt_weight
        )
        loss = torch.zeros(())
        for index, logits in enumerate(self._passes(number, states)):
            num_rows = len(sample.tokens) - 1 - index
            # Row t of pass i predicts token t + 2 + i, which the target does at t + 1 + i.
            wanted, rows_weight = target[1 + index :], weight[1 + index :]
            log_probabilities = logits[:num_rows].float().log_softmax(-1)
            cross_entropy = -(wanted * log_probabilities).sum(-1)
            mean = (cross_entropy * rows_weight).sum() / rows_weight.sum()
            loss = loss + LOSS_DECAY**index * mean
        return loss

    def _passes(self, number: int, states: TextStates) -> list[Tensor]:
        """Return the logits of each pass; row t of pass i is valid while t + 1 + i is a token."""
        tokens = torch.tensor(self._samples[number].tokens)
        return chain_logits(
            self.module,
            self._tables.embedding,
            tokens,
            states.features,
            self._settings.num_passes,
        )

    def _save(self) -> None:
        state = {
            "module": self.module.state_dict(),
            "optimiser": self._optimiser.state_dict(),
            "step": self.step,
            "draft_ids": self._tables.draft_ids,
        }
        partial = self._checkpoint_path.with_suffix(".partial")
        partial.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, partial)
        partial.replace(self._checkpoint_path)

    def _resume(self) -> None:
        if not self._checkpoint_path.is_file():
            return
        state = torch.load(self._checkpoint_path, weights_only=True)
        # Checkpoints from before this was kept do not say.
        if not torch.equal(state.get("draft_ids", self._tables.draft_ids), self._tables.draft_ids):
            raise InvalidRequest(
                f"{self._checkpoint_path} is of a draft vocabulary from other samples or of "
                "another size; delete it to begin anew, or take another work folder"
            )
        self.module.load_state_dict(state["module"])
        self._optimiser.load_state_dict(state["optimiser"])
        self.step = state["step"]
