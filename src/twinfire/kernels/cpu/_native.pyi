"""The extension module, built from `csrc/`."""

kernel_version: str
"""Changes whenever a kernel's source or the compiler does: equal versions compute equal bits."""

def isa() -> str:
    """Return the greatest instruction set that this processor has kernels for."""

def supported_isas() -> list[str]:
    """Return every usable instruction set, the least first."""
