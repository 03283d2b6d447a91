"""The description of a decoder-only transformer, the same for every source file format."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from twinfire.protocol.pooling import Pooling

SUPPORTED_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")

RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base, rotated width and the scaling of long contexts."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position: int = 0
    """Window the model was trained with before scaling; 0 where `kind` needs none."""
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    """Multiplies cos and sin (yarn's mscale, resolved)."""


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What the model's own `generation_config.json` asks for; None where it is silent."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Sizes and variants. Lengths in tokens, widths in elements."""

    architecture: str
    """One of SUPPORTED_ARCHITECTURES."""
    vocab_size: int
    """Rows of the embedding table, padding rows included."""
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Attention window of each layer, None for full; empty when every layer is full."""
    dtype: str = "bf16"
    """The weights' own format: f32, f16, bf16, or a GGUF block format such as q4_1."""
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    pooling: Pooling | None = None
    """How texts are embedded, None for a model that generates. An embedding model has no head."""

    @property
    def head_width(self) -> int:
        """Columns of the last matrix: the vocabulary, or the embedding of an embedding model."""
        return self.vocab_size if self.pooling is None else self.hidden_size

    def window_of(self, layer: int) -> int | None:
        """Return the attention window of `layer` in tokens, None for full attention."""
        return self.sliding_windows[layer] if self.sliding_windows else None
