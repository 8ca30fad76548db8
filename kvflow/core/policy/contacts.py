"""Admission of first contacts: a bound on how many peers that have never answered are contacted at once. Pure.

Only a question shows whether a peer listens at the address in a ticket, and a silent address costs a timeout. Two rules
keep silent addresses from starving the others:

- Last in, first out: a contact that has waited long has little time left before its deadline.
- Preemption: while a contact waits, contacts under way are preempted, one at a time. A contact without a waiting load
  goes first. Otherwise the oldest goes, after `patience_s`, the time within which a living peer answers.
"""

from __future__ import annotations

import enum


class ContactState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    PREEMPTED = "preempted"  # not ended: it still counts as under way
    ENDED = "ended"


class Contact:
    """The first question to a peer, from the request for a turn to the peer's answer; compared by identity."""

    __slots__ = ("since_s", "state", "wanted")

    def __init__(self, since_s: float) -> None:
        self.state = ContactState.WAITING
        self.since_s = since_s
        """When the contact began to wait for its turn; once it is under way, when it got its turn."""
        self.wanted = True
        """True while a load waits for the answer."""


class Contacts:
    """All first contacts that wait for a turn or are under way, by the rules of the module."""

    def __init__(self, under_way_max: int, patience_s: float) -> None:
        self._under_way_max = under_way_max
        self._patience_s = patience_s
        self._under_way: dict[Contact, None] = {}  # in the order in which they began
        self._waiting: list[Contact] = []
        self._preempted: Contact | None = None

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def request_turn(self, now_s: float) -> Contact:
        """Return a new contact: under way if fewer than the maximum are under way, else waiting."""
        contact = Contact(now_s)
        self._waiting.append(contact)
        self._begin_one(now_s)
        return contact

    def end(self, contact: Contact, now_s: float) -> Contact | None:
        """End a contact, waiting or under way. Return the contact that goes under way in its place, if any."""
        assert contact.state is not ContactState.ENDED, "a contact ends once"
        if contact.state is ContactState.WAITING:
            self._waiting.remove(contact)
        else:
            del self._under_way[contact]
        if self._preempted is contact:
            self._preempted = None
        contact.state = ContactState.ENDED
        return self._begin_one(now_s)

    def preempt_one(self, now_s: float) -> Contact | None:
        """Choose the contact to preempt, mark it as leaving and return it. None if no preemption is due.

        The caller has to stop waiting for the answer, and then call `end`.
        """
        if self.due_s(now_s) > now_s:
            return None
        self._preempted = next((one for one in self._under_way if not one.wanted), next(iter(self._under_way)))
        self._preempted.state = ContactState.PREEMPTED
        return self._preempted

    def due_s(self, now_s: float) -> float:
        """Return when the next preemption is due; infinity if no contact waits or one is already leaving."""
        if not self._waiting or self._preempted is not None:
            return float("inf")
        if not all(one.wanted for one in self._under_way):
            return now_s
        return next(iter(self._under_way)).since_s + self._patience_s

    def _begin_one(self, now_s: float) -> Contact | None:
        if not self._waiting or len(self._under_way) >= self._under_way_max:
            return None
        contact = self._waiting.pop()
        contact.state, contact.since_s = ContactState.UNDER_WAY, now_s
        self._under_way[contact] = None
        return contact
