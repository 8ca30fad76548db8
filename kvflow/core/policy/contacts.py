"""Admission of first contacts: a bound on how many peers that have never answered are asked at once. Pure.

Only asking tells whether anybody lives at the address in a ticket, and silence costs a timeout. Two rules keep silent
addresses from starving the others:

- Last in, first out: a contact that has waited for long has little left of its deadline.
- Preemption: while somebody waits, contacts under way make way, one at a time. First goes one that nobody wants any
  more, else the oldest, once it has had the time in which a living peer answers (`patience_s`).
"""

from __future__ import annotations

import enum


class ContactState(enum.StrEnum):
    WAITING = "waiting"
    UNDER_WAY = "under_way"
    LEAVING = "leaving"  # it was told to make way, and still counts as under way
    OVER = "over"


class Contact:
    """A question to a new peer, from its request for a turn until its answer; compared by identity."""

    __slots__ = ("since_s", "state", "wanted")

    def __init__(self, since_s: float) -> None:
        self.state = ContactState.WAITING
        self.since_s = since_s
        """Time since which it waits, or is under way."""
        self.wanted = True
        """True if anybody waits for the answer."""


class Contacts:
    """The contacts that wait, and those under way; see the module for the rules."""

    def __init__(self, under_way_max: int, patience_s: float) -> None:
        self._under_way_max = under_way_max
        self._patience_s = patience_s
        self._under_way: dict[Contact, None] = {}  # in the order in which they began
        self._waiting: list[Contact] = []
        self._leaving: Contact | None = None

    @property
    def under_way(self) -> int:
        return len(self._under_way)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def ask(self, now_s: float) -> Contact:
        """Begin a contact: it is under way at once if there is room, else it waits."""
        contact = Contact(now_s)
        self._waiting.append(contact)
        self._begin_one(now_s)
        return contact

    def end(self, contact: Contact, now_s: float) -> Contact | None:
        """End a contact, or its wait. Returns the contact that is under way now because of it."""
        assert contact.state is not ContactState.OVER, "a contact ends once"
        if contact.state is ContactState.WAITING:
            self._waiting.remove(contact)
        else:
            del self._under_way[contact]
        if self._leaving is contact:
            self._leaving = None
        contact.state = ContactState.OVER
        return self._begin_one(now_s)

    def make_way(self, now_s: float) -> Contact | None:
        """The contact to preempt now, if one is due."""
        if self.due_s(now_s) > now_s:
            return None
        self._leaving = next((one for one in self._under_way if not one.wanted), next(iter(self._under_way)))
        self._leaving.state = ContactState.LEAVING
        return self._leaving

    def due_s(self, now_s: float) -> float:
        """Time at which the next preemption is due; infinity if none is unless something changes."""
        if not self._waiting or self._leaving is not None:
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
