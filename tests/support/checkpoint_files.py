"""Small model files made on the spot: safetensors by hand, GGUF by its own writer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from twinfire.artifacts.hf_config import read_hf_config
from twinfire.artifacts.tensor_layout import expected_shapes

HF_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_json(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value), encoding="utf-8")
    return path


def safetensors_bytes(
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]], header: object = None
) -> bytes:
    """Return a file's bytes; `tensors` maps name to (dtype, shape, content)."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape, content) in tensors.items():
        end = offset + len(content)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(entries if header is None else header).encode()
    data = b"".join(content for _, _, content in tensors.values())
    return len(encoded).to_bytes(8, "little") + encoded + data


def f32_entries(
    arrays: Mapping[str, np.ndarray],
) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: ("F32", array.shape, array.astype("<f4").tobytes()) for name, array in arrays.items()
    }


def random_arrays(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()
    }


def write_model_folder(folder: Path, **changed: Any) -> dict[str, np.ndarray]:
    """Write a tiny random model; changes to its configuration of None leave a field out."""
    folder.mkdir(exist_ok=True)
    fields = {name: value for name, value in {**HF_CONFIG, **changed}.items() if value is not None}
    write_json(folder / "config.json", fields)
    arrays = random_arrays(expected_shapes(read_hf_config(folder, lambda: "f32")))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(f32_entries(arrays)))
    return arrays


def permuted(rows: np.ndarray, num_heads: int) -> np.ndarray:
    """Interleave the halves of each head, one row at a time, as GGUF converters do."""
    head_dim = len(rows) // num_heads
    out = np.empty_like(rows)
    for head in range(num_heads):
        for pair in range(head_dim // 2):
            base = head * head_dim
            out[base + 2 * pair] = rows[base + pair]
            out[base + 2 * pair + 1] = rows[base + pair + head_dim // 2]
    return out


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, rest = stem.split(".", 3)
        return f"blk.{index}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


class GgufBuilder:
    """A GGUF file in the making: `writer` is the library's, `save` finishes it."""

    def __init__(self, path: Path, architecture: str = "llama") -> None:
        self.path = path
        self.architecture = architecture
        self.writer = gguf.GGUFWriter(path, architecture)

    def add_sizes(self, **changed: Any) -> GgufBuilder:
        sizes: dict[str, Any] = {
            "block_count": 2,
            "context_length": 512,
            "embedding_length": 64,
            "feed_forward_length": 96,
            "attention.head_count": 4,
            "attention.head_count_kv": 2,
            "attention.layer_norm_rms_epsilon": 1e-5,
            "rope.freq_base": 10000.0,
        }
        for key, value in {**sizes, **changed}.items():
            if isinstance(value, float):
                self.writer.add_float32(f"{self.architecture}.{key}", value)
            elif isinstance(value, str):
                self.writer.add_string(f"{self.architecture}.{key}", value)
            elif isinstance(value, list):
                self.writer.add_array(f"{self.architecture}.{key}", value)
            elif value is not None:
                self.writer.add_uint32(f"{self.architecture}.{key}", value)
        return self

    def add_arrays(
        self, arrays: Mapping[str, np.ndarray], heads: Mapping[str, int] | None = None
    ) -> GgufBuilder:
        """Add tensors by Hugging Face name; rows of the projections in `heads` are permuted."""
        for name, array in arrays.items():
            projection = name.split(".")[-2]
            if heads and projection in heads:
                array = permuted(array, heads[projection])
            self.writer.add_tensor(gguf_name(name), array)
        return self

    def save(self) -> Path:
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()
        return self.path
