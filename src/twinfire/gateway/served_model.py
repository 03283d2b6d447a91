"""A model that a gateway serves: its names, and its text side once that is loaded.

The text side loads on a thread while the worker loads weights, so a server can bind its port first
and say why it is not ready.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path

from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.model_config import ModelConfig
from twinfire.gateway.text.answer_formats import AnswerFormats, ParserChoice, detect_formats
from twinfire.gateway.text.tokenizer import ChatTemplate, Tokenizer
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextSide:
    """Everything that turns text into ids and back. Building it reads the whole vocabulary."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    config: ModelConfig
    vocabulary: Vocabulary
    formats: AnswerFormats
    """How the model writes tool calls and reasoning."""

    @classmethod
    def load(
        cls,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        config: ModelConfig,
        parsers: ParserChoice | None = None,
    ) -> TextSide:
        """Prepare the vocabulary; takes tens of milliseconds, so not on an event loop."""
        vocabulary = Vocabulary(tokenizer)
        formats = detect_formats(template, vocabulary, parsers or ParserChoice())
        return cls(tokenizer, template, config, vocabulary, formats)


@dataclass(slots=True)
class ServedModel:
    """One model under its public names; the first is the one that answers carry."""

    names: tuple[str, ...]
    text: TextSide | None = None
    """None while it loads."""
    load_error: str | None = None
    """Why it will not load."""
    created_s: int = field(default_factory=lambda: int(time.time()))
    parsers: ParserChoice = field(default_factory=ParserChoice)
    """How calls and reasoning are read, where the operator says so."""

    @property
    def unready_reason(self) -> str | None:
        """Why text cannot be handled now, None when it can."""
        if self.text is not None:
            return None
        return self.load_error or "loading: tokenizer"

    async def load_text(self, path: Path) -> None:
        """Load the text side of a model on a thread; `load_error` keeps what goes wrong."""
        try:
            self.text = await asyncio.to_thread(_read_text_side, path, self.parsers)
            # Nothing loaded so far goes away; walking it would hold every stream up for 30 ms.
            gc.freeze()
        except ModelError as error:
            self.load_error = str(error)
        except Exception:
            log.exception("the text side of %s cannot be loaded", path)
            self.load_error = "the tokenizer cannot be loaded; the server's log says why"


def _read_text_side(path: Path, parsers: ParserChoice) -> TextSide:
    checkpoint = open_checkpoint(path)
    tokenizer, template = checkpoint.tokenizer(), checkpoint.chat_template()
    return TextSide.load(tokenizer, template, checkpoint.config, parsers)
