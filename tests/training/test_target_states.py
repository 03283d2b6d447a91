"""Features of the target against transformers' hidden states."""

from __future__ import annotations

import pytest
import torch

from support.tiny_models import tiny_model
from twinfire.training.target_states import TargetStates


@pytest.mark.parametrize("name", ["llama_tied", "qwen3", "mistral_window"])
def test_features_are_the_residual_stream_after_so_many_layers(name: str) -> None:
    tiny = tiny_model(name)
    texts = [[(7 * i + 3) % 131 for i in range(70)], [5, 6, 7], [(11 * i) % 131 for i in range(32)]]
    layers = (0, 1, 2, 3)
    states = TargetStates(tiny.config, tiny.weights, layers, max_tokens=128).compute(texts)
    for text, own in zip(texts, states, strict=True):
        with torch.inference_mode():
            output = tiny.reference.model(torch.tensor([text]), output_hidden_states=True)
        # transformers' last entry is normed; the one before the norm is not among them.
        theirs = torch.cat([output.hidden_states[layer][0] for layer in (0, 1, 2)], dim=1)
        width = tiny.config.hidden_size
        assert own.features.shape == (len(text), 4 * width)
        assert _relative_error(own.features[:, : 3 * width].float(), theirs) < 0.03
        assert _relative_error(own.final.float(), output.last_hidden_state[0]) < 0.03


def test_the_state_before_the_final_norm_is_what_the_norm_reads() -> None:
    tiny = tiny_model("llama")
    (own,) = TargetStates(tiny.config, tiny.weights, (3,), max_tokens=64).compute([[1, 2, 3, 4]])
    weight = torch.from_numpy(tiny.weights.arrays["model.norm.weight"])
    state = own.features.float()
    normed = state * torch.rsqrt(state.square().mean(-1, keepdim=True) + 1e-5) * weight
    assert _relative_error(own.final.float(), normed) < 0.03


def test_more_tokens_than_a_step_holds_are_refused() -> None:
    tiny = tiny_model("llama")
    target = TargetStates(tiny.config, tiny.weights, (1,), max_tokens=64)
    with pytest.raises(ValueError, match="do not fit"):
        target.compute([[1] * 200])


def _relative_error(own: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((own - theirs).norm() / theirs.norm())
