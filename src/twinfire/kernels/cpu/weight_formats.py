"""Which packed format a matrix gets, from its format on disk and the quantisation asked for.

`auto` keeps the precision of the file: 4- and 8-bit blocks of 32 stay as they are, 16 and 32 bits
become bf16, and what has no kernel of its own takes the next wider form. `none` is bf16, `int8`
rounds weights by row and activations by token, `int4` is blocks of 32 in 4 bits, weights alone.
"""

from __future__ import annotations

from collections.abc import Iterable

from twinfire.protocol.worker_config import Quantization

_OWN_FORMAT = {
    "f32": "bf16",
    "f16": "bf16",
    "bf16": "bf16",
    "q4_0": "q4_0",
    "q4_1": "q4_1",
    "q8_0": "q8_0",
    # Super-blocks: six bits lose nothing in eight, and four with 6-bit scales would lose in four.
    "q4_k": "q8_0",
    "q6_k": "q8_0",
}
_FOUR_BITS = ("q4_0", "q4_1")


def packed_format(
    formats_on_disk: Iterable[str], quantization: Quantization, *, is_head: bool
) -> str:
    """Return the packed format of a matrix whose parts lie on disk so.

    The head of an int4 model keeps eight bits: every token is drawn from its scores.
    """
    own = {_OWN_FORMAT[name] for name in formats_on_disk}
    if quantization == "none":
        return "bf16"
    if quantization == "int8":
        return "int8"
    common = own.pop() if len(own) == 1 else ("bf16" if "bf16" in own else "q8_0")
    if quantization == "int4" and common not in _FOUR_BITS:
        return "q8_0" if is_head else "q4_0"
    return common
