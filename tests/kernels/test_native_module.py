"""The extension module is there and knows its processor."""

from __future__ import annotations

from twinfire.kernels.cpu import _native


def test_the_least_instruction_set_runs_everywhere_and_the_greatest_is_chosen() -> None:
    isas = _native.supported_isas()
    assert isas[0] == "portable"
    assert _native.isa() == isas[-1]


def test_the_kernels_have_a_version() -> None:
    assert len(_native.kernel_version) == 16
    assert int(_native.kernel_version, 16) >= 0
