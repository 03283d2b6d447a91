"""GGUF metadata as a ModelConfig.

Owns which key means what, and what only the tensors tell: biases, q/k norm, tied embeddings and
Llama 3's rope scaling. A GGUF calls Mistral `llama`; the two compute the same.
"""

from __future__ import annotations

from twinfire.artifacts.fields import Fields
from twinfire.artifacts.gguf_file import GgufArray, GgufFile
from twinfire.artifacts.gguf_source import ROPE_FREQS, main_format, read_float_tensor
from twinfire.artifacts.model_config import GenerationDefaults, ModelConfig
from twinfire.artifacts.rope_config import rope_from_gguf
from twinfire.protocol.errors import ModelError

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
_END_TOKEN_KEYS = ("eos", "eot", "eom")


def read_gguf_config(file: GgufFile) -> ModelConfig:
    """Return the model's description; ModelError naming a bad or unsupported key."""
    metadata = file.fields
    architecture = _architecture(metadata)
    _refuse_unsupported(metadata, architecture)
    hidden_size = metadata.integer(f"{architecture}.embedding_length")
    num_heads = _same_in_all_layers(file, f"{architecture}.attention.head_count", None)
    num_kv_heads = _same_in_all_layers(file, f"{architecture}.attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise metadata.fault(
            f"{architecture}.attention.head_count_kv",
            f"is {num_kv_heads}, which does not divide the head count {num_heads}",
        )
    head_dim = _head_dim(metadata, architecture, hidden_size, num_heads)
    vocab_size = _vocab_size(file)
    num_layers = metadata.integer(f"{architecture}.block_count")
    max_position = metadata.integer(f"{architecture}.context_length")
    rope = rope_from_gguf(metadata, architecture, head_dim, read_float_tensor(file, ROPE_FREQS))
    if rope.kind == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    window = metadata.optional_integer(f"{architecture}.attention.sliding_window")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=_same_in_all_layers(file, f"{architecture}.feed_forward_length", None),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=metadata.number(f"{architecture}.attention.layer_norm_rms_epsilon", above=0.0),
        max_position=max_position,
        rope=rope,
        tie_word_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
        qk_norm=architecture == "qwen3",
        sliding_windows=(window,) * num_layers if window and window < max_position else (),
        dtype=main_format(file),
        bos_token_id=_token_id(metadata, "bos", vocab_size),
        eos_token_ids=_eos_token_ids(metadata, vocab_size),
        generation=_generation_defaults(metadata),
    )


def rotated_heads(config: ModelConfig) -> dict[str, int]:
    """Return the projections whose rows the file has permuted, with their head counts."""
    if config.architecture != "llama":
        return {}
    return {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}


def _architecture(metadata: Fields) -> str:
    architecture = metadata.text("general.architecture")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"{metadata.source}: architecture '{architecture}' is not supported; supported in "
            f"GGUF files: {', '.join(GGUF_ARCHITECTURES)}"
        )
    return architecture


def _refuse_unsupported(metadata: Fields, architecture: str) -> None:
    if metadata.integer("split.count", 1, minimum=0) > 1:
        raise metadata.fault("split.count", "is above 1; merge the parts into one file first")
    experts = f"{architecture}.expert_count"
    if metadata.integer(experts, 0, minimum=0) > 0:
        raise metadata.fault(experts, "is above 0; mixtures of experts are not supported")


def _same_in_all_layers(file: GgufFile, name: str, default: int | None) -> int:
    """Return a size that a file may give once or per layer; ModelError when layers differ."""
    if not isinstance(file.fields.raw(name), GgufArray):
        return file.fields.integer(name, default)
    numbers = file.numbers(name)
    values = set() if numbers is None else set(numbers.tolist())
    if len(values) != 1:
        raise file.fields.fault(name, "differs between layers, which is not supported")
    return Fields({name: values.pop()}, file.fields.source).integer(name)


def _head_dim(metadata: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    name = f"{architecture}.attention.key_length"
    head_dim = metadata.optional_integer(name, 1)
    if head_dim is None:
        if hidden_size % num_heads:
            raise metadata.fault(
                f"{architecture}.attention.head_count",
                f"is {num_heads}, which does not divide the embedding length {hidden_size}",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise metadata.fault(name, f"is {head_dim}; rotary embedding needs an even head width")
    value_length = metadata.integer(f"{architecture}.attention.value_length", head_dim)
    if value_length != head_dim:
        raise metadata.fault(
            f"{architecture}.attention.value_length", f"is {value_length}, not {head_dim} as keys"
        )
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path}: tensor 'token_embd.weight' is missing or not a matrix")
    return embedding.shape[0]


def _token_id(metadata: Fields, kind: str, vocab_size: int) -> int | None:
    name = f"tokenizer.ggml.{kind}_token_id"
    token_id = metadata.optional_integer(name)
    if token_id is not None and token_id >= vocab_size:
        raise metadata.fault(name, f"is {token_id}, outside the vocabulary of {vocab_size}")
    return token_id


def _eos_token_ids(metadata: Fields, vocab_size: int) -> tuple[int, ...]:
    ids = (_token_id(metadata, kind, vocab_size) for kind in _END_TOKEN_KEYS)
    return tuple(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _generation_defaults(metadata: Fields) -> GenerationDefaults:
    prefix = "general.sampling"
    return GenerationDefaults(
        temperature=metadata.optional_number(f"{prefix}.temp"),
        top_p=metadata.optional_number(f"{prefix}.top_p"),
        top_k=metadata.optional_integer(f"{prefix}.top_k"),
        min_p=metadata.optional_number(f"{prefix}.min_p"),
        repetition_penalty=metadata.optional_number(f"{prefix}.penalty_repeat"),
    )
