"""One piece of memory for all panels: each in its place, none over another."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from twinfire.kernels.cpu.panel_memory import ALIGNMENT, allocate_panels


@given(st.lists(st.integers(1, 3 * ALIGNMENT), max_size=20))
def test_pieces_follow_each_other_aligned_and_apart(sizes: list[int]) -> None:
    pieces = allocate_panels(sizes)
    assert [len(piece) for piece in pieces] == sizes
    addresses = [piece.ctypes.data for piece in pieces]
    assert all(address % ALIGNMENT == 0 for address in addresses)
    ends = [address + size for address, size in zip(addresses, sizes, strict=True)]
    gaps = [start - end for start, end in zip(addresses[1:], ends, strict=False)]
    assert all(0 <= gap < ALIGNMENT for gap in gaps)
    for number, piece in enumerate(pieces):
        piece[:] = number
    assert all((piece == number).all() for number, piece in enumerate(pieces))
