"""Admission of first contacts: a bound on how many peers that have never answered are contacted at the same time.

Only a question shows whether a peer listens at the address in a ticket, and a silent address costs a timeout. Two rules
keep silent addresses from starving the others:

- Last in, first out: the contact that has waited for the shortest time begins next, because one that has waited long
  has little time left before its load's deadline.
- Preemption: while contacts wait, contacts under way have to leave, one at a time. A contact for which no load waits
  leaves immediately. Else the oldest contact leaves after `patience_s`, but only for a contact that had no turn yet.

A peer that lives may take longer than `patience_s`. So a contact that had to leave may wait for a further turn, behind
all others (`put_back`).
"""

from __future__ import annotations

import enum


class ContactState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    PREEMPTED = "preempted"  # chosen to be given up; until it has ended it counts as under way
    ENDED = "ended"


class Contact:
    """The first question to a peer, which may have to wait for its turn."""

    __slots__ = ("had_turn", "since_s", "state", "wanted")

    def __init__(self, since_s: float) -> None:
        self.state = ContactState.WAITING
        self.since_s = since_s
        """Time at which the contact began to wait for its turn or, once it is under way, at which its turn began."""
        self.had_turn = False
        """True once it was put back after a turn without an answer."""
        self.wanted = True
        """True while a load waits for the peer's answer."""


class Contacts:
    """All first contacts that wait for their turn or are under way. This object decides which begin and which are given
    up.
    """

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
        """Return a new contact. It begins now if fewer than `under_way_max` contacts are under way, else it waits."""
        contact = Contact(now_s)
        self._waiting.append(contact)
        self._begin_one(now_s)
        return contact

    def end(self, contact: Contact, now_s: float) -> Contact | None:
        """End `contact`, which waits or is under way. Return the waiting contact that begins now, or None."""
        assert contact.state is not ContactState.ENDED, "a contact ends once"
        if contact.state is ContactState.WAITING:
            self._waiting.remove(contact)
        else:
            del self._under_way[contact]
        if self._preempted is contact:
            self._preempted = None
        contact.state = ContactState.ENDED
        return self._begin_one(now_s)

    def put_back(self, contact: Contact, now_s: float) -> Contact | None:
        """Let `contact`, which is preempted, wait for a further turn. Return the contact that begins now, or None."""
        assert contact is self._preempted
        del self._under_way[contact]
        self._preempted = None
        contact.state, contact.had_turn = ContactState.WAITING, True
        self._waiting.insert(0, contact)
        return self._begin_one(now_s)

    def preempt_one(self, now_s: float) -> Contact | None:
        """Mark as preempted, and return, the contact that has to leave next; return None before the time `due_s`.

        The caller has to stop waiting for the peer's answer, and then to call `end` or `put_back`.
        """
        if self.due_s(now_s) > now_s:
            return None
        oldest = next(iter(self._under_way))
        self._preempted = next((contact for contact in self._under_way if not contact.wanted), oldest)
        self._preempted.state = ContactState.PREEMPTED
        return self._preempted

    def due_s(self, now_s: float) -> float:
        """Return the time at which a contact under way has to leave.

        Infinity if no contact waits that it has to leave for, or if a preempted contact has not left yet.
        """
        if not self._waiting or self._preempted is not None:
            return float("inf")
        if not all(contact.wanted for contact in self._under_way):
            return now_s
        if all(contact.had_turn for contact in self._waiting):
            return float("inf")
        return next(iter(self._under_way)).since_s + self._patience_s

    def _begin_one(self, now_s: float) -> Contact | None:
        if not self._waiting or len(self._under_way) >= self._under_way_max:
            return None
        contact = self._waiting.pop()
        contact.state, contact.since_s = ContactState.UNDER_WAY, now_s
        self._under_way[contact] = None
        return contact
