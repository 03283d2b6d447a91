"""How a worker guesses tokens ahead: the text of `--speculate`, read and checked.

`METHOD` or `METHOD:key=value,...`. Every option has its limits here, so that a wrong one is told
before a model is loaded.
"""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from twinfire.protocol.errors import InvalidRequest

SpeculationMethod = Literal["off", "ngram", "suffix", "eagle3", "hybrid"]

_MOST_DRAFTS = 64
_LIMITS: dict[str, tuple[int, int]] = {
    "max_drafts": (1, _MOST_DRAFTS),
    "head_drafts": (1, 16),
    "min_match": (1, 32),
    "max_match": (1, 64),
    "tree_depth": (2, 256),
    "tree_tokens": (0, 1 << 22),
}
_OPTIONS: dict[SpeculationMethod, tuple[str, ...]] = {
    "off": (),
    "ngram": ("max_drafts", "min_match", "max_match", "adaptive"),
    "suffix": ("max_drafts", "min_match", "tree_depth", "tree_tokens", "adaptive"),
    "eagle3": ("max_drafts", "head", "adaptive"),
    "hybrid": (
        *("max_drafts", "head_drafts", "head"),
        *("min_match", "tree_depth", "tree_tokens", "adaptive"),
    ),
}
_TRUTHS = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}


class SpeculationOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What `--speculate` says."""

    method: SpeculationMethod = "off"
    max_drafts: int = 16
    """Most tokens guessed ahead of a sequence; 4 with eagle3 unless told otherwise."""
    head_drafts: int = 4
    """Most of them that the draft head guesses, which costs a pass each."""
    head: str | None = None
    """Folder of the draft head; None is the one shipped for the model."""
    min_match: int = 1
    """Fewest tokens that must be found again before what followed them is guessed; 2 with ngram."""
    max_match: int = 8
    """Most tokens that ngram compares."""
    tree_depth: int = 64
    """Most tokens that suffix compares."""
    tree_tokens: int = 1 << 18
    """Tokens of past outputs kept for each tenant; 0 learns from no other request."""
    adaptive: bool = True
    """Whether the number of guesses that are checked follows what pays; False checks all."""


def parse_speculation(text: str) -> SpeculationOptions:
    """Return what `text` says; InvalidRequest names the option and its limit."""
    name, colon, rest = text.strip().partition(":")
    if name not in get_args(SpeculationMethod):
        known = ", ".join(get_args(SpeculationMethod))
        raise _wrong(f"{name!r} is no method; it must be one of {known}")
    method: SpeculationMethod = msgspec.convert(name, SpeculationMethod)
    values: dict[str, str] = {}
    if colon:
        for option in rest.split(","):
            key, equals, value = (part.strip() for part in option.partition("="))
            if not equals or not value:
                raise _wrong(f"{option.strip()!r} is not key=value")
            if key not in _OPTIONS[method]:
                raise _wrong(f"{method} has no option {key!r}; it has {_listed(method)}")
            if key in values:
                raise _wrong(f"{key} is given twice")
            values[key] = value
    options = SpeculationOptions(
        method=method,
        max_drafts=_number(values, "max_drafts", 4 if method == "eagle3" else 16),
        head_drafts=_number(values, "head_drafts", 4),
        head=values.get("head"),
        min_match=_number(values, "min_match", 2 if method == "ngram" else 1),
        max_match=_number(values, "max_match", 8),
        tree_depth=_number(values, "tree_depth", 64),
        tree_tokens=_number(values, "tree_tokens", 1 << 18),
        adaptive=_truth(values, "adaptive"),
    )
    longest, name = (
        (options.max_match, "max_match")
        if method == "ngram"
        else (options.tree_depth, "tree_depth")
    )
    if options.min_match > longest:
        raise _wrong(f"min_match {options.min_match} is above {name} {longest}")
    return options


def _number(values: dict[str, str], key: str, default: int) -> int:
    text = values.get(key)
    if text is None:
        return default
    least, most = _LIMITS[key]
    if not (text.isascii() and text.isdigit() and least <= int(text) <= most):
        raise _wrong(f"{key} is {text!r}; it must be a number from {least} to {most}")
    return int(text)


def _truth(values: dict[str, str], key: str) -> bool:
    text = values.get(key, "true")
    if text.lower() not in _TRUTHS:
        raise _wrong(f"{key} is {text!r}; it must be true or false")
    return _TRUTHS[text.lower()]


def _listed(method: SpeculationMethod) -> str:
    return ", ".join(_OPTIONS[method]) or "none"


def _wrong(message: str) -> InvalidRequest:
    return InvalidRequest(f"speculate: {message}", param="speculate")
