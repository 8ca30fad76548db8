"""News of leases for readers that wait: a lease is opened, has more blocks, is complete, or is over.

Two kinds of questions wait for news. A reader with a rendezvous asks for the offer of a request, perhaps before the
engine knows of it: the answer comes when a lease is opened, or when the engine says that there will be none
(`decline`). A reader of a lease that grows asks for news of it: the answer comes when the lease is complete, with its
payload, when it has ended, when it has blocks that the reader does not know, or when no more tokens are missing than
the reader has asked for.

An answer of the second kind proves nothing: the seal says whether a lease has covered a read. But it is the only way
to a payload, and to blocks that no ticket names.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from kvflow.checks import printable
from kvflow.core.policy.latest import Latest
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.messages import LeaseNews
from kvflow.growing.waiting_questions import WaitingQuestions
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.context import RankContext
from kvflow.runtime.producer.open_lease import OpenLease

_NOTES_MAX = 1 << 12
_REASON_CHARS_MAX = 500


class Newsroom:
    """Answers what readers ask for while they wait."""

    def __init__(
        self, context: RankContext, open_lease: Callable[[str], OpenLease | None], served: Callable[[str], bool]
    ) -> None:
        """`open_lease` finds that of a request; `served` says whether one of it has ended lately."""
        self._open_lease = open_lease
        self._served = served
        self._waiting = WaitingQuestions(context.clock, self._now, _nothing_yet)
        self.tell = self._waiting.settle
        """Answers questions about a request, since something has happened to it."""
        self._notes: OrderedDict[str, messages.Reply] = OrderedDict()
        """Replies to late readers of requests without a lease: a few thousand of the last ones."""
        self._elsewhere = Latest[str, messages.Declined](_NOTES_MAX)
        """Replies to readers of requests that have come to another engine, by that engine's word."""
        self.turned_away = ""
        """The reason why no lease is opened any more; "" while some are."""

    @property
    def waiting(self) -> int:
        """Questions that wait now."""
        return len(self._waiting)

    def answer(self, question: messages.WaitingRequest) -> Answered:
        """Answer a question now, or promise to."""
        reply = self._now(question)
        return self._waiting.wait(question) if reply is None else reply

    def opened(self, found: OpenLease, *, nothing: bool) -> None:
        """A lease is open; with `nothing` to read it ends now, and readers are told that there was none."""
        request_id = found.ticket.request_id
        self._notes.pop(request_id, None)
        if nothing:
            self._note(request_id, _offer(found, None))
        else:
            self.tell(request_id)

    def decline(self, request_id: str, reason: str) -> None:
        """Open no lease for the request any more, as its prompt cannot be computed: readers that wait are told so,
        and those who come late.
        """
        self._note(request_id, messages.Declined(reason=printable(reason, _REASON_CHARS_MAX)))

    def came_elsewhere(self, question: messages.DeclineRequest) -> messages.Ack:
        """Send readers that wait for a request on to the engine that it has come to, as far as nothing is known here.

        A request that is served, was served, or is declined here stays what it is.
        """
        reason = printable(question.reason, _REASON_CHARS_MAX)
        self._elsewhere[question.request_id] = messages.Declined(reason=reason, instead=question.instead)
        self.tell(question.request_id)
        return messages.Ack()

    def why_declined(self, request_id: str) -> str | None:
        """The reason why there will be no lease for a request, or none any more; None if nobody has said so lately."""
        noted = self._notes.get(request_id)
        return noted.reason if isinstance(noted, messages.Declined) else None

    def turn_away(self, why: str) -> None:
        """Turn away everybody who waits for a lease, as no more are opened."""
        self.turned_away = why
        self._waiting.settle_all()

    def _note(self, request_id: str, reply: messages.Reply) -> None:
        self._notes[request_id] = reply
        self._notes.move_to_end(request_id)
        if len(self._notes) > _NOTES_MAX:
            self._notes.popitem(last=False)
        self.tell(request_id)

    def _now(self, question: messages.WaitingRequest) -> messages.Reply | None:
        """The answer, if there is something to tell."""
        found = self._open_lease(question.request_id)
        if isinstance(question, messages.NewsRequest):
            return self._news(question, found)
        if question.request_id in self._notes:
            return self._notes[question.request_id]
        if found is not None:
            return _offer(found, found.found())
        if self._served(question.request_id):
            return messages.NoLease(ended=True)
        if question.request_id in self._elsewhere:
            return self._elsewhere[question.request_id]
        if self.turned_away:
            return refusal(self.turned_away, transient=True)
        return None

    def _news(self, question: messages.NewsRequest, found: OpenLease | None) -> messages.News | None:
        if found is None or found.held.lease_id != question.lease_id:
            why = self.why_declined(question.request_id)
            if found is None and why is not None:
                return messages.News(state=LeaseNews.FAILED, reason=why)
            return messages.News(state=LeaseNews.ENDED)
        tables, known = found.held.readable, question.known
        counts = tuple(map(len, tables))
        if known != counts and (len(known) != len(counts) or any(map(_outside, known, counts))):
            raise codec.WireError(f"news: {known[:8]} blocks known, there are {counts}")
        if known == counts and not found.complete and found.held.missing > question.missing_max:
            return None
        more = tuple(tuple(ids[at:].tolist()) for at, ids in zip(known, tables, strict=True))
        if found.complete:
            return messages.News(state=LeaseNews.COMPLETE, more_block_ids=more, payload=found.payload or b"")
        return messages.News(state=LeaseNews.OPEN, more_block_ids=more)


def _outside(known: int, count: int) -> bool:
    return not 0 <= known <= count


def _offer(found: OpenLease, lease: messages.LeaseFound | None) -> messages.Offer:
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
