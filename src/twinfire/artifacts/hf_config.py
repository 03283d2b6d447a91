"""`config.json` and `generation_config.json` of a Hugging Face folder as a ModelConfig.

Owns which field means what for each architecture. A setting that would change the text and that
Twinfire does not compute is refused by name; nothing is guessed silently.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from twinfire.artifacts.fields import Fields, read_json_fields, shown
from twinfire.artifacts.file_names import CONFIG_FILE
from twinfire.artifacts.model_config import (
    SUPPORTED_ARCHITECTURES,
    GenerationDefaults,
    ModelConfig,
)
from twinfire.artifacts.pooling_config import read_pooling
from twinfire.artifacts.rope_config import rope_from_config
from twinfire.protocol.errors import ModelError

GENERATION_FILE = "generation_config.json"
_CLASSES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_DEFAULT_RMS_NORM_EPS = 1e-6
_REFUSED_WHEN_SET = (
    "quantization_config",
    "rope_interleaved",
    "use_qk_norm",
    "clip_qkv",
    "num_experts",
    "num_local_experts",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)


def read_hf_config(folder: Path, weights_format: Callable[[], str]) -> ModelConfig:
    """Read a folder's configuration.

    `weights_format` looks at the weights themselves; it is called where the file names no dtype.
    ModelError names the file and the field that is missing, inconsistent or unsupported.
    """
    config = read_json_fields(folder / CONFIG_FILE)
    pooling = read_pooling(folder)
    architecture = _architecture(config, embeds=pooling is not None)
    _refuse_unsupported(config)
    hidden_size = config.integer("hidden_size")
    num_heads = config.integer("num_attention_heads")
    num_layers = config.integer("num_hidden_layers")
    vocab_size = config.integer("vocab_size")
    max_position = config.integer("max_position_embeddings")
    rope = rope_from_config(config, max_position)
    if rope.kind == "yarn":
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    generation = _generation_fields(folder)
    attention_bias = architecture in ("llama", "qwen3") and config.flag("attention_bias")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=config.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(config, architecture, num_heads),
        head_dim=_head_dim(config, architecture, hidden_size, num_heads),
        rms_norm_eps=config.number("rms_norm_eps", _DEFAULT_RMS_NORM_EPS, above=0.0),
        max_position=max_position,
        rope=rope,
        tie_word_embeddings=config.flag("tie_word_embeddings"),
        qkv_bias=architecture == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=architecture == "llama" and config.flag("mlp_bias"),
        qk_norm=architecture == "qwen3",
        sliding_windows=_sliding_windows(config, architecture, num_layers, max_position),
        dtype=_dtype(config) or weights_format(),
        bos_token_id=next(iter(_token_ids(config, "bos_token_id", vocab_size)), None),
        eos_token_ids=_eos_token_ids(generation, config, vocab_size),
        generation=_generation_defaults(generation),
        pooling=pooling,
    )


def _architecture(config: Fields, *, embeds: bool) -> str:
    model_type = config.text("model_type")
    supported = ", ".join(SUPPORTED_ARCHITECTURES)
    if model_type not in _CLASSES:
        raise ModelError(
            f"{config.source}: architecture '{model_type}' is not supported; supported: {supported}"
        )
    classes = config.texts("architectures")
    generating = _CLASSES[model_type]
    known = [generating, generating.replace("ForCausalLM", "Model")] if embeds else [generating]
    if classes and not set(known) & set(classes):
        raise ModelError(
            f"{config.source}: '{classes[0]}' is not supported, only the text-generating "
            f"{generating} of this architecture; supported architectures: {supported}"
        )
    return model_type


def _refuse_unsupported(config: Fields) -> None:
    for name in _REFUSED_WHEN_SET:
        value = config.raw(name)
        if value:
            raise config.fault(name, f"is {shown(value)}, which is not supported")
    activation = config.optional_text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise config.fault("hidden_act", f"is '{activation}'; only silu is supported")


def _num_kv_heads(config: Fields, architecture: str, num_heads: int) -> int:
    # Only llama's own default is "as many as heads"; the others' is a number of one model size.
    default = num_heads if architecture == "llama" else None
    num_kv_heads = config.integer("num_key_value_heads", default)
    if num_heads % num_kv_heads:
        raise config.fault(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads {num_heads}",
        )
    return num_kv_heads


def _head_dim(config: Fields, architecture: str, hidden_size: int, num_heads: int) -> int:
    head_dim = config.optional_integer("head_dim", 1)
    if head_dim is None:
        if architecture == "qwen3":
            raise config.fault("head_dim", "is missing")
        if hidden_size % num_heads:
            raise config.fault(
                "num_attention_heads",
                f"is {num_heads}, which does not divide hidden_size {hidden_size}",
            )
        head_dim = hidden_size // num_heads
    if head_dim % 2:
        raise config.fault("head_dim", f"is {head_dim}; rotary embedding needs an even one")
    return head_dim


def _sliding_windows(
    config: Fields, architecture: str, num_layers: int, max_position: int
) -> tuple[int | None, ...]:
    if architecture == "llama":
        return ()
    if architecture != "mistral" and not config.flag("use_sliding_window"):
        return ()
    window = config.optional_integer("sliding_window", 1)
    if window is None or window >= max_position:
        return ()
    if architecture == "mistral":
        return (window,) * num_layers
    layer_types = config.texts("layer_types")
    if not layer_types:
        num_full_layers = config.integer("max_window_layers", minimum=0)
        return tuple(None if layer < num_full_layers else window for layer in range(num_layers))
    if len(layer_types) != num_layers:
        raise config.fault("layer_types", f"has {len(layer_types)} entries for {num_layers} layers")
    windows = {"full_attention": None, "sliding_attention": window}
    for layer_type in layer_types:
        if layer_type not in windows:
            raise config.fault(
                "layer_types", f"has '{layer_type}'; supported are {', '.join(windows)}"
            )
    return tuple(windows[layer_type] for layer_type in layer_types)


def _dtype(config: Fields) -> str | None:
    for name in ("dtype", "torch_dtype"):
        value = config.optional_text(name)
        if value is not None and value != "auto":
            if value not in _DTYPES:
                raise config.fault(name, f"is '{value}'; supported are {', '.join(_DTYPES)}")
            return _DTYPES[value]
    return None


def _token_ids(fields: Fields, name: str, vocab_size: int) -> tuple[int, ...]:
    """Return one id or a list of them; empty when absent or negative (a way to say none)."""
    value = fields.raw(name)
    if value is None:
        return ()
    ids: list[int] = []
    for token_id in value if isinstance(value, list) else [value]:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise fields.fault(name, f"must be a token id or a list of them, got {shown(value)}")
        if token_id >= vocab_size:
            raise fields.fault(name, f"has {token_id}, outside the vocabulary of {vocab_size}")
        if token_id >= 0:
            ids.append(token_id)
    return tuple(ids)


def _generation_fields(folder: Path) -> Fields:
    path = folder / GENERATION_FILE
    return read_json_fields(path) if path.is_file() else Fields({}, str(path))


def _eos_token_ids(generation: Fields, config: Fields, vocab_size: int) -> tuple[int, ...]:
    chosen = _token_ids(generation, "eos_token_id", vocab_size)
    return tuple(dict.fromkeys(chosen or _token_ids(config, "eos_token_id", vocab_size)))


def _generation_defaults(generation: Fields) -> GenerationDefaults:
    return GenerationDefaults(
        temperature=generation.optional_number("temperature"),
        top_p=generation.optional_number("top_p"),
        top_k=generation.optional_integer("top_k"),
        min_p=generation.optional_number("min_p"),
        repetition_penalty=generation.optional_number("repetition_penalty"),
    )
