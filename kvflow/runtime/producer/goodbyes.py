"""Goodbyes: a closing producer asks the readers that have connected to it to drop their connections.

Goodbyes are best effort, on the side channel: a reader that gets none notices that this rank has closed when the next
read or handshake fails. Readers supply their own addresses, and may lie. So at most `Limits.readers_max` readers are
remembered, and each address gets at most one `Goodbye`.
"""

from __future__ import annotations

import asyncio

from kvflow.checks import is_name
from kvflow.config import ENGINE_ID_CHARS_MAX
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import ConfigError, PeerError
from kvflow.hosts import is_host, split_address
from kvflow.logs import logger_of
from kvflow.runtime.channel.protocol import SideChannel
from kvflow.runtime.rank import RankContext
from kvflow.runtime.tasks import for_each

logger = logger_of(__name__)

_AT_ONCE_MAX = 16


class Goodbyes:
    """The readers that have connected to this rank, and the sending of a `Goodbye` to each when the rank closes."""

    def __init__(self, context: RankContext, side_channel: SideChannel, *, awaits_removal: bool) -> None:
        """`awaits_removal`: readers may have mapped this rank's memory, so they are to answer once they have not."""
        self._config = context.config
        self._awaits_removal = awaits_removal
        self._side_channel = side_channel
        self._incarnation = context.incarnation
        self._local = context.local
        self._who = f"engine {context.config.engine_id!r} ({context.rank})"
        self.successor: Address | None = None
        """The rank that takes this rank's place, for all goodbyes; None if there is none."""
        self._readers: BoundedMap[Address, None] = BoundedMap(context.config.limits.readers_max)

    @property
    def count(self) -> int:
        return len(self._readers)

    def remember(self, caller: Address) -> None:
        """Remember the reader at `caller`, so that `send_all` sends it a goodbye.

        If the host, port or engine id of `caller` is invalid, ignore the reader. If more than `Limits.readers_max`
        readers are remembered, forget the one that connected least recently.
        """
        if not _is_possible(caller):
            logger.info("reader not remembered: goodbyes cannot be sent to %.100r", caller)
            return
        self._readers[caller] = None

    async def send_all(self) -> None:
        """Send a goodbye to every remembered reader, for at most `Limits.goodbye_timeout_s` in all.

        Forget readers that do not answer.
        """
        bound_s = self._config.limits.goodbye_timeout_s
        try:
            async with asyncio.timeout(bound_s):
                await for_each(list(self._readers), self._send, _AT_ONCE_MAX)
        except TimeoutError:
            logger.info("%s: not all readers got a goodbye within %s s", self._who, bound_s)

    async def _send(self, caller: Address) -> None:
        """Send a goodbye to the reader at `caller`. If that fails, forget the reader."""
        own, fingerprint = self._local.caller, self._local.compatibility.fingerprint()
        goodbye = messages.Goodbye(
            target=caller,
            sender=own,
            incarnation=self._incarnation,
            awaits_removal=self._awaits_removal,
            successor=self.successor,
        )
        try:
            await self._side_channel.ask(goodbye, fingerprint=fingerprint)
        except PeerError as error:
            logger.info("%s: a reader got no goodbye: %s", self._who, error)
            self._readers.pop(caller, None)


def _is_possible(caller: Address) -> bool:
    try:
        host, port = split_address(caller.address, what="reader")
    except ConfigError:
        return False
    return is_host(host) and port > 0 and is_name(caller.engine_id, ENGINE_ID_CHARS_MAX)
