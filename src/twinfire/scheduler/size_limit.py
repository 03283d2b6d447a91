"""Whether a sequence could ever run under the limits of a scheduler."""

from __future__ import annotations

from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler_config import SchedulerConfig
from twinfire.scheduler.sequence import Sequence


def check_can_ever_fit(sequence: Sequence, config: SchedulerConfig) -> None:
    """Raise InvalidRequest, naming need and limit, if the sequence does not fit even alone."""
    prompt, total = sequence.num_prompt_tokens, sequence.max_total_tokens
    assert sequence.num_tokens <= total, f"{sequence.key} is longer than it may become"
    if prompt < 1:
        raise InvalidRequest("the prompt is empty", param="prompt")
    param = "prompt" if prompt >= config.max_model_len else "max_tokens"
    size = f"this request needs {total} tokens ({prompt} prompt, {total - prompt} output)"
    if total > config.max_model_len:
        raise InvalidRequest(
            f"{size}; the limit is {config.max_model_len} (max_model_len)",
            param=param,
            code="context_length_exceeded",
        )
    # The last token drawn is never computed, so it needs no room.
    needed = config.blocks_for(max(prompt, total - 1))
    if needed > config.num_blocks:
        raise InvalidRequest(
            f"{size}, which is {needed} KV blocks of {config.block_size}; the limit is "
            f"{config.num_blocks} blocks (KV cache memory)",
            param=param,
            code="context_length_exceeded",
        )
