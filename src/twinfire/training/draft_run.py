"""A whole training run in a work folder: text, features, training, the finished head.

Each stage leaves a file and goes on from what is there, so that a run that was killed, or given
more time, is started again with the same command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import msgspec
import torch

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.target_mark import mark_target
from twinfire.kernels.torch.dtypes import read_tensor
from twinfire.models.rope import rope_table
from twinfire.models.tensor_names import EMBEDDING, OUTPUT_HEAD
from twinfire.protocol.errors import InvalidRequest
from twinfire.training.acceptance import AcceptanceCurve
from twinfire.training.draft_checkpoint import write_draft_head
from twinfire.training.draft_module import DraftModule, DraftShape
from twinfire.training.draft_trainer import DraftTrainer, TargetTables, TrainSettings
from twinfire.training.draft_vocabulary import frequent_tokens
from twinfire.training.feature_store import FeatureStore
from twinfire.training.sample import Sample
from twinfire.training.target_states import TargetStates
from twinfire.training.warm_start import start_from_target

FEATURES_FILE = "features.bin"
CHECKPOINT_FILE = "checkpoint.pt"

RunProgress = Callable[[str, int, int, str], None]
"""Called with (stage, done, in all, what to say beside it)."""


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Choices of a run beside those of the loop."""

    draft_vocab_size: int = 8192
    max_sample_tokens: int = 1024
    """Longer samples are cut."""
    train: TrainSettings = field(default_factory=TrainSettings)


@dataclass(frozen=True, slots=True)
class RunReport:
    """What came out."""

    num_samples: int
    num_tokens: int
    num_steps: int
    acceptance: dict[str, AcceptanceCurve]
    """On the held-out samples, by domain."""


def use_threads(count: int) -> None:
    """Let torch compute on `count` threads in this process."""
    torch.set_num_threads(count)


def feature_layers_of(num_layers: int) -> tuple[int, int, int]:
    """Return the layers that EAGLE-3 reads, as numbers of layers passed: low, middle, high."""
    if num_layers < 4:
        raise InvalidRequest(
            f"the model has {num_layers} layers; a draft head reads three of at least 4"
        )
    return (2 if num_layers > 5 else 1), num_layers // 2, num_layers - (3 if num_layers > 5 else 1)


class DraftRun:
    """One run. `samples` must be the same, in the same order, whenever it is started again."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        samples: Sequence[Sample],
        work_folder: Path,
        settings: RunSettings,
        progress: RunProgress,
    ) -> None:
        config = checkpoint.config
        self._checkpoint = checkpoint
        self._config: ModelConfig = config
        self._settings = settings
        self._work_folder = work_folder
        self._progress = progress
        self._layers = feature_layers_of(config.num_layers)
        _check_tokens(samples, config.vocab_size)
        self._mark = mark_target(config, checkpoint.weights)
        self._samples = [_cut(sample, settings.max_sample_tokens) for sample in samples]
        self._samples = [sample for sample in self._samples if _can_be_learnt(sample, settings)]
        if len(self._samples) < settings.train.holdout_every:
            raise InvalidRequest(
                f"there are {len(self._samples)} samples that are long enough; at least "
                f"{settings.train.holdout_every} are needed"
            )
        self._draft_ids = torch.from_numpy(
            frequent_tokens(
                self._samples,
                settings.draft_vocab_size,
                config.vocab_size,
                config.eos_token_ids,
            )
        )

    def run(self, folder: Path, should_stop: Callable[[], bool] = lambda: False) -> RunReport:
        """Train until the end or `should_stop`, write the head into `folder`, and report."""
        config, train = self._config, self._settings.train
        store = self._features()
        module = self._module()
        start_from_target(module, config, self._checkpoint.weights, self._draft_ids)
        trainer = DraftTrainer(
            module, self._samples, store, self._tables(), train, self._work_folder / CHECKPOINT_FILE
        )
        trainer.run(
            lambda step, steps, loss: self._progress("training", step, steps, f"loss {loss:.3f}"),
            should_stop,
        )
        acceptance = trainer.evaluate(trainer.holdout)
        num_tokens = sum(len(sample.tokens) for sample in self._samples)
        recipe = {
            "num_samples": len(self._samples),
            "num_tokens": num_tokens,
            "steps_done": trainer.step,
            **asdict(train),
        }
        write_draft_head(folder, module, config, self._draft_ids, self._layers, recipe, self._mark)
        return RunReport(len(self._samples), num_tokens, trainer.step, acceptance)

    def _features(self) -> FeatureStore:
        config = self._config
        store = FeatureStore(
            self._work_folder / FEATURES_FILE,
            self._samples,
            len(self._layers) * config.hidden_size,
            config.hidden_size,
            f"{self._layers} {self._mark}",
        )
        if store.num_complete < len(self._samples):
            target = TargetStates(
                config,
                self._checkpoint.weights,
                self._layers,
                max_tokens=max(2048, self._settings.max_sample_tokens),
            )
            store.fill(target, lambda done, total: self._progress("features", done, total, ""))
        return store

    def _module(self) -> DraftModule:
        config = self._config
        torch.manual_seed(self._settings.train.seed)
        shape = DraftShape(
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            draft_vocab_size=self._settings.draft_vocab_size,
            rms_norm_eps=config.rms_norm_eps,
            num_features=len(self._layers),
        )
        table = rope_table(config.rope, config.head_dim)
        return DraftModule(shape, torch.tensor(table.inv_freq), table.attention_factor)

    def _tables(self) -> TargetTables:
        weights = self._checkpoint.weights
        embedding = read_tensor(weights.tensor(EMBEDDING), torch.bfloat16)
        head = embedding
        if not self._config.tie_word_embeddings:
            head = read_tensor(weights.tensor(OUTPUT_HEAD), torch.bfloat16)
        return TargetTables(embedding, head[self._draft_ids].clone(), self._draft_ids)


def _check_tokens(samples: Sequence[Sample], vocab_size: int) -> None:
    for number, sample in enumerate(samples):
        if not 0 <= min(sample.tokens) <= max(sample.tokens) < vocab_size:
            raise InvalidRequest(
                f"sample {number}: its tokens are {min(sample.tokens)} to {max(sample.tokens)}; "
                f"the model's are 0 to {vocab_size - 1}"
            )


def _cut(sample: Sample, max_tokens: int) -> Sample:
    if len(sample.tokens) <= max_tokens:
        return sample
    return msgspec.structs.replace(sample, tokens=sample.tokens[:max_tokens])


def _can_be_learnt(sample: Sample, settings: RunSettings) -> bool:
    return sample.answer_start + settings.train.num_passes + 2 < len(sample.tokens)
