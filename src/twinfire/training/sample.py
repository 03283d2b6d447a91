"""One text to learn from, as token ids, and files of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from twinfire.protocol.errors import InvalidRequest


class Sample(msgspec.Struct, frozen=True):
    """A prompt with its answer."""

    tokens: list[int]
    """All of it, the prompt first."""
    answer_start: int
    """Index of the answer's first token."""
    domain: str
    """What kind of work it is; acceptance is reported for each."""
    temperature: float = 0.0
    """That the answer was drawn at."""


class SampleFile:
    """Samples as JSON lines. A line that a kill left half written is dropped when reading."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, samples: Iterable[Sample]) -> None:
        """Add samples at the end."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._end_last_line()
        with self.path.open("ab") as file:
            for sample in samples:
                file.write(msgspec.json.encode(sample) + b"\n")

    def read(self) -> Iterator[Sample]:
        """Yield all samples, none when there is no file; InvalidRequest names a line that is none.

        The last line may be incomplete.
        """
        if not self.path.is_file():
            return
        decoder = msgspec.json.Decoder(Sample)
        with self.path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    sample = decoder.decode(line)
                except msgspec.MsgspecError as error:
                    if not line.endswith(b"\n"):
                        return
                    raise InvalidRequest(f"{self.path}, line {number}: {error}") from None
                if not 0 < sample.answer_start < len(sample.tokens):
                    raise InvalidRequest(
                        f"{self.path}, line {number}: `answer_start` is {sample.answer_start}; "
                        f"it must lie inside the {len(sample.tokens)} tokens"
                    )
                yield sample

    def num_tokens(self) -> int:
        """Return the tokens of all samples."""
        return sum(len(sample.tokens) for sample in self.read())

    def _end_last_line(self) -> None:
        if not self.path.is_file() or self.path.stat().st_size == 0:
            return
        with self.path.open("r+b") as file:
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                content = self.path.read_bytes()
                file.truncate(content.rfind(b"\n") + 1)
