"""First contacts: never-connected peers are asked a few at a time, and others wait (`core.policy.contacts`).

Forged tickets can name any number of peers that never answer. A peer that was connected before needs no turn, and so
does not wait for those peers.
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
from kvflow.errors import KVFlowError, Overloaded, PeerUnreachable

T = TypeVar("T")


def first_contact_timeout_s(config: Config) -> float:
    """Return how many seconds a never-connected peer has to answer while other new peers wait to be asked."""
    return config.handshake_timeout_s / 10


def overloaded(peer: Address, why: str) -> Overloaded:
    """Return an Overloaded error: this rank cannot ask `peer`, because of `why`. The caller adds the request id."""
    return Overloaded(f"{peer}: {why}", request_id="", peer=peer.address)


class FirstContacts:
    """Queue of first contacts, the first questions to never-connected peers. The queue belongs to one event loop.

    At most `limits.first_contacts_max` are under way.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._answer_timeout_s = first_contact_timeout_s(config)
        self._contacts = Contacts(config.limits.first_contacts_max, self._answer_timeout_s)
        self._timeouts: dict[Contact, asyncio.Timeout] = {}
        self._granted: dict[Contact, asyncio.Future[None]] = {}
        self._timer: asyncio.TimerHandle | None = None

    @property
    def under_way(self) -> int:
        return self._contacts.under_way

    async def ask_in_turn(
        self, peer: Address, question: Callable[[], Awaitable[T]], on_turn: Callable[[Contact], None]
    ) -> T:
        """Wait for a turn to ask the never-connected `peer`, then await `question()` and return its result.

        If `peer` is silent for `first_contact_timeout_s` while other peers wait for their first turn, wait for a
        further turn, in which `question()` is awaited again. `on_turn` is called before each question, with the Contact
        that has the turn. Overloaded if the contact gets no turn within Config.handshake_timeout_s; PeerUnreachable if
        it gets no further one. If cancelled, give up the turn or the position in the queue.
        """
        loop = asyncio.get_running_loop()
        contact = self._contacts.request_turn(loop.time())
        give_up_s = loop.time() + self._config.handshake_timeout_s
        try:
            while True:
                try:
                    async with asyncio.timeout(None) as bound:
                        self._timeouts[contact] = bound
                        if contact.state is ContactState.WAITING:
                            bound.reschedule(give_up_s)
                            await self._wait_for_turn(contact)
                        on_turn(contact)
                        return await question()
                except TimeoutError:
                    if not bound.expired():  # raised by `question`, whose own bound is over
                        raise
                if contact.state is not ContactState.PREEMPTED or not contact.wanted or loop.time() >= give_up_s:
                    raise self._no_answer_error(peer, contact)
                # Not the end: an engine that lives may take longer than one turn to answer, as a busy one does.
                self._begin(self._contacts.put_back(contact, loop.time()))
        finally:
            del self._timeouts[contact]
            self._begin(self._contacts.end(contact, loop.time()))

    def end_overdue(self) -> None:
        """If a new peer waits to be asked, end one first contact that has taken too long or is no longer wanted.

        Called by a timer, and when the last load that waited for a handshake has stopped waiting.
        """
        now_s = asyncio.get_running_loop().time()
        leaving = self._contacts.preempt_one(now_s)
        if leaving is not None and not self._timeouts[leaving].expired():
            self._timeouts[leaving].reschedule(now_s)
        self._set_timer(now_s)

    async def _wait_for_turn(self, contact: Contact) -> None:
        granted = self._granted[contact] = asyncio.get_running_loop().create_future()
        self.end_overdue()
        try:
            await granted
        finally:
            del self._granted[contact]

    def _begin(self, contact: Contact | None) -> None:
        """Wake the task of `contact`, whose turn begins; it waits, unless it was put back and has the turn at once."""
        granted = None if contact is None else self._granted.get(contact)
        if contact is not None and granted is not None:
            if not self._timeouts[contact].expired():  # else its wait has just timed out: it gives the turn back
                self._timeouts[contact].reschedule(None)
            if not granted.done():
                granted.set_result(None)
        self.end_overdue()

    def _no_answer_error(self, peer: Address, contact: Contact) -> KVFlowError:
        if contact.had_turn or contact.state is ContactState.PREEMPTED:
            why = f"no answer within {self._answer_timeout_s:.3g} s, and others wait for a turn"
            return peer.failure(PeerUnreachable, why)
        most = self._config.limits.first_contacts_max
        others = f"asked at once: {counted(most, 'other new peer')} (limits.first_contacts_max)"
        return overloaded(peer, f"it got no turn within {self._config.handshake_timeout_s} s: {others}")

    def _set_timer(self, now_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        due_s = self._contacts.due_s(now_s)
        if due_s < math.inf:
            self._timer = asyncio.get_running_loop().call_at(due_s, self.end_overdue)
