"""Answers about leases: a lease is opened, has more blocks, is complete, or is over.

Readers put one question (`messages.LeaseRequest`), which waits until there is something to tell.

| known here of the request | the reader knows no lease | the reader knows a lease |
|---|---|---|
| its open lease is the one that is meant | open: the lease, and the offer if it is not known | see below |
| its open lease is another one, or of other blocks | ended | ended |
| its offer was of nothing | complete: the offer | ended |
| it is declined, or its lease has failed | failed: the reason | failed: the reason |
| its lease has ended lately | ended | ended |
| it has come to another engine | failed: the rendezvous there | ended |
| no lease is opened any more | refused | ended |
| nothing | the question waits | ended |

Of the lease that a reader knows these are told: it is complete, with its payload; it has blocks that the reader does
not know; no more tokens are missing than the reader has asked for. If none of them is so, the question waits.

A question that waits is settled exactly once: by an event of its request, by its reader's time, or by the end of the
registration. Where there is no room for a question it is answered at once that there is nothing yet, and its reader
asks again a little later. So whoever fills the room with questions slows others down, but keeps nobody from an answer
that is there.

An answer proves nothing: the seal says whether a lease has covered a read. But it is the only way to a payload, and to
blocks that no ticket names.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvflow.checks import printable
from kvflow.core.policy.latest import Latest
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.messages import Told
from kvflow.limits import QUESTION_WAIT_S
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.clock import Clock, Timer
from kvflow.runtime.producer.lease import OpenLease

WAITING_MAX = 1 << 14
"""Questions that wait at once; those beyond are answered at once, and asked again a little later."""
OF_READER_MAX = 1 << 12
OF_REQUEST_MAX = 256
_NOTES_MAX = 1 << 12
_REASON_CHARS_MAX = 500
_ENDED = messages.LeaseAnswer(state=Told.ENDED)


@dataclass(slots=True, eq=False)
class _Question:
    """A question that waits."""

    question: messages.LeaseRequest
    reply: asyncio.Future[messages.Reply]
    timer: Timer | None = None
    """Ends the wait with the answer that there is nothing yet."""


class LeaseAnswers:
    """Answers to questions about leases, and the questions that wait for one."""

    def __init__(
        self,
        clock: Clock,
        incarnation: str,
        open_lease: Callable[[str], OpenLease | None],
        served: Callable[[str], bool],
    ) -> None:
        """`open_lease` finds that of a request; `served` says whether one of it has ended lately."""
        self._open_lease = open_lease
        self._served = served
        self._clock = clock
        self._of_request: dict[str, dict[_Question, None]] = {}
        """Questions that wait, by request, in the order in which they came."""
        self._of_reader: Counter[str] = Counter()
        self.waiting = 0
        """Questions that wait now."""
        self._incarnation = incarnation
        self._notes: Latest[str, messages.LeaseAnswer] = Latest(_NOTES_MAX)
        """Replies to late readers of requests without a lease: a few thousand of the last ones."""
        self._elsewhere = Latest[str, messages.LeaseAnswer](_NOTES_MAX)
        """Replies to readers of requests that have come to another engine, by that engine's word."""
        self.turned_away = ""
        """The reason why no lease is opened any more; "" while some are."""

    def answer(self, question: messages.LeaseRequest) -> Answered:
        """Answer a question now, or promise to. Raises WireError for a question that cannot be right."""
        reply = self._now(question)
        return self._wait(question) if reply is None else reply

    def opened(self, found: OpenLease, *, nothing: bool) -> None:
        """Tell readers of a lease that was opened. `nothing`: the lease has no blocks; readers get an empty offer."""
        request_id = found.ticket.request_id
        self._notes.pop(request_id, None)
        if nothing:
            self._note(request_id, messages.LeaseAnswer(state=Told.COMPLETE, offer=found.offer()))
        else:
            self.tell(request_id)

    def decline(self, request_id: str, reason: str) -> None:
        """Tell readers that the request's prompt cannot be computed, those that wait and those that ask later."""
        self._note(request_id, _failed(reason))

    def came_elsewhere(self, question: messages.DeclineRequest) -> messages.Ack:
        """Send readers that wait for a request on to the engine that it has come to, as far as nothing is known here.

        A request that is served, was served, or is declined here stays what it is.
        """
        self._elsewhere[question.request_id] = _failed(question.reason, question.instead)
        self.tell(question.request_id)
        return messages.Ack(incarnation=self._incarnation)

    def tell(self, request_id: str) -> None:
        """Answer the questions about a request that have an answer now, since something has happened to it."""
        if request_id not in self._of_request:
            return
        for waiting in list(self._of_request[request_id]):
            reply = self._now(waiting.question)
            if reply is not None:
                self._end(waiting, reply)

    def turn_away(self, why: str) -> None:
        """Turn away everybody who waits for a lease, as no more are opened."""
        self.turned_away = why
        for request_id in list(self._of_request):
            self.tell(request_id)

    def _note(self, request_id: str, reply: messages.LeaseAnswer) -> None:
        self._notes[request_id] = reply
        self.tell(request_id)

    def _now(self, question: messages.LeaseRequest) -> messages.Reply | None:
        """The answer, if there is something to tell; see the table above."""
        request_id = question.request_id
        found = self._open_lease(request_id)
        if question.lease_id is not None:
            return self._news(question, found)
        if found is not None and question.blocks_digest:
            meant = found.is_of(question.num_tokens, question.blocks_digest)
            return messages.LeaseAnswer(state=Told.OPEN, lease=found.lease()) if meant else _ENDED
        if request_id in self._notes:
            return self._notes[request_id]
        if found is not None:
            return messages.LeaseAnswer(state=Told.OPEN, lease=found.lease(), offer=found.offer())
        if self._served(request_id):
            return _ENDED
        if request_id in self._elsewhere:
            return self._elsewhere[request_id]
        if self.turned_away:
            return refusal(self.turned_away, transient=True)
        return None

    def _news(self, question: messages.LeaseRequest, found: OpenLease | None) -> messages.LeaseAnswer | None:
        """The answer about a lease that the reader knows."""
        if found is None or found.held.lease_id != question.lease_id:
            noted = self._notes.get(question.request_id)
            return noted if found is None and noted is not None and noted.state is Told.FAILED else _ENDED
        tables, known = found.held.readable, question.known
        counts = tuple(map(len, tables))
        if known != counts and (len(known) != len(counts) or any(map(_outside, known, counts))):
            raise codec.WireError(f"news: known blocks {known[:8]}, there are {counts}")
        if known == counts and not found.complete and found.held.missing > question.missing_max:
            return None
        more = tuple(tuple(ids[at:].tolist()) for at, ids in zip(known, tables, strict=True))
        if found.complete:
            return messages.LeaseAnswer(state=Told.COMPLETE, more_block_ids=more, payload=found.payload or b"")
        return messages.LeaseAnswer(state=Told.OPEN, more_block_ids=more)

    def _wait(self, question: messages.LeaseRequest) -> Answered:
        """Promise an answer; or give one at once, if there is no room to wait."""
        reader = messages.asked_by(question)
        others = self._of_request.get(question.request_id, ())
        room = self.waiting < WAITING_MAX and len(others) < OF_REQUEST_MAX
        if not room or self._of_reader[reader] >= OF_READER_MAX or not question.wait_s:
            return messages.NOTHING_YET
        waiting = _Question(question, asyncio.get_running_loop().create_future())
        ending = partial(self._end, waiting, messages.NOTHING_YET)
        waiting.timer = self._clock.call_later(min(question.wait_s, QUESTION_WAIT_S), ending)
        self._of_request.setdefault(question.request_id, {})[waiting] = None
        self._of_reader[reader] += 1
        self.waiting += 1
        return waiting.reply

    def _end(self, waiting: _Question, reply: messages.Reply) -> None:
        request_id, reader = waiting.question.request_id, messages.asked_by(waiting.question)
        del self._of_request[request_id][waiting]
        if not self._of_request[request_id]:
            del self._of_request[request_id]
        self._of_reader[reader] -= 1
        if not self._of_reader[reader]:
            del self._of_reader[reader]
        self.waiting -= 1
        if waiting.timer is not None:
            waiting.timer.cancel()
        if not waiting.reply.done():
            waiting.reply.set_result(reply)


def _outside(known: int, count: int) -> bool:
    return not 0 <= known <= count


def _failed(reason: str, instead: bytes = b"") -> messages.LeaseAnswer:
    return messages.LeaseAnswer(state=Told.FAILED, reason=printable(reason, _REASON_CHARS_MAX), instead=instead)
