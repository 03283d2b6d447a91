"""Plain tables for a terminal and for pipes."""

from __future__ import annotations

from collections.abc import Sequence


def text_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, two spaces apart."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in (header, *rows)
    )
    return "\n".join(lines)
