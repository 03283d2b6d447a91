"""Load of one worker in one unit, kept right between reports and with several gateways.

Each open entry has a `charged` amount, what this gateway expects it to cost, and a `seen` amount,
the part of it that the worker's own reports include. At a report of R the rest of it, R - seen, is
of others: other gateways' work, or (negative) blocks that our requests share, counted once by the
worker and several times by us. Until the next report the load is therefore

    load = charged + (R - seen at the report)

which is R + what of ours the worker has not acknowledged + expected growth, moved along with every
charge, progress and release of our own. Our own errors cancel at the next report.
"""

from __future__ import annotations


class Ledger:
    """Sum of open entries, and what others put on the same worker. Never negative."""

    __slots__ = ("_elsewhere", "charged", "load", "num_entries", "seen")

    def __init__(self) -> None:
        self.charged = 0
        """Of our open entries."""
        self.seen = 0
        """The part of it that reports include."""
        self.load = 0
        """Best estimate of everything on the worker."""
        self.num_entries = 0
        self._elsewhere = 0

    def open(self, amount: int, share: LedgerShare | None = None) -> LedgerEntry:
        """Charge `amount` at once, and count it in `share` too."""
        self.num_entries += 1
        entry = LedgerEntry(self, share)
        entry.charge(amount)
        return entry

    def report(self, total: int) -> None:
        """Take the worker's own count, of all gateways together.

        What a frame says of our requests is to be applied before its load.
        """
        self._elsewhere = total - self.seen
        self._update()

    def _add(self, charged: int, seen: int) -> None:
        self.charged += charged
        self.seen += seen
        self._update()

    def _update(self) -> None:
        # What our requests share is at most what the worker has of them.
        self.load = max(0, self.charged + max(self._elsewhere, -self.seen))


class LedgerShare:
    """What some of the open entries of a ledger are charged together."""

    __slots__ = ("charged",)

    def __init__(self) -> None:
        self.charged = 0


class LedgerEntry:
    """What one request costs one worker. Closing it twice does nothing the second time."""

    __slots__ = ("_is_open", "_ledger", "_share", "charged", "seen")

    def __init__(self, ledger: Ledger, share: LedgerShare | None) -> None:
        self._ledger = ledger
        self._share = share
        self._is_open = True
        self.charged = 0
        self.seen = 0

    def charge(self, amount: int) -> None:
        """Set what it costs from now on; what is seen is at most that."""
        if self._is_open:
            self._set(max(amount, 0), min(self.seen, max(amount, 0)))

    def see(self, amount: int) -> None:
        """Set the part that the worker's reports include from now on."""
        if self._is_open:
            self._set(self.charged, min(max(amount, 0), self.charged))

    def close(self) -> None:
        """Take everything back."""
        if self._is_open:
            self._set(0, 0)
            self._is_open = False
            self._ledger.num_entries -= 1

    def _set(self, charged: int, seen: int) -> None:
        added, newly_seen = charged - self.charged, seen - self.seen
        self.charged, self.seen = charged, seen
        self._ledger._add(added, newly_seen)
        if self._share is not None:
            self._share.charged += added
