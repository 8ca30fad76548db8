"""What readers are told of leases while they wait: that one is opened, has more blocks, is complete, or is over.

Two questions wait for that. A reader with a rendezvous asks what is offered of a request, perhaps before the engine
has heard of it: it is answered when a lease is opened, or when the engine says that there will be none (`decline`). A
reader of a lease that grows asks for news of it: it is answered when the lease is complete, with its payload, when it
has ended, when there are blocks that the reader does not know, and when no more tokens are missing than it says.

The second one only makes things faster, but for blocks and a payload that the reader knows from nowhere else: whether a
lease has covered a read its seal says, not this.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from kvflow.checks import printable
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.protocol import messages
from kvflow.core.protocol.messages import LeaseNews
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.context import RankContext
from kvflow.runtime.producer.waiting import WaitingQuestions

_NOTES_MAX = 1 << 12
_REASON_CHARS_MAX = 500


class Held(Protocol):
    """What a lease has taken; see `blocks.HeldBlocks`."""

    @property
    def lease_id(self) -> str: ...

    @property
    def readable(self) -> tuple[BlockIds, ...]: ...

    @property
    def missing(self) -> int: ...


class Offered(Protocol):
    """An open lease; see `serving.OpenLease`."""

    @property
    def ticket(self) -> Ticket: ...

    @property
    def held(self) -> Held: ...

    @property
    def payload(self) -> bytes | None: ...

    @property
    def complete(self) -> bool: ...

    def found(self, now_s: float) -> messages.LeaseFound: ...


class Leases(Protocol):
    """The leases of a rank; see `serving.Serving`."""

    def open_lease(self, request_id: str) -> Offered | None: ...

    def served(self, request_id: str) -> bool: ...


class Newsroom:
    """Answers what readers ask for while they wait."""

    def __init__(self, context: RankContext, leases: Leases) -> None:
        self._clock = context.clock
        self._leases = leases
        self._waiting = WaitingQuestions(context.clock, _nothing_yet)
        self._notes: OrderedDict[str, messages.Reply] = OrderedDict()
        """What late readers are told of requests without a lease: a few thousand of the last ones."""
        self._turned_away = ""

    @property
    def waiting(self) -> int:
        """How many questions wait now."""
        return len(self._waiting)

    def answer(self, question: messages.WaitingRequest) -> Answered:
        """What there is to tell, or the promise of it."""
        reply = self._now(question)
        return self._waiting.wait(question) if reply is None else reply

    def tell(self, request_id: str) -> None:
        """Something has happened to a request."""
        self._waiting.settle(request_id, self._now)

    def opened(self, found: Offered, *, nothing: bool) -> None:
        """A lease is open; with `nothing` to read it ends now, and readers are told that there was none."""
        request_id = found.ticket.request_id
        self._notes.pop(request_id, None)
        if nothing:
            self._note(request_id, _offer(found, None))
        else:
            self.tell(request_id)

    def decline(self, request_id: str, reason: str) -> None:
        """There will be no lease for the request: readers that wait for one are told so, and those who come late."""
        self._note(request_id, messages.Declined(reason=printable(reason, _REASON_CHARS_MAX)))

    def fail(self, request_id: str, reason: str) -> None:
        """The prompt of a lease could not be computed: readers of it are told so, and those who come late."""
        self._note(request_id, messages.Declined(reason=printable(reason, _REASON_CHARS_MAX)))

    def why_declined(self, request_id: str) -> str | None:
        """Why there will be no lease for a request, or none any more; None if nobody has said so lately."""
        noted = self._notes.get(request_id)
        return noted.reason if isinstance(noted, messages.Declined) else None

    def turn_away(self, why: str) -> None:
        """No more leases are opened: tell everybody who waits for one."""
        self._turned_away = why
        self._waiting.settle_all(self._now)

    def _note(self, request_id: str, reply: messages.Reply) -> None:
        self._notes[request_id] = reply
        self._notes.move_to_end(request_id)
        if len(self._notes) > _NOTES_MAX:
            self._notes.popitem(last=False)
        self.tell(request_id)

    def _now(self, question: messages.WaitingRequest) -> messages.Reply | None:
        """The answer, if there is something to tell."""
        found = self._leases.open_lease(question.request_id)
        if isinstance(question, messages.NewsRequest):
            return self._news(question, found)
        if question.request_id in self._notes:
            return self._notes[question.request_id]
        if found is not None:
            return _offer(found, found.found(self._clock.now_s()))
        if self._leases.served(question.request_id):
            return messages.NoLease(ended=True)
        if self._turned_away:
            return messages.Refusal(reason=self._turned_away, version=messages.PROTOCOL_VERSION, transient=True)
        return None

    def _news(self, question: messages.NewsRequest, found: Offered | None) -> messages.News | None:
        if found is None or found.held.lease_id != question.lease_id:
            why = self.why_declined(question.request_id)
            if found is None and why is not None:
                return messages.News(state=LeaseNews.FAILED, reason=why)
            return messages.News(state=LeaseNews.ENDED)
        tables, known = found.held.readable, question.known
        if len(known) != len(tables) or any(not 0 <= at <= len(ids) for at, ids in zip(known, tables, strict=True)):
            raise messages.WireError(f"news: {known[:8]} blocks known, there are {tuple(map(len, tables))}")
        more = tuple(tuple(ids[at:].tolist()) for at, ids in zip(known, tables, strict=True))
        if found.complete:
            return messages.News(state=LeaseNews.COMPLETE, more_block_ids=more, payload=found.payload or b"")
        if any(more) or found.held.missing <= question.missing_max:
            return messages.News(state=LeaseNews.OPEN, more_block_ids=more)
        return None


def _offer(found: Offered, lease: messages.LeaseFound | None) -> messages.Offer:
    ticket = found.ticket
    return messages.Offer(
        lease=lease,
        num_tokens=ticket.num_tokens,
        ttl_s=ticket.ttl_s,
        block_ids=ticket.block_tables,
        extends=ticket.extends,
        prompt_digest=ticket.prompt_digest,
    )


def _nothing_yet(question: messages.WaitingRequest) -> messages.Reply:
    if isinstance(question, messages.NewsRequest):
        return messages.News(state=LeaseNews.OPEN)
    return messages.NoLease(ended=False)
