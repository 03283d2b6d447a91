"""Whether what a prefill worker says is about the request that the gateway announced."""

from __future__ import annotations

from twinfire.protocol.messages import Peer, Submit
from twinfire.protocol.peer_messages import Commit, Open
from twinfire.protocol.tokens import count_ids
from twinfire.transfer.prompt_digest import prompt_digest
from twinfire.transfer.reserves import Remembered


def check_open(message: Open, peer: Peer, reserve: Remembered) -> str | None:
    """Return what is wrong with an opening, None when nothing is."""
    if peer.instance_id != reserve.prefill_instance:
        return "another prefill worker opened this hand-off than the gateway announced"
    num_tokens = count_ids(reserve.submit.prompt)
    if message.num_prompt_tokens != num_tokens:
        return f"the prefill worker has a prompt of {message.num_prompt_tokens}, not {num_tokens}"
    return None


def check_commit(commit: Commit, submit: Submit, num_blocks: int) -> str | None:
    """Return what is wrong with a commit, None when nothing is."""
    if commit.prompt_digest != prompt_digest(submit):
        return "the prefill worker computed another prompt"
    if commit.num_prompt_blocks != num_blocks:
        return f"the prefill worker committed {commit.num_prompt_blocks} blocks, not {num_blocks}"
    # Those that were cancelled in time are missing.
    expected = submit.choices or range(submit.sampling.n)
    found = [delta.choice for delta in commit.first]
    if len(set(found)) < len(found) or not set(found) <= set(expected):
        return "the prefill worker committed other choices"
    ids = {commit.prompt.request_id, *(delta.request_id for delta in commit.first)}
    if ids != {submit.request_id}:
        return "the prefill worker committed another request"
    return None
