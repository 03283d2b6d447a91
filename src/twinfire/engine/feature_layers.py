"""Which states of the target a draft head reads, checked against that target."""

from __future__ import annotations

from dataclasses import dataclass

from twinfire.artifacts.draft_head import DraftHead
from twinfire.artifacts.model_config import ModelConfig
from twinfire.protocol.errors import ModelError


@dataclass(frozen=True, slots=True)
class FeatureLayers:
    """What a target's step keeps."""

    layers: tuple[int, ...] = ()
    """Numbers of layers passed: 0 is the embedding."""
    keep_final: bool = False
    """The normed final state as well."""


def feature_layers_of(head: DraftHead | None, target: ModelConfig) -> FeatureLayers:
    """Return what a target keeps for its head; ModelError when the two do not fit."""
    if head is None:
        return FeatureLayers()
    config = head.config
    if target.pooling is not None:
        raise ModelError("a draft head has no use beside an embedding model")
    if config.target_hidden_size != target.hidden_size:
        raise ModelError(
            f"the draft head's target_hidden_size {config.target_hidden_size} is not the target's "
            f"hidden_size {target.hidden_size}"
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"the draft head's vocab_size {config.vocab_size} is not the target's "
            f"{target.vocab_size}"
        )
    if not config.uses_features:
        return FeatureLayers(keep_final=True)
    if not config.feature_layers:
        raise ModelError("the draft head's feature_layers are none")
    for layer in config.feature_layers:
        if not 0 <= layer <= target.num_layers:
            raise ModelError(
                f"the draft head reads the target after {layer} layers; it has {target.num_layers}"
            )
    return FeatureLayers(config.feature_layers)
