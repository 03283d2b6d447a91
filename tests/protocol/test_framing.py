import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinfire.protocol.framing import (
    FrameDecoder,
    FrameError,
    encode_frame,
    gateway_side_decoder,
    worker_side_decoder,
)
from twinfire.protocol.messages import (
    Cancel,
    ChoiceDelta,
    Hello,
    Load,
    LogprobRows,
    PromptDone,
    StepFrame,
    Submit,
    ToWorker,
)
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_floats, pack_ids, unpack_floats, unpack_ids

LOAD = Load(1, 2, 3, 4, 5, 6, 7, 8, 9)
TO_WORKER = [
    Hello(1, "g"),
    Submit(7, pack_ids([1, 2, 3]), SamplingParams(max_tokens=5, seed=2**63 - 1), 2, "salt"),
    Submit(
        8,
        pack_ids(range(1000)),
        SamplingParams(max_tokens=1, seed=-(2**63), logit_bias=((5, -1.5),), bad_words=((1, 2),)),
    ),
    Cancel(7),
]


@given(st.lists(st.integers(1, 40), max_size=60))
def test_messages_survive_any_cut_of_the_stream(cuts: list[int]) -> None:
    stream = b"".join(encode_frame(message) for message in TO_WORKER)
    decoder = worker_side_decoder()
    received: list[ToWorker] = []
    position = 0
    for cut in cuts:
        received += decoder.feed(stream[position : position + cut])
        position += cut
    received += decoder.feed(stream[position:])
    assert received == TO_WORKER


def test_step_frames_round_trip() -> None:
    rows = LogprobRows(1, pack_floats([-0.5]), pack_ids([1]), pack_ids([9]), pack_floats([-0.5]))
    frame = StepFrame(
        LOAD,
        (PromptDone(3, 32, 0.5, 0.25, rows),),
        (ChoiceDelta(3, 0, pack_ids([9]), "stop", 9, rows), ChoiceDelta(3, 1, b"")),
    )
    assert gateway_side_decoder().feed(encode_frame(frame)) == [frame]


@pytest.mark.parametrize(
    "garbage",
    [
        b"\xff\xff\xff\xff",
        b"\x02\x00\x00\x00\xc1\xc1",
        b"\x04\x00\x00\x00\x93\xa4\x01\x02",
        (200_000).to_bytes(4, "little") + b"\x91" * 200_000,
        encode_frame(StepFrame(LOAD)),
    ],
    ids=["huge length", "no msgpack", "truncated value", "deep nesting", "not for a worker"],
)
def test_garbage_raises_frame_error(garbage: bytes) -> None:
    with pytest.raises(FrameError):
        worker_side_decoder().feed(garbage)


def test_length_limit_is_named() -> None:
    decoder = FrameDecoder(msgspec.msgpack.Decoder(Hello), max_bytes=10)
    with pytest.raises(FrameError, match="limit is 10"):
        decoder.feed((11).to_bytes(4, "little"))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_ids_round_trip(ids: list[int]) -> None:
    assert list(unpack_ids(pack_ids(ids))) == ids


@given(st.lists(st.floats(width=32, allow_nan=False)))
def test_floats_round_trip(values: list[float]) -> None:
    assert list(unpack_floats(pack_floats(values))) == values


def test_ids_out_of_range_are_refused() -> None:
    for bad in (-1, 2**32):
        with pytest.raises(OverflowError):
            pack_ids([bad])
