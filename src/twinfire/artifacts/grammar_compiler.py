"""Grammars compiled on threads of their own, each text once, the latest ones kept."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Lock

from twinfire.artifacts.token_grammar import CompiledGrammar, TokenGrammar
from twinfire.protocol.errors import InvalidRequest
from twinfire.protocol.grammar import Grammar

_NUM_THREADS = 2
_MAX_KEPT = 64

log = logging.getLogger(__name__)


class GrammarCompiler:
    """Compiles for one vocabulary, which `load` gives when the first grammar comes.

    `find` belongs to one thread and never waits.
    """

    def __init__(self, load: Callable[[], TokenGrammar]) -> None:
        self._load = load
        self._threads = ThreadPoolExecutor(_NUM_THREADS, "twinfire-grammar")
        self._compiled: OrderedDict[Grammar, Future[CompiledGrammar]] = OrderedDict()
        self._token_grammar: TokenGrammar | None = None
        self._loading = Lock()

    def find(self, grammar: Grammar) -> CompiledGrammar | None:
        """Return the compiled grammar, None until it is; InvalidRequest when it cannot be."""
        future = self._compiled.get(grammar)
        if future is None:
            future = self._compiled[grammar] = self._threads.submit(self._compile, grammar)
            self._forget_oldest()
        self._compiled.move_to_end(grammar)
        if not future.done():
            return None
        try:
            return future.result()
        except InvalidRequest:
            del self._compiled[grammar]
            raise

    def close(self) -> None:
        """Let the threads end."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        try:
            return self._loaded().compile(grammar)
        except InvalidRequest:
            raise
        except Exception as error:
            log.exception("a grammar cannot be compiled")
            raise InvalidRequest(f"the grammar cannot be compiled: {error}") from error

    def _loaded(self) -> TokenGrammar:
        with self._loading:
            if self._token_grammar is None:
                self._token_grammar = self._load()
            return self._token_grammar

    def _forget_oldest(self) -> None:
        while len(self._compiled) > _MAX_KEPT:
            oldest = next((one for one, future in self._compiled.items() if future.done()), None)
            if oldest is None:
                return
            del self._compiled[oldest]
