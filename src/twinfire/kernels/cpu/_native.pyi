"""The extension module, built from `csrc/`."""

kernel_version: str
"""Changes whenever a kernel's source or the compiler does: equal versions compute equal bits."""

def isa() -> str:
    """Return the greatest instruction set that this processor has kernels for."""

def supported_isas() -> list[str]:
    """Return every usable instruction set, the least first."""

class ThreadTeam:
    """Threads that compute steps; one of them is the caller's. One step at a time."""

    def __init__(self, num_threads: int, spin_us: int = 50) -> None: ...
    @property
    def num_threads(self) -> int:
        """The caller's included."""

    def measure_phases(self, num_phases: int, tiles_per_phase: int) -> tuple[float, int]:
        """Run empty tiles; return (microseconds per phase, tiles run)."""
