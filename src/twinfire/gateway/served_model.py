"""The model that a gateway serves: its names, and its text side once that is loaded.

The text side loads on a thread while the worker loads weights, so a server can bind its port first
and say why it is not ready.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import time
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from twinfire import __version__
from twinfire.artifacts.checkpoint import open_checkpoint
from twinfire.artifacts.model_config import ModelConfig
from twinfire.gateway.errors import not_ready, unknown_model
from twinfire.gateway.text.tokenizer import ChatTemplate, Tokenizer
from twinfire.gateway.text.vocabulary import Vocabulary
from twinfire.protocol.errors import ModelError
from twinfire.protocol.messages import WorkerInfo

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TextSide:
    """Everything that turns text into ids and back. Building it reads the whole vocabulary."""

    tokenizer: Tokenizer
    template: ChatTemplate | None
    config: ModelConfig
    vocabulary: Vocabulary

    @classmethod
    def load(
        cls, tokenizer: Tokenizer, template: ChatTemplate | None, config: ModelConfig
    ) -> TextSide:
        """Prepare the vocabulary; takes tens of milliseconds, so not on an event loop."""
        return cls(tokenizer, template, config, Vocabulary(tokenizer))


@dataclass(slots=True)
class ServedModel:
    """One model under its public names; the first is the one that answers carry."""

    names: tuple[str, ...]
    text: TextSide | None = None
    """None while it loads."""
    load_error: str | None = None
    """Why it will not load."""
    created_s: int = field(default_factory=lambda: int(time.time()))

    @property
    def unready_reason(self) -> str | None:
        """Why text cannot be handled now, None when it can."""
        if self.text is not None:
            return None
        return self.load_error or "loading: tokenizer"

    async def load_text(self, path: Path) -> None:
        """Load the text side of a model on a thread; `load_error` keeps what goes wrong."""
        try:
            self.text = await asyncio.to_thread(_read_text_side, path)
            # Nothing loaded so far goes away; walking it would hold every stream up for 30 ms.
            gc.freeze()
        except ModelError as error:
            self.load_error = str(error)
        except Exception:
            log.exception("the text side of %s cannot be loaded", path)
            self.load_error = "the tokenizer cannot be loaded; the server's log says why"

    def require_name(self, name: str | None) -> str:
        """Return the name to answer with; 404 when `name` is not one of ours."""
        if name is None or name == "":
            return self.names[0]
        if name not in self.names:
            raise unknown_model(name)
        return name


def _read_text_side(path: Path) -> TextSide:
    checkpoint = open_checkpoint(path)
    return TextSide.load(checkpoint.tokenizer(), checkpoint.chat_template(), checkpoint.config)


@dataclass(frozen=True, slots=True)
class ReadyModel:
    """A model that can serve a request now."""

    name: str
    """As the client called it."""
    text: TextSide
    worker: WorkerInfo

    @property
    def max_model_len(self) -> int:
        """Prompt and output tokens that fit."""
        return self.worker.max_model_len

    @property
    def fingerprint(self) -> str:
        """Equal for workers that draw equal tokens from equal seeds."""
        worker = self.worker
        identity = f"{__version__}/{worker.model}/{worker.architecture}/{worker.dtype}"
        return "fp_" + sha256(identity.encode()).hexdigest()[:12]

    @property
    def max_text_bytes(self) -> int:
        """A longer text cannot fit, whatever its tokens are."""
        return self.worker.max_model_len * self.text.vocabulary.longest_token_bytes


def ready_model(
    model: ServedModel, name: str | None, worker: WorkerInfo | None, unready_reason: str | None
) -> ReadyModel:
    """Return the model if it can serve; 404 for another name, 503 with the reason otherwise."""
    public_name = model.require_name(name)
    reason = unready_reason or model.unready_reason
    if reason is not None or worker is None or model.text is None:
        raise not_ready(reason or "the worker is not ready")
    return ReadyModel(public_name, model.text, worker)
