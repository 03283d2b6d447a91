"""From a worker's configuration to an engine that is ready to step.

Owns the order of a start: files, weights, KV memory, scheduler. Reports each stage as it begins.
"""

from __future__ import annotations

import os
import socket
import uuid
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from twinfire.artifacts.checkpoint import Checkpoint, open_checkpoint
from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.grammar_compiler import GrammarCompiler
from twinfire.artifacts.token_grammar import TokenGrammar
from twinfire.cache.kv_group import KvLayout
from twinfire.engine.engine import Engine
from twinfire.engine.memory import num_kv_blocks
from twinfire.engine.runner import LoadProgress, Runner
from twinfire.engine.sampler import Sampler
from twinfire.protocol.errors import ModelError
from twinfire.protocol.messages import WorkerInfo
from twinfire.protocol.speculation import parse_speculation
from twinfire.protocol.startup_stages import StartupStages
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.worker.backend import Backend, load_backend
from twinfire.worker.fingerprint import fingerprint
from twinfire.worker.kv_populator import KvPopulator
from twinfire.worker.speculation import build_speculator, num_lookahead_tokens, open_head
from twinfire.worker.step_tokens import prompt_tokens_beside_streams, step_tokens
from twinfire.worker.weight_saver import WeightSaver


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine that is ready to step."""

    engine: Engine
    runner: Runner
    info: WorkerInfo
    """The description that gateways get."""
    weight_saver: WeightSaver
    kv_populator: KvPopulator
    """To be started once requests are taken."""


def build_engine(
    config: WorkerConfig, progress: LoadProgress, stages: StartupStages, *, hash_seed: bytes = b""
) -> BuiltEngine:
    """Load the model, noting how long each stage took.

    `hash_seed` names blocks as other workers with it do; empty draws one at random.

    ModelError or MemoryTooSmall say what is wrong with the model or the settings.
    """

    def begin(stage: str, done: int = 0, total: int = 0) -> None:
        stages.begin(stage)
        progress(stage, done, total)

    begin("opening the model")
    checkpoint = open_checkpoint(Path(config.model_path))
    max_model_len = _max_model_len(config, checkpoint)
    speculation = parse_speculation(config.speculate)
    head = open_head(speculation, checkpoint)
    backend = load_backend(config, checkpoint, begin, head)
    begin("KV memory")
    runner = backend.runner
    num_blocks = num_kv_blocks(
        runner.kv_layout,
        kv_cache_bytes=config.kv_cache_bytes,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        available_bytes=backend.available_bytes(),
        kv_fraction=backend.kv_fraction,
    )
    runner.init_kv(num_blocks)
    scheduler_config = _scheduler_config(
        config, max_model_len, num_blocks, runner.kv_layout, hash_seed
    )
    if head is not None:
        scheduler_config = replace(
            scheduler_config, num_lookahead_tokens=num_lookahead_tokens(speculation)
        )
    scheduler = Scheduler(scheduler_config)
    if speculation.method != "off":
        begin("timing steps for drafts")
    speculator = build_speculator(speculation, runner, backend.sampling_ops, num_blocks)
    grammars = GrammarCompiler(
        lambda: TokenGrammar(open_checkpoint(checkpoint.path).tokenizer(), runner.vocab_size)
    )
    engine = Engine(
        scheduler,
        runner,
        Sampler(backend.sampling_ops),
        grammars=grammars,
        embeds=checkpoint.config.pooling is not None,
        speculator=speculator,
    )
    info = _worker_info(config, checkpoint, backend, head, max_model_len, num_blocks)
    info = msgspec.structs.replace(info, startup_stages=stages.finish())
    populator = KvPopulator(runner.populate_kv, num_blocks, runner.kv_layout.bytes_per_block)
    return BuiltEngine(engine, runner, info, WeightSaver(backend.save_weights), populator)


def _max_model_len(config: WorkerConfig, checkpoint: Checkpoint) -> int:
    window = checkpoint.config.max_position
    if config.max_model_len is None:
        return window
    if config.max_model_len > window:
        raise ModelError(
            f"max-model-len {config.max_model_len} is beyond the model's window of {window} tokens"
        )
    return config.max_model_len


def _scheduler_config(
    config: WorkerConfig, max_model_len: int, num_blocks: int, layout: KvLayout, hash_seed: bytes
) -> SchedulerConfig:
    return SchedulerConfig(
        num_blocks=num_blocks,
        max_model_len=max_model_len,
        block_size=layout.block_size,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=step_tokens(config),
        max_prompt_tokens_beside_streams=prompt_tokens_beside_streams(config),
        policy=config.scheduling_policy,
        enable_prefix_cache=config.enable_prefix_caching,
        hash_seed=hash_seed,
    )


def _worker_info(
    config: WorkerConfig,
    checkpoint: Checkpoint,
    backend: Backend,
    head: DraftHead | None,
    max_model_len: int,
    num_blocks: int,
) -> WorkerInfo:
    runner = backend.runner
    return WorkerInfo(
        instance_id=uuid.uuid4().hex,
        role=config.role,
        pid=os.getpid(),
        model=config.served_name,
        architecture=checkpoint.config.architecture,
        dtype=backend.dtype,
        vocab_size=runner.vocab_size,
        max_model_len=max_model_len,
        block_size=runner.kv_layout.block_size,
        num_kv_blocks=num_blocks,
        kv_bytes_per_block=runner.kv_layout.bytes_per_block,
        weight_bytes=runner.weight_bytes,
        max_num_seqs=config.max_num_seqs,
        host=socket.gethostname(),
        fingerprint=fingerprint(
            checkpoint, backend.dtype, runner.kv_layout, backend.kernel_version, head
        ),
        max_num_batched_tokens=step_tokens(config),
        name=config.name,
    )
