"""Draft heads that come with the package, and which head a model gets.

A shipped head is found by the weights it was trained for, never by a model's name. Drafts do not
change what is said, so a head for near weights is used, but never in silence.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import msgspec

from twinfire.artifacts.checkpoint import Checkpoint
from twinfire.artifacts.draft_head import DraftHead, open_draft_head
from twinfire.artifacts.fields import read_json_fields
from twinfire.artifacts.file_names import CONFIG_FILE
from twinfire.artifacts.target_mark import MARK_FIELD, TargetMark, likeness
from twinfire.protocol.errors import ModelError

log = logging.getLogger(__name__)
SHIPPED_FOLDER = Path(__file__).parent.parent / "data" / "draft_heads"


def resolve_draft_head(
    option: str | None,
    target: Checkpoint,
    *,
    aux_layer_ids: Sequence[int] | None = None,
    shipped_folder: Path = SHIPPED_FOLDER,
) -> DraftHead:
    """Open the head that `option` names: a folder, or a shipped head; None finds a shipped one.

    `aux_layer_ids` are the target's layers that the head reads, as numbers of layers passed, in
    place of those that its file is taken to mean. ModelError says what was looked for, or what in
    the head does not fit the target.
    """
    if option is None:
        path = find_shipped_head(target, shipped_folder)
        if path is None:
            raise ModelError(
                f"no draft head is shipped for {target.name} ({_shape(target)}); shipped are: "
                f"{_listed(shipped_folder)}. Name a head's folder, or make one: twinfire draft "
                "train"
            )
    elif Path(option).exists():
        path = Path(option)
    elif option in shipped_heads(shipped_folder):
        path = shipped_folder / option
        _note(path, target)
    else:
        raise ModelError(
            f"draft head '{option}' is neither a folder nor shipped; shipped are: "
            f"{_listed(shipped_folder)}"
        )
    return open_draft_head(path, target.config, aux_layer_ids=aux_layer_ids)


def find_shipped_head(target: Checkpoint, shipped_folder: Path = SHIPPED_FOLDER) -> Path | None:
    """Return the folder of the head for a target's weights, else of one for near weights."""
    near: Path | None = None
    for name in shipped_heads(shipped_folder):
        path = shipped_folder / name
        mark = read_mark(path)
        kind = "other" if mark is None else likeness(mark, target.config, target.weights)
        if kind == "same":
            return path
        if kind == "akin":
            near = near or path
    if near is not None:
        _note(near, target)
    return near


def shipped_heads(shipped_folder: Path = SHIPPED_FOLDER) -> list[str]:
    """Return the names of the heads that are there, in order."""
    return sorted(path.parent.name for path in shipped_folder.glob(f"*/{CONFIG_FILE}"))


def read_mark(folder: Path) -> TargetMark | None:
    """Return the weights a head was trained for, None where its file does not say."""
    fields = read_json_fields(folder / CONFIG_FILE)
    if MARK_FIELD not in fields:
        return None
    try:
        return msgspec.convert(fields.raw(MARK_FIELD), TargetMark)
    except msgspec.ValidationError as error:
        raise fields.fault(MARK_FIELD, f"is not a target's mark: {error}") from None


def _note(path: Path, target: Checkpoint) -> None:
    mark = read_mark(path)
    if mark is None or likeness(mark, target.config, target.weights) != "same":
        log.warning(
            "draft head %s was trained for other weights than %s has, of another format or "
            "fine-tune; what is said does not change, fewer drafts may be accepted "
            "(twinfire draft probe measures it)",
            path.name,
            target.name,
        )


def _shape(target: Checkpoint) -> str:
    config = target.config
    return f"{config.num_layers} layers of width {config.hidden_size}, {config.vocab_size} tokens"


def _listed(shipped_folder: Path) -> str:
    return ", ".join(shipped_heads(shipped_folder)) or "none"
