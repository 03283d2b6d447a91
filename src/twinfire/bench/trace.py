"""Real request traces: arrival times and lengths, read from files and scaled to a small server.

Reads the Mooncake form (JSON lines with `timestamp` in ms, lengths and `hash_ids` of 512-token
prompt blocks) and the Azure form (CSV with a time and two token counts). Owns the scaling and says
exactly what it did; never makes text.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

import msgspec

from twinfire.bench.distribution import percentile
from twinfire.protocol.errors import TwinfireError

TRACE_BLOCK_TOKENS = 512
_AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MIN_INPUT_TOKENS = 16
_FIT_PERCENT = 99.0


class TraceError(TwinfireError):
    """The file is no trace; the message names the line and what it should be."""


class TraceRequest(msgspec.Struct, frozen=True):
    """One request of a trace."""

    arrival_s: float
    """Since the first request kept."""
    input_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    """Names of the prompt's successive blocks: equal ids are equal text. Empty where unknown."""


class Scaling(msgspec.Struct, frozen=True):
    """What was done to a trace. A share is of the requests kept."""

    time_scale: float
    """Arrival times were multiplied by this."""
    length_scale: float
    """Input and output tokens were multiplied by this."""
    max_model_len: int
    requests_kept: int
    requests_in_file: int
    inputs_clipped: int
    outputs_clipped: int
    input_tokens_before: int
    input_tokens_after: int
    output_tokens_before: int
    output_tokens_after: int

    def sentence(self) -> str:
        """Say it for a report."""
        return (
            f"{self.requests_kept} of {self.requests_in_file} requests; arrival times x "
            f"{self.time_scale:g}; lengths x {self.length_scale:.4g}, then clipped to a window of "
            f"{self.max_model_len} tokens ({self.inputs_clipped} prompts and "
            f"{self.outputs_clipped} outputs clipped); prompt tokens {self.input_tokens_before} -> "
            f"{self.input_tokens_after}, output tokens {self.output_tokens_before} -> "
            f"{self.output_tokens_after}"
        )


class _MooncakeLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path) -> list[TraceRequest]:
    """Return the requests of a file in order of arrival; TraceError when it is no trace."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"trace {path}: {error}") from None
    requests = _mooncake(path, text) if text.lstrip().startswith("{") else _azure(path, text)
    if not requests:
        raise TraceError(f"trace {path}: no request in it")
    return sorted(requests, key=lambda request: request.arrival_s)


def _mooncake(path: Path, text: str) -> list[TraceRequest]:
    decoder = msgspec.json.Decoder(_MooncakeLine)
    requests = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = decoder.decode(line)
        except msgspec.DecodeError as error:
            raise TraceError(f"trace {path} line {number}: {error}") from None
        arrival_s = entry.timestamp / 1e3
        requests.append(
            TraceRequest(arrival_s, entry.input_length, entry.output_length, entry.hash_ids)
        )
    return requests


def _azure(path: Path, text: str) -> list[TraceRequest]:
    rows = csv.DictReader(io.StringIO(text))
    if not set(_AZURE_COLUMNS) <= set(rows.fieldnames or ()):
        raise TraceError(
            f"trace {path}: neither JSON lines with timestamp, input_length and output_length "
            f"nor a CSV with the columns {', '.join(_AZURE_COLUMNS)}"
        )
    requests = []
    first: datetime | None = None
    for number, row in enumerate(rows, 2):
        try:
            # Seven decimals of a second: datetime takes six.
            time = datetime.fromisoformat(row["TIMESTAMP"][:26])
            lengths = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (ValueError, TypeError) as error:
            raise TraceError(f"trace {path} line {number}: {error}") from None
        first = first or time
        requests.append(TraceRequest((time - first).total_seconds(), *lengths))
    return requests


def scale_trace(
    requests: Sequence[TraceRequest],
    *,
    max_model_len: int,
    length_scale: float | None = None,
    time_scale: float = 1.0,
    max_requests: int | None = None,
) -> tuple[list[TraceRequest], Scaling]:
    """Return the first `max_requests`, scaled and clipped, and what was done.

    `length_scale` None chooses the largest factor up to 1 with which 99 % of the requests fit.
    Outputs are clipped to a quarter of the window before prompts are clipped to the rest.
    """
    kept = list(requests[:max_requests])
    factor = _fitting_scale(kept, max_model_len) if length_scale is None else length_scale
    start_s = kept[0].arrival_s
    scaled = []
    inputs_clipped = outputs_clipped = 0
    for request in kept:
        wanted_output = max(round(request.output_tokens * factor), 1)
        wanted_input = max(round(request.input_tokens * factor), _MIN_INPUT_TOKENS)
        if wanted_input + wanted_output > max_model_len:
            output_tokens = min(wanted_output, max(max_model_len // 4, 1))
        else:
            output_tokens = wanted_output
        input_tokens = min(wanted_input, max_model_len - output_tokens)
        outputs_clipped += output_tokens < wanted_output
        inputs_clipped += input_tokens < wanted_input
        arrival_s = (request.arrival_s - start_s) * time_scale
        scaled.append(TraceRequest(arrival_s, input_tokens, output_tokens, request.block_ids))
    return scaled, Scaling(
        time_scale=time_scale,
        length_scale=factor,
        max_model_len=max_model_len,
        requests_kept=len(kept),
        requests_in_file=len(requests),
        inputs_clipped=inputs_clipped,
        outputs_clipped=outputs_clipped,
        input_tokens_before=sum(request.input_tokens for request in kept),
        input_tokens_after=sum(request.input_tokens for request in scaled),
        output_tokens_before=sum(request.output_tokens for request in kept),
        output_tokens_after=sum(request.output_tokens for request in scaled),
    )


def _fitting_scale(requests: Sequence[TraceRequest], max_model_len: int) -> float:
    totals = sorted(float(r.input_tokens + r.output_tokens) for r in requests)
    return min(1.0, max_model_len / max(percentile(totals, _FIT_PERCENT), 1.0))
