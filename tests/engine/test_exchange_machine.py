"""Two engines that exchange prompts and prefixes in any order of events, with faults in any state.

Every stream must be that of the naive loop, whichever of its tries it came from, nothing may be
held at the end, and what the engines say of their caches must be what they hold.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from support.engines import mock_engine, naive_answer
from support.two_engines import DECODE
from support.wire_blocks import exported
from twinfire.engine.hand_off import (
    BlockHold,
    BlocksComputed,
    HandOffEnded,
    PrefixImport,
    PromptComputed,
    Reservation,
)
from twinfire.engine.step_report import GatewayOutput
from twinfire.protocol.messages import FinishReason, Submit
from twinfire.protocol.peer_messages import HandOffKey
from twinfire.protocol.sampling import SamplingParams
from twinfire.protocol.tokens import pack_ids, unpack_ids
from twinfire.scheduler.sequence import Status

GATEWAY = "g"
ENGINES = st.integers(0, 1)
PROMPTS = st.builds(
    lambda shared, own: [7] * shared + own,
    st.integers(0, 16),
    st.lists(st.integers(0, 2), min_size=1, max_size=6),
)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(0, 9),
    seed=st.integers(0, 3),
    n=st.integers(1, 3),
    temperature=st.sampled_from([0.0, 1.0]),
    eos_token_ids=st.sampled_from([(), tuple(range(8))]),
    presence_penalty=st.sampled_from([0.0, 1.0]),
    prompt_logprobs=st.sampled_from([-1, -1, 0]),
)


@dataclass
class Stream:
    """One request as its gateway sees it, whatever tries it takes."""

    request_id: int
    prompt: list[int]
    params: SamplingParams
    attempt: int = 0
    engine: int = 0
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    ends: dict[int, FinishReason] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    hand_off: HandOff | None = None

    def open_choices(self) -> tuple[int, ...]:
        over = self.ends.keys() | self.cancelled
        return tuple(choice for choice in range(self.params.n) if choice not in over)

    def submit(self, **more: object) -> Submit:
        choices = self.open_choices()
        outputs = tuple(pack_ids(self.tokens[choice]) for choice in choices)
        return Submit(
            self.request_id,
            pack_ids(self.prompt),
            self.params,
            attempt=self.attempt,
            choices=choices,
            outputs=outputs if any(outputs) else (),
            **more,  # type: ignore[arg-type]
        )


@dataclass
class HandOff:
    """One try over two engines."""

    stream: Stream
    prefill: int
    reservation: Reservation
    readable: dict[int, tuple[int, int]] = field(default_factory=dict)
    read: set[int] = field(default_factory=set)
    done: PromptComputed | None = None

    @property
    def key(self) -> HandOffKey:
        return self.reservation.key


class ExchangeMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.sampled_from([14, 18, 40]),
        budget=st.sampled_from([5, 16]),
        max_num_seqs=st.sampled_from([2, 5]),
        watermark=st.sampled_from([0, 1, 3]),
        cached=st.sampled_from([True, True, True, False]),
    )
    def make(self, num_blocks, budget, max_num_seqs, watermark, cached):
        pairs = [
            mock_engine(
                num_blocks=num_blocks,
                max_model_len=36,
                max_num_seqs=max_num_seqs,
                max_num_batched_tokens=budget,
                hash_seed=b"cluster",
                watermark_blocks=watermark,
                enable_prefix_cache=cached,
            )
            for _ in range(2)
        ]
        self.engines = [engine for engine, _ in pairs]
        self.runners = [runner for _, runner in pairs]
        self.known_hashes: list[set[bytes]] = [set(), set()]
        self.streams: dict[int, Stream] = {}
        self.hand_offs: dict[HandOffKey, HandOff] = {}
        self.quarantined: list[HandOff] = []
        self.unreleased: list[tuple[int, HandOffKey]] = []
        self.imports: list[tuple[int, PrefixImport, BlockHold]] = []

    # What a gateway does

    @rule(engine=ENGINES, prompt=PROMPTS, params=PARAMS)
    def submit(self, engine, prompt, params):
        stream = self._new_stream(prompt, params, engine)
        self.engines[engine].submit(GATEWAY, stream.submit())

    @rule(prefill=ENGINES, prompt=PROMPTS, params=PARAMS)
    def submit_to_both(self, prefill, prompt, params):
        self._hand_over(self._new_stream(prompt, params, 1 - prefill), prefill)

    @rule(data=st.data(), choice=st.integers(-1, 2))
    def cancel(self, data, choice):
        stream = self._pick(data, [one for one in self.streams.values() if one.open_choices()])
        if stream is None:
            return
        if stream.hand_off is not None:
            # What both sides do about a choice cancelled after this is the workers' affair.
            self._take_events(stream.hand_off.prefill)
            if stream.hand_off.done is not None:
                return
            self.engines[stream.hand_off.prefill].cancel(GATEWAY, stream.request_id, choice)
        else:
            self.engines[stream.engine].cancel(GATEWAY, stream.request_id, choice)
        stream.cancelled |= set(range(3)) if choice < 0 else {choice}

    @rule(data=st.data(), to_other=st.booleans(), over_two=st.booleans())
    def lose_and_resume(self, data, to_other, over_two):
        """A worker gives a stream up; another try goes on, at once."""
        local = [one for one in self.streams.values() if one.hand_off is None]
        stream = self._pick(data, [one for one in local if one.open_choices()])
        if stream is None:
            return
        self.engines[stream.engine].cancel(GATEWAY, stream.request_id)
        self._retry(stream, stream.engine ^ to_other, over_two)

    # What the workers between the engines do

    @rule(engine=ENGINES, num_steps=st.integers(1, 3))
    def step(self, engine, num_steps):
        for _ in range(num_steps):
            self._step(engine)

    @rule(engine=ENGINES)
    def take_events(self, engine):
        self._take_events(engine)

    @rule(data=st.data(), count=st.integers(1, 4))
    def read_blocks(self, data, count):
        hand_off = self._pick(data, list(self.hand_offs.values()))
        if hand_off is not None:
            self._read(hand_off, count)

    @rule(data=st.data(), late=st.booleans())
    def adopt(self, data, late):
        ready = [one for one in self.hand_offs.values() if self._is_complete(one)]
        hand_off = self._pick(data, ready)
        if hand_off is not None:
            self._adopt(hand_off)
            self.unreleased.append((hand_off.prefill, hand_off.key))
            if not late:
                self._release(*self.unreleased.pop())

    @rule(data=st.data(), still_read=st.booleans(), to_other=st.booleans(), over_two=st.booleans())
    def fail_hand_off(self, data, still_read, to_other, over_two):
        """Either side drops it; a read may go on writing into the reserved blocks."""
        hand_off = self._pick(data, list(self.hand_offs.values()))
        if hand_off is None:
            return
        stream = hand_off.stream
        self._drop(hand_off)
        if not still_read:
            self._end_quarantine(self.quarantined.pop())
        if stream.open_choices():
            self._retry(stream, stream.engine ^ to_other, over_two)

    @rule(data=st.data())
    def end_quarantine(self, data):
        hand_off = self._pick(data, self.quarantined)
        if hand_off is not None:
            self.quarantined.remove(hand_off)
            self._end_quarantine(hand_off)

    @rule(data=st.data())
    def release_hold(self, data):
        held = self._pick(data, self.unreleased)
        if held is not None:
            self.unreleased.remove(held)
            self._release(*held)

    @rule(engine=ENGINES, prompt=PROMPTS, num_blocks=st.integers(1, 6))
    def begin_import(self, engine, prompt, num_blocks):
        puller, holder = self.engines[engine].prefixes, self.engines[1 - engine].prefixes
        taken = puller.begin_import(unpack_ids(pack_ids(prompt)), "", num_blocks)
        if taken is not None:
            hold = holder.hold_blocks(puller.import_hashes(taken.import_id))
            self.imports.append((engine, taken, hold))

    @rule(data=st.data(), num_good=st.integers(0, 6), release_first=st.booleans())
    def finish_import(self, data, num_good, release_first):
        pull = self._pick(data, self.imports)
        if pull is not None:
            self.imports.remove(pull)
            self._finish_import(*pull, num_good, release_first)

    # What may happen inside an engine at any time

    @rule(data=st.data(), engine=ENGINES)
    def preempt(self, data, engine):
        scheduler = self.engines[engine]._scheduler
        running = [
            one for one in self.engines[engine]._table.owners if one.status is Status.RUNNING
        ]
        sequence = self._pick(data, sorted(running, key=lambda one: one.key))
        if sequence is not None:
            scheduler.preempt(sequence)

    @rule(engine=ENGINES)
    def clear_cache(self, engine):
        self.engines[engine].clear_prefix_cache()

    @invariant()
    def is_consistent(self):
        for engine, known in zip(self.engines, self.known_hashes, strict=True):
            engine.check_integrity()
            load = engine.load()
            assert 0 <= load.kv_blocks_held <= load.kv_blocks_used <= load.kv_blocks_total
            stored, removed = engine.take_cache_events()
            assert not known & set(stored), "stored again what was there"
            assert set(removed) <= known, "removed what was not there"
            known |= set(stored)
            known -= set(removed)
            assert known == set(engine.cached_hashes())

    def teardown(self):
        if not hasattr(self, "engines"):
            return
        for pull in self.imports:
            self._finish_import(*pull, 0, release_first=True)
        for hand_off in self.quarantined:
            self._end_quarantine(hand_off)
        for held in self.unreleased:
            self._release(*held)
        for _ in range(3000):
            if not self.hand_offs and not any(engine.has_work for engine in self.engines):
                break
            for index in (0, 1):
                self._step(index)
                self._take_events(index)
            for hand_off in list(self.hand_offs.values()):
                self._read(hand_off, 99)
                if self._is_complete(hand_off):
                    self._adopt(hand_off)
                    self._release(hand_off.prefill, hand_off.key)
            self._give_way()
            self.is_consistent()
        for engine in self.engines:
            assert not engine.has_work
            assert not engine.holds_for_others
            load = engine.load()
            assert (load.kv_blocks_used, load.prefill_tokens_waiting) == (0, 0)
        for stream in self.streams.values():
            for choice in range(stream.params.n):
                expected = naive_answer(stream.prompt, stream.params, choice)
                got = stream.tokens[choice]
                if choice in stream.cancelled:
                    assert got == expected.tokens[: len(got)]
                else:
                    assert got == expected.tokens
                    assert stream.ends[choice] == expected.finish_reason

    # Helpers

    def _pick(self, data, items):
        return data.draw(st.sampled_from(items)) if items else None

    def _new_stream(self, prompt, params, engine) -> Stream:
        stream = Stream(len(self.streams), prompt, params, engine=engine)
        self.streams[stream.request_id] = stream
        return stream

    def _hand_over(self, stream: Stream, prefill: int) -> None:
        """Reserve and submit; without room the decode side does all of it."""
        stream.engine = 1 - prefill
        message = stream.submit(hand_off=DECODE)
        if len(message.choices) > 1 and message.outputs:
            self.engines[stream.engine].submit(GATEWAY, stream.submit())
            return
        reservation = self.engines[stream.engine].reserve(GATEWAY, message)
        if reservation is None:
            self.engines[stream.engine].submit(GATEWAY, stream.submit())
            return
        hand_off = HandOff(stream, prefill, reservation)
        self.engines[prefill].submit(GATEWAY, message)
        stream.hand_off = self.hand_offs[hand_off.key] = hand_off

    def _retry(self, stream: Stream, engine: int, over_two: bool) -> None:
        stream.attempt += 1
        stream.engine = engine
        if over_two:
            self._hand_over(stream, 1 - engine)
        else:
            self.engines[engine].submit(GATEWAY, stream.submit())

    def _step(self, engine: int) -> None:
        for gateway, output in self.engines[engine].step().items():
            assert gateway == GATEWAY
            self._heard(output)

    def _heard(self, output: GatewayOutput) -> None:
        for delta in output.deltas:
            stream = self.streams[delta.request_id]
            assert delta.choice not in stream.ends, "a choice went on after its end"
            assert delta.choice not in stream.cancelled, "a cancelled choice went on"
            stream.tokens[delta.choice] += unpack_ids(delta.tokens)
            if delta.finish_reason is not None:
                stream.ends[delta.choice] = delta.finish_reason

    def _take_events(self, engine: int) -> None:
        for event in self.engines[engine].take_hand_off_events():
            hand_off = self.hand_offs.get(event.key)
            if hand_off is None:
                self.engines[engine].release_hold(event.key)
                continue
            match event:
                case BlocksComputed(_, first, block_ids, generations):
                    for index, block in enumerate(zip(block_ids, generations, strict=True), first):
                        hand_off.readable[index] = block
                case PromptComputed():
                    hand_off.done = event
                case HandOffEnded():
                    del self.hand_offs[event.key]
                    hand_off.stream.hand_off = None
                    self._end_quarantine(hand_off)

    def _read(self, hand_off: HandOff, count: int) -> None:
        source = self.engines[hand_off.prefill]
        first = hand_off.reservation.num_cached_blocks
        missing = [one for one in hand_off.readable if one >= first and one not in hand_off.read]
        for index in missing[:count]:
            block_id, generation = hand_off.readable[index]
            if source.block_generation(block_id) != generation:
                assert hand_off.done is None, "a pinned block was reused"
                del hand_off.readable[index]
                continue
            content = exported(self.runners[hand_off.prefill], [block_id])
            target = hand_off.reservation.block_ids[index]
            self.runners[1 - hand_off.prefill].import_blocks([target], content)
            hand_off.read.add(index)

    def _is_complete(self, hand_off: HandOff) -> bool:
        reservation = hand_off.reservation
        num_missing = len(reservation.block_ids) - reservation.num_cached_blocks
        return hand_off.done is not None and len(hand_off.read) == num_missing

    def _adopt(self, hand_off: HandOff) -> None:
        assert hand_off.done is not None
        del self.hand_offs[hand_off.key]
        hand_off.stream.hand_off = None
        engine = self.engines[1 - hand_off.prefill]
        self._heard(engine.adopt(hand_off.key, hand_off.done.prompt, hand_off.done.first))

    def _give_way(self) -> None:
        """Both engines hold blocks for prompts that the other has none for: one lets go."""
        waiting = [one for one in self.hand_offs.values() if one.done is None]
        if waiting and all(engine.is_starved for engine in self.engines):
            hand_off = waiting[-1]
            self._drop(hand_off)
            self._end_quarantine(self.quarantined.pop())
            if hand_off.stream.open_choices():
                self._retry(hand_off.stream, hand_off.stream.engine, over_two=False)

    def _drop(self, hand_off: HandOff) -> None:
        """Either side ends it; what was reserved for it is still written to, perhaps."""
        stream = hand_off.stream
        del self.hand_offs[hand_off.key]
        stream.hand_off = None
        prefill = self.engines[hand_off.prefill]
        prefill.cancel(GATEWAY, stream.request_id)
        prefill.release_hold(hand_off.key)
        self.quarantined.append(hand_off)

    def _end_quarantine(self, hand_off: HandOff) -> None:
        """The last write into the reserved blocks has been made; what it wrote is anything."""
        reservation = hand_off.reservation
        written = reservation.block_ids[reservation.num_cached_blocks :]
        runner = self.runners[1 - hand_off.prefill]
        size = runner.kv_layout.block_size
        runner.import_blocks(written, b"\x3f" * (8 * size * len(written)))
        self.engines[1 - hand_off.prefill].release_reservation(hand_off.key)
        self.engines[1 - hand_off.prefill].release_reservation(hand_off.key)

    def _release(self, prefill: int, key: HandOffKey) -> None:
        self.engines[prefill].release_hold(key)
        self.engines[prefill].release_hold(key)

    def _finish_import(self, engine, taken, hold, num_good, release_first) -> None:
        holder = self.engines[1 - engine]
        num_good = min(num_good, len(hold.block_ids))
        for source, generation in zip(hold.block_ids, hold.generations, strict=True):
            assert holder.block_generation(source) == generation, "a held block was reused"
        content = exported(self.runners[1 - engine], hold.block_ids[:num_good])
        self.runners[engine].import_blocks(taken.block_ids[:num_good], content)
        if release_first:
            holder.prefixes.release_block_hold(hold.hold_id)
        self.engines[engine].prefixes.finish_import(taken.import_id, num_good)
        self.engines[engine].prefixes.finish_import(taken.import_id, num_good)
        holder.prefixes.release_block_hold(hold.hold_id)


TestExchangeMachine = ExchangeMachine.TestCase
TestExchangeMachine.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
