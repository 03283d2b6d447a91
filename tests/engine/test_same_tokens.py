"""One seed, one stream: the default model alone, batched, chunked and preempted."""

from __future__ import annotations

from functools import partial

import pytest

from support.native_runners import load_native
from support.token_streams import LoadRunner, assert_one_stream_per_seed
from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.engine.native_runner import NativeRunner
from twinfire.engine.torch_runner import TorchRunner, load_torch_runner
from twinfire.kernels.cpu.native_sampling import NativeSamplingOps
from twinfire.kernels.sampling_ops import SamplingOps
from twinfire.kernels.torch.sampling import TorchSamplingOps


def load_torch_f32(checkpoint: Checkpoint) -> TorchRunner:
    return load_torch_runner(
        checkpoint.config,
        checkpoint.weights,
        dtype="f32",
        num_threads=1,
        progress=lambda *_: None,
    )


def load_native_form(
    checkpoint: Checkpoint, quantization: str, kv_dtype: str = "bf16"
) -> NativeRunner:
    return load_native(
        checkpoint.config,
        checkpoint.weights,
        quantization,
        kv_dtype=kv_dtype,
        num_threads=2,
    )


FORMS = [
    pytest.param(load_torch_f32, TorchSamplingOps(), id="torch-f32"),
    pytest.param(partial(load_native_form, quantization="auto"), NativeSamplingOps(), id="native"),
    pytest.param(
        partial(load_native_form, quantization="none"), NativeSamplingOps(), id="native-bf16"
    ),
    pytest.param(
        partial(load_native_form, quantization="int8", kv_dtype="int8"),
        NativeSamplingOps(),
        id="native-int8",
    ),
]


@pytest.mark.parametrize(("load", "sampling_ops"), FORMS)
def test_one_stream_per_seed(load: LoadRunner, sampling_ops: SamplingOps) -> None:
    # Prompts of nearly a block, so that all of them grow at once.
    assert_one_stream_per_seed(load, sampling_ops, [28, 30, 25, 31, 70], max_tokens=10)


@pytest.mark.slow
@pytest.mark.parametrize(("load", "sampling_ops"), FORMS)
def test_one_stream_per_seed_on_200_prompts_of_128_tokens(
    load: LoadRunner, sampling_ops: SamplingOps
) -> None:
    lengths = [10 + i * 37 % 590 for i in range(200)]
    assert_one_stream_per_seed(load, sampling_ops, lengths, max_tokens=128)
