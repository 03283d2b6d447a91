"""A latent draft head from its file, and its rows in blocks: copied, sent, and told from others."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from support.checkpoint_files import write_model_folder
from support.draft_feeder import assert_same_drafts, torch_drafter
from support.draft_heads import write_head
from support.engines import Collector
from support.latent_heads import LATENT_VARIANTS, latent_head, latent_head_of
from support.step_batches import Fed
from support.tiny_models import TinyModel, tiny_model, tokens_of
from support.wire_blocks import exported
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.draft_head import DraftHead, open_draft_head
from twinfire.cache.kv_group import KvGroup, KvLayout
from twinfire.kernels.torch.kv_memory import KvMemory
from twinfire.protocol.errors import ModelError
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.startup_stages import StartupStages
from twinfire.protocol.worker_config import WorkerConfig
from twinfire.transfer.data_link import layout_text
from twinfire.worker.backend import load_backend
from twinfire.worker.build import build_engine


@pytest.fixture(scope="module")
def model() -> TinyModel:
    return tiny_model("llama")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_latent_blocks_survive_the_wire(model: TinyModel, dtype: str) -> None:
    head, tokens = latent_head("two_layers"), tokens_of(1, 71)
    sender, receiver = (torch_drafter(model, head, dtype) for _ in range(2))
    sent = Fed(tokens)
    sender.first([(sent, 64)])
    content = exported(sender.runner, sent.block_ids)
    assert len(content) == 2 * sender.runner.kv_layout.bytes_per_block
    receiver.runner.import_blocks([9, 8], content)
    assert exported(receiver.runner, [9, 8]) == content
    received = Fed(tokens, block_ids=[9, 8], num_computed=64)
    receiver.next_block[0] = 20
    (mine,) = receiver.chains([(received, 6)], 4)
    (theirs,) = sender.chains([(sent, 6)], 4)
    assert_same_drafts(mine, theirs)


def test_the_wire_layout_is_one_array_a_layer() -> None:
    group = KvGroup("draft", 2, 1, 24, "f32", values_in_keys=True)
    memory = KvMemory(group, 4, 32, torch.device("cpu"))
    rows = torch.randn(2, 4 * 32, 24)
    for layer in range(2):
        memory.write(layer, memory.token_rows(np.arange(4 * 32)), rows[layer])
    wire = np.frombuffer(exported(memory, [3, 1]), np.float32).reshape(2, 2, 32, 24)
    for index, block in enumerate((3, 1)):
        np.testing.assert_array_equal(wire[index], rows[:, 32 * block : 32 * block + 32])


def test_a_group_of_keys_alone_is_told_from_one_of_both() -> None:
    both = KvGroup("draft", 1, 1, 576, "bf16")
    alone = replace(both, values_in_keys=True)
    assert 2 * alone.bytes_per_block() == both.bytes_per_block()
    assert layout_text(KvLayout((both,))) != layout_text(KvLayout((alone,)))


def test_a_copied_block_takes_the_latents_along(model: TinyModel) -> None:
    head, tokens = latent_head("kimi"), tokens_of(2, 44)
    drafter, fed = torch_drafter(model, head), Fed(tokens)
    drafter.first([(fed, 40)])
    copy = drafter.next_block[0]
    drafter.next_block[0] += 1
    fork = Fed(tokens, block_ids=[fed.block_ids[0], copy], num_computed=40)
    batch = drafter.execute([(fork, 3)], block_copies=((fed.block_ids[1], copy),))
    drafted = drafter.draft.first(batch, np.arange(3, dtype=np.int32))
    (expected,) = torch_drafter(model, head).first([(Fed(tokens), 43)])
    np.testing.assert_array_equal(drafted.token_ids, expected.token_ids[-3:])
    np.testing.assert_array_equal(drafted.probabilities, expected.probabilities[-3:])


def test_weight_bytes_are_those_of_the_file(model: TinyModel) -> None:
    head = latent_head("kimi")
    drafter = torch_drafter(model, head)
    assert drafter.runner.draft is not None
    assert drafter.runner.draft.weight_bytes == head.weights.total_bytes


def kimi_folder(folder: Path, head: DraftHead, **changed: object) -> Path:
    """Write a head as lightseekorg/kimi-k2.6-eagle3.1-mla's config.json and tensors have it."""
    config, mla = head.config, head.config.mla
    assert mla is not None
    tensors = {key: torch.from_numpy(array) for key, array in head.weights.arrays.items()}
    if config.fc_norm:
        for index, old in enumerate(("low", "mid", "high")):
            tensors[f"aux_norm_{old}.weight"] = tensors.pop(f"fc_norm.{index}.weight")
    fields = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": config.rms_norm_eps,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_theta": config.rope.theta,
        "rope_scaling": {
            "type": "yarn",
            "factor": 64.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 1.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(config.feature_layers)},
        "vocab_size": config.vocab_size,
        **changed,
    }
    return write_head(folder, fields, tensors)


@pytest.mark.parametrize("name", ["kimi", "kimi_3_1"])
def test_a_published_layout_drafts_as_its_numbers_say(
    model: TinyModel, tmp_path: Path, name: str
) -> None:
    head = latent_head(name)
    opened = open_draft_head(kimi_folder(tmp_path, head), model.config)
    assert opened.config == replace(
        LATENT_VARIANTS[name], rope=opened.config.rope, mla=opened.config.mla
    )
    tokens = tokens_of(3, 60)
    (mine,) = torch_drafter(model, opened).chains([(Fed(tokens), 59)], 4)
    (theirs,) = torch_drafter(model, head).chains([(Fed(tokens), 59)], 4)
    assert_same_drafts(mine, theirs)


def test_a_turned_width_that_is_odd_is_refused(model: TinyModel, tmp_path: Path) -> None:
    folder = kimi_folder(tmp_path, latent_head("kimi"), qk_rope_head_dim=7)
    with pytest.raises(ModelError, match=r"qk_rope_head_dim.* is 7; .* needs an even one"):
        open_draft_head(folder, model.config)


def worker(path: Path, **fields: object) -> WorkerConfig:
    named = {"model_path": str(path), "served_name": "m", "socket_path": "", **fields}
    return WorkerConfig(**named)  # type: ignore[arg-type]


def test_native_kernels_and_int8_latents_are_refused(tmp_path: Path) -> None:
    write_model_folder(tmp_path)
    checkpoint, head = open_checkpoint(tmp_path), latent_head("kimi")
    for fields, message in (
        ({"backend": "native"}, "attention is mla .*takes --backend torch"),
        ({"quantization": "int8"}, "int8 takes the native backend, but .* attention is mla"),
        ({"kv_cache_dtype": "int8"}, "int8 takes the native backend; torch stores keys"),
    ):
        with pytest.raises(ModelError, match=message):
            load_backend(worker(tmp_path, **fields), checkpoint, lambda *_: None, head)


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_a_worker_serves_with_a_latent_head(tmp_path: Path, backend: str) -> None:
    write_model_folder(tmp_path / "model")
    sizes = {"hidden_size": 64, "target_hidden_size": 64, "vocab_size": 320}
    config = replace(
        LATENT_VARIANTS["kimi_3_1"], **sizes, draft_vocab_size=320, feature_layers=(0, 1, 2)
    )
    folder = kimi_folder(tmp_path / "head", latent_head_of(config, "served"))
    streams = []
    for speculate, kernels in ((f"eagle3:adaptive=false,head={folder}", backend), ("off", "torch")):
        settings = worker(tmp_path / "model", backend=kernels, speculate=speculate)
        built = build_engine(settings, lambda *_: None, StartupStages())
        collector = Collector(built.engine)
        params = SamplingParams(max_tokens=24, seed=3, temperature=0.0, ignore_eos=True)
        collector.submit(0, tokens_of(4, 40), params)
        collector.run()
        streams.append(collector.record("g", 0).answers[0].tokens)
        layout = built.runner.kv_layout
        assert built.info.kv_bytes_per_block == layout.bytes_per_block
        if speculate != "off":
            assert sum(built.engine.load().drafted) > 0
            assert layout.bytes_per_block - layout.groups[0].bytes_per_block() == 32 * 24 * 4
    assert streams[0] == streams[1]
