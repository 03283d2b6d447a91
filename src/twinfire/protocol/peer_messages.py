"""What workers say to each other.

A prefill worker dials the decode worker that it hands requests to, and a worker that pulls a prefix
dials its holder; one link per pair and direction carries all of it. A hand-off is named by
`HandOffKey`; messages of a key that is not known any more are answered with `Abort` or ignored.
Bytes of KV never travel here: `transfer.connector` reads them.

    prefill                     decode
       Open          ------->      takes blocks
                     <-------   Ticket | Abort
       ChunkReady *  ------->      reads the blocks
       Commit        ------->      verifies, answers its gateway
                     <-------   Done
    Renew both ways while anything is open; Abort either way, answered by AbortAck.

    puller                      holder
       PullRequest   ------->      pins what it has
                     <-------   PullGrant
       PullDone      ------->      unpins
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from twinfire.protocol.messages import ChoiceDelta, Fingerprint, Peer, PromptDone

PEER_PROTOCOL_VERSION = 2
MAX_DRAFT_FEATURE_BYTES = 1 << 18
"""Of one row of floats as wide as a draft head: 65536 of them."""


class HandOffKey(msgspec.Struct, frozen=True, array_like=True):
    """One attempt of one request of one gateway's life."""

    gateway_id: str
    request_id: int
    attempt: int


class PeerHello(msgspec.Struct, frozen=True, array_like=True, tag="peer_hello"):
    """The first message of each side."""

    protocol_version: int
    peer: Peer
    """Who speaks."""
    fingerprint: Fingerprint
    connection: bytes = b""
    """What the connector of the other side needs to read from this one."""


class Open(msgspec.Struct, frozen=True, array_like=True, tag="open"):
    """The prompt will be computed soon: take blocks for it."""

    key: HandOffKey
    num_prompt_tokens: int


class Ticket(msgspec.Struct, frozen=True, array_like=True, tag="ticket"):
    """The blocks are taken; those of the first `num_cached_blocks` are filled already."""

    key: HandOffKey
    num_cached_blocks: int


class ChunkReady(msgspec.Struct, frozen=True, array_like=True, tag="chunk_ready"):
    """Blocks of the prompt that can be read. May repeat blocks after a preemption."""

    key: HandOffKey
    first_block: int
    """Index in the prompt of the first."""
    block_ids: bytes
    """u32 ids on the sender."""
    generations: bytes
    """i64, one per block; a read is good only while they have not changed."""


class Commit(msgspec.Struct, frozen=True, array_like=True, tag="commit"):
    """The prompt is computed and its first tokens are drawn; every block has been announced."""

    key: HandOffKey
    prompt_digest: bytes
    """`prompt_digest` of the ids that were computed, against mixed-up requests."""
    num_prompt_blocks: int
    """Blocks announced in all, the partly filled last one included."""
    prompt: PromptDone
    first: tuple[ChoiceDelta, ...]
    """One per choice; a choice that its first token ends says so."""
    block_sums: bytes = b""
    """crc32 of the target's groups in each block as u32, empty when contents are not checked."""
    draft: str = ""
    """The sender's `Fingerprint.draft`; a receiver with another one drafts without its head."""
    draft_feature: Annotated[bytes, msgspec.Meta(max_length=MAX_DRAFT_FEATURE_BYTES)] = b""
    """What the sender's head made of the target's features at the last token computed: f32, as wide
    as the head. A receiver with the same head drafts after the first tokens from it; without it, or
    without the same head, from what it computes itself. Workers of one version may lack the field.
    """


class Done(msgspec.Struct, frozen=True, array_like=True, tag="done"):
    """Everything has been read and accepted; the sender's blocks are not needed any more."""

    key: HandOffKey


class Abort(msgspec.Struct, frozen=True, array_like=True, tag="abort"):
    """The hand-off is over without success; forget it and answer `AbortAck`."""

    key: HandOffKey
    reason: str


class AbortAck(msgspec.Struct, frozen=True, array_like=True, tag="abort_ack"):
    """Nothing of the hand-off is held here any more."""

    key: HandOffKey


class Renew(msgspec.Struct, frozen=True, array_like=True, tag="renew"):
    """These hand-offs and pulls are still wanted; what is held for them is held on."""

    keys: tuple[HandOffKey, ...] = ()
    pull_ids: tuple[int, ...] = ()


class PullRequest(msgspec.Struct, frozen=True, array_like=True, tag="pull_request"):
    """Which of these consecutive blocks can be read?"""

    pull_id: int
    hashes: bytes
    """sha256 hashes, 32 bytes each, in the order of the prefix."""


class PullGrant(msgspec.Struct, frozen=True, array_like=True, tag="pull_grant"):
    """The leading blocks that are here, pinned until `PullDone` or the lease's end."""

    pull_id: int
    block_ids: bytes
    generations: bytes


class PullDone(msgspec.Struct, frozen=True, array_like=True, tag="pull_done"):
    """The reading is over, with or without success."""

    pull_id: int


PeerMessage = (
    PeerHello
    | Open
    | Ticket
    | ChunkReady
    | Commit
    | Done
    | Abort
    | AbortAck
    | Renew
    | PullRequest
    | PullGrant
    | PullDone
)
