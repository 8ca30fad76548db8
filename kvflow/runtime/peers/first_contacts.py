"""First contacts: peers that have never answered are asked in turns, a few at a time (`core.policy.contacts`).

Forged tickets can name any number of peers that never answer. A peer that has answered before needs no turn, so it
does not wait behind peers from forged tickets.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import TypeVar

from kvflow.checks import counted
from kvflow.config import Config
from kvflow.core.policy.contacts import Contact, Contacts, ContactState
from kvflow.core.protocol.addresses import Address
from kvflow.errors import Overloaded, PeerUnreachable

T = TypeVar("T")


def patience_s(config: Config) -> float:
    """Return the seconds after which an unanswered first contact must give up its turn if others wait for a turn."""
    return config.handshake_timeout_s / 10


def overloaded(peer: Address, why: str) -> Overloaded:
    """Return the error that this rank has no room to ask `peer`. `Overloaded.of_request` adds the request."""
    return Overloaded(f"{peer}: {why}", request_id="", peer=peer.address)


class FirstContacts:
    """The turns of first contacts, at most `limits.first_contacts_max` at once. Belongs to one event loop."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._patience_s = patience_s(config)
        self._contacts = Contacts(config.limits.first_contacts_max, self._patience_s)
        self._bounds: dict[Contact, asyncio.Timeout] = {}
        self._granted: dict[Contact, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        return self._contacts.under_way

    async def ask(self, peer: Address, question: Callable[[], Awaitable[T]], begin: Callable[[Contact], None]) -> T:
        """Wait for a turn, call `begin` with it, then await `question` and return its result.

        Raises Overloaded if no turn comes within Config.handshake_timeout_s, and PeerUnreachable if others wait for a
        turn and `peer` has not answered within `patience_s`. If cancelled, give up the turn or the place in the queue.
        """
        loop = asyncio.get_running_loop()
        contact = self._contacts.ask(loop.time())
        bound = asyncio.timeout(None)
        try:
            async with bound:
                self._bounds[contact] = bound
                if contact.state is ContactState.WAITING:
                    bound.reschedule(loop.time() + self._config.handshake_timeout_s)
                    await self._wait(contact)
                begin(contact)
                return await question()
        except TimeoutError:
            if not bound.expired():
                raise
            if contact.state is ContactState.LEAVING:
                why = f"no answer within {self._patience_s:.3g} s, and others wait to be asked"
                raise peer.failure(PeerUnreachable, why) from None
            most = self._config.limits.first_contacts_max
            others = f"asked at once: {counted(most, 'other new peer')} (limits.first_contacts_max)"
            why = f"no turn to ask it within {self._config.handshake_timeout_s} s: {others}"
            raise overloaded(peer, why) from None
        finally:
            del self._bounds[contact]
            self._end(contact)

    def look(self) -> None:
        """Preempt a contact if one is due. Call this also when `Contact.wanted` becomes False."""
        now_s = asyncio.get_running_loop().time()
        leaving = self._contacts.make_way(now_s)
        if leaving is not None and not self._bounds[leaving].expired():
            self._bounds[leaving].reschedule(now_s)
        self._look_later(now_s)

    async def _wait(self, contact: Contact) -> None:
        granted = self._granted[contact] = asyncio.get_running_loop().create_future()
        self.look()
        try:
            await granted
        finally:
            del self._granted[contact]

    def _end(self, contact: Contact) -> None:
        next_one = self._contacts.end(contact, asyncio.get_running_loop().time())
        if next_one is not None:
            bound, granted = self._bounds[next_one], self._granted[next_one]
            if not bound.expired():  # else its wait has just timed out, and its task will give the turn back
                bound.reschedule(None)
            if not granted.done():
                granted.set_result(None)
        self.look()

    def _look_later(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._contacts.due_s(now_s)
        if due_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due_s, self.look)
