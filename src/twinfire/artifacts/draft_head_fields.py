"""`config.json` of a published draft head as a DraftHeadConfig.

Owns where each family keeps its settings: at the top, in `eagle_config` (ModelOpt), or in
`transformer_layer_config` (speculators). A setting that changes what is drafted and that is not
computed is refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twinfire.artifacts.aux_layers import AuxLayers, aux_layers
from twinfire.artifacts.draft_head_config import DraftHeadConfig, MlaSizes
from twinfire.artifacts.draft_head_source import DRAFT_IDS, OUTPUT_HEAD, DraftHeadSource
from twinfire.artifacts.fields import Fields, read_json_fields, shown
from twinfire.artifacts.file_names import CONFIG_FILE
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.rope_config import rope_from_config, yarn_mscale

_LAYER_CONFIG = "transformer_layer_config"
_REFUSED_WHEN_SET = ("attention_bias", "mlp_bias", "quantization_config")
_MUST_BE = {
    # What ModelOpt's exporter can switch, at the values that EAGLE-3 has.
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def read_draft_head_config(
    source: DraftHeadSource, target: ModelConfig, aux_layer_ids: Sequence[int] | None
) -> tuple[DraftHeadConfig, AuxLayers | None]:
    """Return a head's sizes and flags, and how its layer numbers were read, None without any.

    ModelError names the field that is missing, unsupported, or does not fit the target.
    """
    fields, eagle = _fields(source.folder)
    _refuse_unsupported(fields, eagle)
    hidden_size = fields.integer("hidden_size")
    target_hidden_size = fields.integer("target_hidden_size", target.hidden_size)
    vocab_size = fields.integer("vocab_size")
    for name, found, wanted in (
        ("target_hidden_size", target_hidden_size, target.hidden_size),
        ("vocab_size", vocab_size, target.vocab_size),
    ):
        if found != wanted:
            raise fields.fault(name, f"is {found}; the target's is {wanted}")
    uses_features = eagle.flag("use_aux_hidden_state", default=True)
    aux = aux_layers(eagle, target.num_layers, aux_layer_ids) if uses_features else None
    layers = () if aux is None else aux.layers
    if not uses_features and hidden_size != target_hidden_size:
        raise eagle.fault(
            "use_aux_hidden_state",
            f"is false, so hidden_size {hidden_size} must be the target's {target_hidden_size}",
        )
    count = fields.optional_integer("num_aux_hidden_states", 1)
    if count is not None and uses_features and count != len(layers):
        raise fields.fault("num_aux_hidden_states", f"is {count}, but {len(layers)} are named")
    if eagle.flag("norm_before_fc") and eagle.flag("fc_norm"):
        raise eagle.fault("fc_norm", "is true beside norm_before_fc, which is not supported")
    num_heads = fields.integer("num_attention_heads")
    rope = rope_from_config(fields, fields.integer("max_position_embeddings", target.max_position))
    mla = _mla(fields) if "layers.0.self_attn.kv_a_proj_with_mqa.weight" in source else None
    config = DraftHeadConfig(
        hidden_size=hidden_size,
        target_hidden_size=target_hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_heads if mla else _num_kv_heads(fields, num_heads),
        head_dim=(
            mla.qk_nope_head_dim + mla.qk_rope_head_dim
            if mla
            else _head_dim(fields, hidden_size, num_heads)
        ),
        num_layers=fields.integer("num_hidden_layers", 1),
        draft_vocab_size=_draft_vocab_size(fields, source, vocab_size),
        vocab_size=vocab_size,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, above=0.0),
        rope=rope,
        feature_layers=layers,
        norm_before_residual=eagle.flag(
            "norm_before_residual", default=fields.nested(_LAYER_CONFIG) is not None
        ),
        norm_before_fc=eagle.flag("norm_before_fc", default="input_norm.weight" in source),
        fc_norm=eagle.flag(
            "fc_norm", default=eagle.flag("use_aux_norm", default="fc_norm.0.weight" in source)
        ),
        norm_output=eagle.flag("norm_output"),
        uses_features=uses_features,
        attention="llama" if mla is None else "mla",
        mla=mla,
    )
    return config, aux


def _fields(folder: Path) -> tuple[Fields, Fields]:
    """Return the sizes, and the flags, which files keep at the top or in `eagle_config`."""
    top = read_json_fields(folder / CONFIG_FILE)
    values = {name: top.raw(name) for name in top if name in top}
    for section in (_LAYER_CONFIG, "eagle_config"):
        top.nested(section)
    layer, eagle = values.get(_LAYER_CONFIG), values.get("eagle_config")
    sizes = {**layer, **values} if isinstance(layer, dict) else values
    flags = {**values, **eagle} if isinstance(eagle, dict) else values
    return Fields(sizes, top.source), Fields(flags, top.source)


def _refuse_unsupported(fields: Fields, eagle: Fields) -> None:
    names = [*fields.texts("architectures"), fields.optional_text("speculators_model_type") or ""]
    names = [name for name in names if name]
    if names and not any("eagle3" in name.lower() for name in names):
        raise fields.fault("architectures", f"is {shown(names)}; only EAGLE-3 heads are read")
    for name in _REFUSED_WHEN_SET:
        if fields.raw(name):
            raise fields.fault(name, f"is {shown(fields.raw(name))}, which is not supported")
    if fields.number("logit_scale", 1.0) != 1.0:
        raise fields.fault("logit_scale", "is not 1, which is not supported")
    for name, wanted in _MUST_BE.items():
        if eagle.flag(name, default=wanted) != wanted:
            raise eagle.fault(name, f"is {not wanted}, which is not supported")
    if eagle.integer("parallel_draft_step", 1) > 1:
        raise eagle.fault("parallel_draft_step", "is above 1; such heads are not supported")
    activation = fields.optional_text("hidden_act") or "silu"
    if activation not in ("silu", "swish"):
        raise fields.fault("hidden_act", f"is '{activation}'; only silu is supported")
    if "sliding_attention" in fields.texts("layer_types"):
        raise fields.fault("layer_types", "has sliding_attention, which is not supported")


def _num_kv_heads(fields: Fields, num_heads: int) -> int:
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise fields.fault(
            "num_key_value_heads",
            f"is {num_kv_heads}, which does not divide num_attention_heads {num_heads}",
        )
    return num_kv_heads


def _head_dim(fields: Fields, hidden_size: int, num_heads: int) -> int:
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise fields.fault("head_dim", f"is {head_dim}; rotary embedding needs an even one")
    return head_dim


def _draft_vocab_size(fields: Fields, source: DraftHeadSource, vocab_size: int) -> int:
    size = fields.optional_integer("draft_vocab_size", 1)
    if size is None:
        size = source.shape(OUTPUT_HEAD)[0] if OUTPUT_HEAD in source else vocab_size
    if size > vocab_size:
        raise fields.fault("draft_vocab_size", f"is {size}, above vocab_size {vocab_size}")
    if size < vocab_size and DRAFT_IDS not in source:
        raise fields.fault(
            "draft_vocab_size",
            f"is {size} of {vocab_size}, but the head has no tensor '{DRAFT_IDS}' to tell which",
        )
    return size


def _mla(fields: Fields) -> MlaSizes:
    scaling = fields.nested("rope_parameters") or fields.nested("rope_scaling")
    factor = 1.0
    if scaling is not None:
        weight = scaling.optional_number("mscale_all_dim")
        if weight:
            factor = yarn_mscale(scaling.number("factor", 1.0), weight) ** 2
    rope_head_dim = fields.integer("qk_rope_head_dim")
    if rope_head_dim % 2:
        raise fields.fault(
            "qk_rope_head_dim", f"is {rope_head_dim}; rotary embedding needs an even one"
        )
    return MlaSizes(
        q_lora_rank=fields.optional_integer("q_lora_rank", 1),
        kv_lora_rank=fields.integer("kv_lora_rank"),
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=rope_head_dim,
        v_head_dim=fields.integer("v_head_dim"),
        score_factor=factor,
        rope_interleaved=fields.flag("rope_interleave", default=True),
    )
