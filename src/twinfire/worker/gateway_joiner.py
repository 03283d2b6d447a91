"""Keeps one gateway connected: dials it, and again whenever the link is gone."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from twinfire.protocol.addresses import Address
from twinfire.protocol.link_auth import LinkHandshake
from twinfire.protocol.messages import ToWorker
from twinfire.worker.framed_link import FramedLink
from twinfire.worker.link_security import LinkSecurity

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0

NewLink = Callable[[LinkHandshake | None], tuple[FramedLink[ToWorker], asyncio.Future[str]]]
"""Returns a link and what will say why it ended, empty when it had been in use."""

log = logging.getLogger(__name__)


class GatewayJoiner:
    """Dials `address` for ever."""

    def __init__(self, address: Address, security: LinkSecurity, new_link: NewLink) -> None:
        self._address = address
        self._security = security
        self._new_link = new_link
        self._last_problem = ""

    async def run(self) -> None:
        """Dial, wait for the link's end, pause, again."""
        pause_s = FIRST_PAUSE_S
        while True:
            problem = await self._stay_connected()
            if not problem:
                pause_s = FIRST_PAUSE_S
            self._report(problem)
            # Workers that lost their gateway together do not all come back together.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)

    async def _stay_connected(self) -> str:
        """Return why no link came to be; empty when there was one and it has ended."""
        link, ended = self._new_link(self._security.handshake(initiator=True))
        try:
            await self._security.connect(self._address, lambda: link)
        except TimeoutError:
            return "it does not answer"
        except OSError as error:
            return error.strerror or str(error)
        return await ended

    def _report(self, problem: str) -> None:
        if problem and problem != self._last_problem:
            log.warning("no link to the gateway %s: %s", self._address, problem)
        self._last_problem = problem
