"""The requests of an engine and the sequences that compute them."""

from __future__ import annotations

from twinfire.cache.block_hash import cache_extra_key
from twinfire.engine.request import Choice, Request
from twinfire.protocol.errors import InvalidRequest
from twinfire.scheduler.scheduler import Scheduler
from twinfire.scheduler.sequence import Sequence

RequestKey = tuple[str, int]
"""Gateway id and request id."""


class RequestTable:
    """Unfinished requests by key; keeps a choice, its sequence and the scheduler in step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._requests: dict[RequestKey, Request] = {}
        self._held: dict[RequestKey, Request] = {}
        """Those of them that have no sequence yet."""
        self.owners: dict[Sequence, Request] = {}
        """The request of every sequence that the scheduler has from here."""

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._requests

    @property
    def held(self) -> list[Request]:
        """Requests that are listed and wait to be submitted, in the order of their coming."""
        return list(self._held.values())

    def get(self, key: RequestKey) -> Request | None:
        """Return an unfinished request, None if there is none."""
        return self._requests.get(key)

    def ids_of(self, gateway_id: str) -> list[int]:
        """Return the ids of a gateway's unfinished requests."""
        return [request_id for owner, request_id in self._requests if owner == gateway_id]

    def hold(self, request: Request) -> None:
        """List a new request that may be submitted later, and cancelled meanwhile."""
        key = request.gateway_id, request.request_id
        self._requests[key] = self._held[key] = request

    def submit(self, request: Request) -> None:
        """Queue a new or held request; InvalidRequest, with nothing changed, if it can never run.

        Choices that were cancelled while it was held are left out.
        """
        # Choices without output fork from the first one's prompt.
        unfinished = [choice for choice in request.choices if choice.finish_reason is None]
        own = unfinished if request.resumed else request.choices[:1]
        sequences = [self.sequence(request, choice) for choice in own]
        for index, sequence in enumerate(sequences):
            try:
                self._scheduler.submit(sequence)
            except InvalidRequest:
                for submitted in sequences[:index]:
                    self._scheduler.finish(submitted)
                raise
        self._requests[request.gateway_id, request.request_id] = request
        self._held.pop((request.gateway_id, request.request_id), None)
        for choice, sequence in zip(own, sequences, strict=True):
            self._assign(request, choice, sequence)

    def add(self, request: Request, sequence: Sequence) -> None:
        """List a request whose first choice is computed by a sequence that the scheduler has."""
        self._requests[request.gateway_id, request.request_id] = request
        self._assign(request, request.choices[0], sequence)

    def sequence(self, request: Request, choice: Choice) -> Sequence:
        """Return a new sequence for a choice, with what it has output already."""
        sampling = request.sampling
        return Sequence(
            key=(request.gateway_id, request.request_id, choice.index),
            tokens=request.prompt + choice.history.output,
            num_prompt_tokens=len(request.prompt),
            max_total_tokens=len(request.prompt) + sampling.max_tokens,
            priority=request.priority,
            cache_extra=cache_extra_key(salt=request.cache_salt),
            read_prefix_cache=not request.scores_prompt and sampling.pooling != "mean",
            turn=request.turn,
        )

    def fork(self, request: Request, parent: Sequence, choice: Choice) -> None:
        """Let a choice go on from the parent's prompt."""
        child = self.sequence(request, choice)
        self._assign(request, choice, child)
        self._scheduler.fork(parent, child)

    def drop(self, sequence: Sequence, choice: Choice) -> None:
        """Free a sequence's blocks; `choice` is the one that it computes."""
        choice.sequence = None
        if self.owners.pop(sequence, None) is not None:
            self._scheduler.abort(sequence.key)

    def forget_if_finished(self, request: Request) -> None:
        """Take a request off the list once all of its choices have ended."""
        if request.finished:
            self._requests.pop((request.gateway_id, request.request_id), None)
            self._held.pop((request.gateway_id, request.request_id), None)

    def check_integrity(self) -> None:
        """Raise AssertionError when requests and sequences do not agree."""
        for request in self._requests.values():
            assert not request.finished, "a finished request is still listed"
        for sequence, request in self.owners.items():
            assert request.choice(sequence.key[2]).sequence is sequence
            assert not request.finished, "a finished request holds a sequence"
        assert self._scheduler.num_unfinished == len(self.owners), "a sequence without a request"
        for key, request in self._held.items():
            assert self._requests.get(key) is request, "a held request is not listed"
            assert all(choice.sequence is None for choice in request.choices)

    def _assign(self, request: Request, choice: Choice, sequence: Sequence) -> None:
        choice.sequence = sequence
        self.owners[sequence] = request
