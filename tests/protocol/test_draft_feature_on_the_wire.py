"""A commit's draft feature: bounded, and of no weight to a worker that does not know of it."""

from __future__ import annotations

import msgspec
import pytest

from twinfire.protocol.framing import FrameError, encode_frame, peer_decoder
from twinfire.protocol.messages import ChoiceDelta, PromptDone
from twinfire.protocol.peer_messages import MAX_DRAFT_FEATURE_BYTES, Commit, HandOffKey
from twinfire.protocol.tokens import pack_ids

COMMIT = Commit(
    HandOffKey("g", 1, 0),
    b"digest",
    2,
    PromptDone(1, 0, 0.0, 0.0),
    (ChoiceDelta(1, 0, pack_ids([5])),),
    draft="draft:1:1:16:bf16,key",
    draft_feature=b"\x00\x01\x02\x03" * 48,
)


class OlderCommit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """As it was before heads' features travelled."""

    key: HandOffKey
    prompt_digest: bytes
    num_prompt_blocks: int
    prompt: PromptDone
    first: tuple[ChoiceDelta, ...]
    block_sums: bytes = b""
    draft: str = ""


def test_it_comes_as_it_went() -> None:
    assert peer_decoder().feed(encode_frame(COMMIT)) == [COMMIT]


@pytest.mark.parametrize("length", [0, MAX_DRAFT_FEATURE_BYTES])
def test_up_to_the_limit_it_passes(length: int) -> None:
    commit = msgspec.structs.replace(COMMIT, draft_feature=bytes(length))
    assert peer_decoder().feed(encode_frame(commit)) == [commit]


@pytest.mark.parametrize("feature", [bytes(MAX_DRAFT_FEATURE_BYTES + 1), "text", 7, None, [1.0]])
def test_what_it_cannot_be_closes_the_link(feature: object) -> None:
    commit = msgspec.structs.replace(COMMIT, draft_feature=feature)
    with pytest.raises(FrameError):
        peer_decoder().feed(encode_frame(commit))


def test_workers_of_one_version_with_and_without_it_understand_each_other() -> None:
    fields = {name: getattr(COMMIT, name) for name in OlderCommit.__struct_fields__}
    older = OlderCommit(**fields)
    read = msgspec.msgpack.Decoder(OlderCommit).decode(encode_frame(COMMIT)[4:])
    assert read == older
    (received,) = peer_decoder().feed(encode_frame(older))  # type: ignore[arg-type]
    assert received == msgspec.structs.replace(COMMIT, draft_feature=b"")
