from __future__ import annotations

import threading

from twinfire.worker.kv_populator import AHEAD_BYTES, PIECE_BYTES, KvPopulator

BLOCK_BYTES = 1 << 20
AHEAD = AHEAD_BYTES // BLOCK_BYTES
PIECE = PIECE_BYTES // BLOCK_BYTES


class Pages:
    """Notes what is populated, and tells when it reaches a block."""

    def __init__(self) -> None:
        self.stop = 0
        self.calls: list[tuple[int, int]] = []
        self._changed = threading.Condition()

    def populate(self, first: int, count: int) -> None:
        assert first == self.stop, "blocks are taken in order, each once"
        with self._changed:
            self.stop += count
            self.calls.append((first, count))
            self._changed.notify_all()

    def wait_for(self, stop: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self.stop >= stop, 10), self.stop


def test_it_stays_ahead_of_the_blocks_that_are_handed_out_and_takes_no_more():
    pages = Pages()
    populator = KvPopulator(pages.populate, 10 * AHEAD, BLOCK_BYTES)
    populator.start()
    pages.wait_for(AHEAD)
    populator.follow(AHEAD // 2)
    pages.wait_for(AHEAD + AHEAD // 2)
    populator.follow(10)
    populator.follow(AHEAD // 2 + 1)
    pages.wait_for(AHEAD + AHEAD // 2 + 1)
    assert pages.stop == AHEAD + AHEAD // 2 + 1
    assert max(count for _, count in pages.calls) == PIECE


def test_it_ends_with_the_last_block():
    pages = Pages()
    populator = KvPopulator(pages.populate, 3, BLOCK_BYTES)
    populator.start()
    pages.wait_for(3)
    populator._thread.join(10)
    assert not populator._thread.is_alive()
    populator.follow(3)


def test_a_block_larger_than_all_that_is_taken_ahead_is_still_taken():
    pages = Pages()
    populator = KvPopulator(pages.populate, 5, 2 * AHEAD_BYTES)
    populator.start()
    pages.wait_for(1)
    populator.follow(2)
    pages.wait_for(3)
    assert pages.calls == [(0, 1), (1, 1), (2, 1)]
