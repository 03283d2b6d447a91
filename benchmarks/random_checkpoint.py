"""Writes random weights of Llama 3.2 1B's shape, with another model's tokenizer, to be served.

A folder (bf16, in shards) and, for servers that read no other, the same weights as a GGUF file.
The tokenizer's vocabulary is filled up with tokens that no text gives.

    python benchmarks/random_checkpoint.py FOLDER [--tokenizer FOLDER]
                                           [--gguf FILE --gguf-tokenizer FILE]
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import gguf
import numpy as np

from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.tensor_layout import expected_shapes

SHARD_BYTES = 1 << 30
LLAMA_1B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}


def write_checkpoint(folder: Path, config: dict[str, object]) -> None:
    """Write config.json and shards; each tensor repeats one random megabyte at an offset."""
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.02, 1 << 20).astype(np.float32).view(np.uint32) >> 16
    noise = noise.astype(np.uint16)
    shards: list[list[tuple[str, tuple[int, ...]]]] = [[]]
    filled = 0
    for name, shape in _shapes(folder).items():
        num_bytes = 2 * int(np.prod(shape))
        if filled + num_bytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            filled = 0
        shards[-1].append((name, shape))
        filled += num_bytes
    weight_map = {}
    for index, tensors in enumerate(shards):
        file_name = f"model-{index + 1:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file_name, tensors, noise, rng)
        weight_map.update({name: file_name for name, _ in tensors})
    index_text = json.dumps({"weight_map": weight_map})
    (folder / "model.safetensors.index.json").write_text(index_text)


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    return expected_shapes(open_checkpoint(folder).config)


def _write_shard(
    path: Path,
    tensors: list[tuple[str, tuple[int, ...]]],
    noise: np.ndarray,
    rng: np.random.Generator,
) -> None:
    header, offset = {}, 0
    for name, shape in tensors:
        end = offset + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": (offset, end)}
        offset = end
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for _, shape in tensors:
            left = int(np.prod(shape))
            while left:
                piece = np.roll(noise, int(rng.integers(len(noise))))[:left]
                file.write(piece.tobytes())
                left -= len(piece)
        file.flush()
        os.fsync(file.fileno())


def write_tokenizer(folder: Path, source: Path, vocab_size: int) -> None:
    """Copy the text side of `source`, its vocabulary filled up."""
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    vocab = tokenizer["model"]["vocab"]
    taken = set(vocab.values()) | {token["id"] for token in tokenizer["added_tokens"]}
    vocab.update({_filler(id): id for id in range(vocab_size) if id not in taken})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        if (source / name).is_file():
            (folder / name).write_text((source / name).read_text())


def write_gguf(folder: Path, out: Path, tokenizer: Path) -> None:
    """Write the weights of `folder` with the tokenizer of another GGUF file, filled up."""
    checkpoint = open_checkpoint(folder)
    config, weights = checkpoint.config, checkpoint.weights
    writer = gguf.GGUFWriter(out, "llama")
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    _copy_tokenizer(writer, gguf.GGUFReader(tokenizer), config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_layers)
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
    for name in weights:
        tensor = weights.tensor(name)
        rows = tensor.raw
        if (num_heads := heads.get(name.split(".")[-2])) is not None:
            rows = rows.reshape(num_heads, 2, -1, tensor.shape[1]).swapaxes(1, 2)
        target = names.get_name(name, try_suffixes=(".weight",))
        if len(tensor.shape) == 1:
            writer.add_tensor(target, tensor.to_float32())
        else:
            content = np.ascontiguousarray(rows).view(np.uint8).reshape(tensor.shape[0], -1)
            writer.add_tensor(target, content, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _copy_tokenizer(writer: gguf.GGUFWriter, source: gguf.GGUFReader, vocab_size: int) -> None:
    fields = {name: field for name, field in source.fields.items() if name.startswith("tokenizer.")}
    for name, field in fields.items():
        value = field.contents()
        if name == "tokenizer.ggml.tokens":
            value = [*value, *map(_filler, range(len(value), vocab_size))]
        elif name == "tokenizer.ggml.token_type":
            value = [*value, *[gguf.TokenType.UNUSED] * (vocab_size - len(value))]
        if field.types[0] is gguf.GGUFValueType.ARRAY:
            writer.add_array(name, value)
        else:
            writer.add_key_value(name, value, field.types[0])


def _filler(token_id: int) -> str:
    return f"<|unused_{token_id}|>"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="a model's folder")
    parser.add_argument("--gguf", type=Path, help="write this file too")
    parser.add_argument("--gguf-tokenizer", type=Path, help="a model's GGUF file")
    args = parser.parse_args()
    if (args.gguf is None) != (args.gguf_tokenizer is None):
        parser.error("--gguf and --gguf-tokenizer go together")
    args.folder.mkdir(parents=True, exist_ok=True)
    write_checkpoint(args.folder, LLAMA_1B)
    if args.tokenizer is not None:
        write_tokenizer(args.folder, args.tokenizer, LLAMA_1B["vocab_size"])
    if args.gguf is not None:
        write_gguf(args.folder, args.gguf, args.gguf_tokenizer)


if __name__ == "__main__":
    main()
