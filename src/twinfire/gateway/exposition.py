"""Several Prometheus expositions as one text, in which each metric is described once."""

from __future__ import annotations

from collections.abc import Sequence

_HELP = b"# HELP "


def merged_exposition(texts: Sequence[bytes]) -> bytes:
    """Return all samples, those of one metric together under the description of the first."""
    if len(texts) == 1:
        return texts[0]
    metrics: dict[bytes, list[bytes]] = {}
    for text in texts:
        lines: list[bytes] = []
        for line in text.splitlines(keepends=True):
            if line.startswith(_HELP):
                name = line[len(_HELP) :].split(b" ", 1)[0]
                lines = metrics.setdefault(name, [])
            if not line.startswith(b"#") or line not in lines:
                lines.append(line)
    return b"".join(line for lines in metrics.values() for line in lines)
