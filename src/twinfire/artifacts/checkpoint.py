"""A model on disk, opened: a Hugging Face folder or a GGUF file behind one interface.

Opening reads the configuration only. Weights, tokenizer and chat template are separate steps, so a
worker never reads a vocabulary and a gateway never maps a weight.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from twinfire.artifacts.fields import read_json_fields
from twinfire.artifacts.file_names import CONFIG_FILE, GGUF_SUFFIX
from twinfire.artifacts.gguf_config import read_gguf_config, rotated_heads
from twinfire.artifacts.gguf_file import GgufFile
from twinfire.artifacts.gguf_source import GgufSource
from twinfire.artifacts.hf_config import read_hf_config
from twinfire.artifacts.model_config import ModelConfig
from twinfire.artifacts.safetensors_source import SafetensorsSource
from twinfire.artifacts.tensor_layout import check_tensors
from twinfire.artifacts.tensors import WeightSource
from twinfire.protocol.errors import ModelError

# The text side is imported where it is built: a worker must not pay for libraries it never uses.
if TYPE_CHECKING:
    from twinfire.artifacts.chat_template import ChatTemplate
    from twinfire.artifacts.tokenizer import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
PROCESSOR_TEMPLATE_FILE = "chat_template.json"


class Checkpoint(Protocol):
    """What a checkpoint gives. Each part raises ModelError that names file and fault."""

    @property
    def path(self) -> Path:
        """The folder or file."""
        ...

    @property
    def name(self) -> str:
        """The folder's or file's own name, without suffix."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Sizes and variants."""
        ...

    @property
    def weights(self) -> WeightSource:
        """The mapped tensors, checked against the configuration on first use."""
        ...

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The files that hold the weights."""
        ...

    def forget_pages(self) -> None:
        """Let the memory go that reading tensors took; they may be read again."""
        ...

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer; takes tenths of a second."""
        ...

    def chat_template(self) -> ChatTemplate | None:
        """Compile the model's chat template, None when it has none."""
        ...


class FolderCheckpoint:
    """A Hugging Face folder."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config = read_hf_config(path, lambda: SafetensorsSource(path).main_format)

    @property
    def path(self) -> Path:
        """The folder."""
        return self._path

    @property
    def name(self) -> str:
        """The folder's name."""
        return self._path.resolve().name

    @property
    def config(self) -> ModelConfig:
        """Sizes and variants."""
        return self._config

    @property
    def weights(self) -> WeightSource:
        """The mapped tensors, checked against the configuration."""
        return self._source

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The safetensors files."""
        return self._source.paths

    def forget_pages(self) -> None:
        """Let the memory go that reading tensors took."""
        self._source.forget_pages()

    @cached_property
    def _source(self) -> SafetensorsSource:
        source = SafetensorsSource(self._path)
        check_tensors(self._config, source, str(self._path))
        return source

    def tokenizer(self) -> Tokenizer:
        """Build the tokenizer of `tokenizer.json`."""
        from twinfire.artifacts.tokenizer_files import read_tokenizer

        return read_tokenizer(self._path)

    def chat_template(self) -> ChatTemplate | None:
        """Compile the template; its own file wins over the tokenizer's configuration."""
        from twinfire.artifacts.chat_template import ChatTemplate
        from twinfire.artifacts.tokenizer_files import read_special_tokens

        templates = self._templates()
        return ChatTemplate(templates, read_special_tokens(self._path)) if templates else None

    def _templates(self) -> dict[str, str]:
        from twinfire.artifacts.chat_template import DEFAULT_TEMPLATE, named_templates
        from twinfire.artifacts.tokenizer_files import TOKENIZER_CONFIG_FILE

        templates: dict[str, str] = {}
        for file_name in (PROCESSOR_TEMPLATE_FILE, TOKENIZER_CONFIG_FILE):
            path = self._path / file_name
            if path.is_file():
                templates.update(named_templates(read_json_fields(path)))
        for path in sorted((self._path / TEMPLATE_FOLDER).glob("*.jinja")):
            templates[path.stem] = read_text(path)
        own_file = self._path / TEMPLATE_FILE
        if own_file.is_file():
            templates[DEFAULT_TEMPLATE] = read_text(own_file)
        return templates


class GgufCheckpoint:
    """A GGUF file."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._config = read_gguf_config(self._file)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def name(self) -> str:
        """The file's name without suffix."""
        return self._file.path.stem

    @property
    def config(self) -> ModelConfig:
        """Sizes and variants."""
        return self._config

    @cached_property
    def weights(self) -> WeightSource:
        """The mapped tensors, checked against the configuration."""
        source = GgufSource(self._file, rotated_heads(self._config))
        check_tensors(self._config, source, str(self._file.path))
        return source

    @property
    def weight_files(self) -> tuple[Path, ...]:
        """The file itself."""
        return (self._file.path,)

    def forget_pages(self) -> None:
        """Let the memory go that reading tensors took."""
        self._file.mapped.forget_pages()

    def tokenizer(self) -> Tokenizer:
        """Rebuild the tokenizer from metadata."""
        from twinfire.artifacts.gguf_tokenizer import read_gguf_tokenizer

        return read_gguf_tokenizer(self._file)

    def chat_template(self) -> ChatTemplate | None:
        """Compile the template that the metadata holds."""
        from twinfire.artifacts.chat_template import ChatTemplate
        from twinfire.artifacts.gguf_tokenizer import gguf_special_tokens

        templates = self._templates()
        return ChatTemplate(templates, gguf_special_tokens(self._file)) if templates else None

    def _templates(self) -> dict[str, str]:
        from twinfire.artifacts.chat_template import DEFAULT_TEMPLATE

        key, fields = "tokenizer.chat_template", self._file.fields
        templates = {name: fields.text(f"{key}.{name}") for name in self._file.strings(f"{key}s")}
        default = fields.optional_text(key)
        if default is not None:
            templates[DEFAULT_TEMPLATE] = default
        return templates


def open_checkpoint(path: Path) -> Checkpoint:
    """Open a folder or a .gguf file; ModelError when it is neither, or not a supported model."""
    if path.is_dir():
        if (path / CONFIG_FILE).is_file():
            return FolderCheckpoint(path)
        files = sorted(file.name for file in path.glob(f"*{GGUF_SUFFIX}"))
        hint = f"; it holds {', '.join(files)}, name one of them" if files else ""
        raise ModelError(f"{path} has no {CONFIG_FILE}{hint}")
    if not path.exists():
        raise ModelError(f"{path} does not exist")
    if path.suffix.lower() != GGUF_SUFFIX:
        raise ModelError(f"{path} is neither a model folder nor a {GGUF_SUFFIX} file")
    return GgufCheckpoint(path)


def read_text(path: Path) -> str:
    """Return a text file's content; ModelError naming it when it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
