"""Answers about leases: whether a lease is open, has more blocks, is complete, has failed or has ended.

Readers ask one kind of question (`messages.LeaseRequest`). It waits until the answer has news.

| state of the request on this rank | the reader knows no lease | the reader knows a lease |
|---|---|---|
| the lease that the reader means is open | open: the lease, and the offer if the reader lacks it | see below |
| another lease, or a lease of other blocks, is open | ended | ended |
| the lease had no blocks | complete: the offer | ended |
| the request is declined, or its lease has failed | failed: the reason | failed: the reason |
| the lease ended lately | ended | ended |
| the request went to another engine | failed: the pending ticket of that engine | ended |
| this rank opens no further leases | refused | ended |
| none of these | the question waits | ended |

If the reader knows the lease, the answer has news in three cases: the lease is complete (the answer has its payload),
it has blocks that the reader does not know, or at most `missing_max` tokens are missing. Otherwise the question waits.

A waiting question is answered exactly once: by an event of its request, by the end of its `wait_s`, or by the end of
the registration. If there is no room for another waiting question, the answer comes at once and says that there is no
news; the reader asks again a little later. So a reader that floods this rank with questions delays other readers, but
never keeps an existing answer from them.

An answer proves nothing: only the seal says whether a lease has covered a read. But payloads, and blocks that no ticket
names, come by answers only.
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
"""Most questions that wait; any further question is answered at once, and asked again a little later."""
OF_READER_MAX = 1 << 12
OF_REQUEST_MAX = 256
_NOTES_MAX = 1 << 12
_REASON_CHARS_MAX = 500
_ENDED = messages.LeaseAnswer(state=Told.ENDED)


@dataclass(slots=True, eq=False)
class _Question:
    """A question that waits, and the future of its answer."""

    question: messages.LeaseRequest
    reply: asyncio.Future[messages.Reply]
    timer: Timer | None = None
    """The timer that ends the wait with an answer without news."""


class LeaseAnswers:
    """The answers to readers' questions about leases, and the questions that wait."""

    def __init__(
        self,
        clock: Clock,
        incarnation: str,
        open_lease: Callable[[str], OpenLease | None],
        served: Callable[[str], bool],
    ) -> None:
        """Take the two lookups by request id that answers need.

        `open_lease` returns the open lease of a request; `served` returns whether a lease of it ended lately.
        """
        self._open_lease = open_lease
        self._served = served
        self._clock = clock
        self._of_request: dict[str, dict[_Question, None]] = {}
        """Waiting questions by request, in order of arrival."""
        self._of_reader: Counter[str] = Counter()
        self.waiting = 0
        """Number of waiting questions."""
        self._incarnation = incarnation
        self._notes: Latest[str, messages.LeaseAnswer] = Latest(_NOTES_MAX)
        """Answers to late questions: for the last few thousand requests that were declined, failed or had no blocks."""
        self._elsewhere = Latest[str, messages.LeaseAnswer](_NOTES_MAX)
        """Answers for requests that went to another engine, as that engine reported."""
        self.turned_away = ""
        """Reason why this rank opens no further leases; "" while it does."""

    def answer(self, question: messages.LeaseRequest) -> Answered:
        """Return the answer, or a future of it if the question must wait. Raises WireError if it is impossible."""
        reply = self._now(question)
        return self._wait(question) if reply is None else reply

    def opened(self, found: OpenLease, *, nothing: bool) -> None:
        """Answer readers that wait for this lease. `nothing`: the lease has no blocks; readers get an empty offer."""
        request_id = found.ticket.request_id
        self._notes.pop(request_id, None)
        if nothing:
            self._note(request_id, messages.LeaseAnswer(state=Told.COMPLETE, offer=found.offer()))
        else:
            self.tell(request_id)

    def decline(self, request_id: str, reason: str) -> None:
        """Answer readers, waiting and later ones, that the prompt of a request cannot be computed."""
        self._note(request_id, _failed(reason))

    def came_elsewhere(self, question: messages.DeclineRequest) -> messages.Ack:
        """Send readers of a request on to the engine that the request went to, as `question` says.

        Changes nothing for a request that is served, was served or is declined here.
        """
        self._elsewhere[question.request_id] = _failed(question.reason, question.instead)
        self.tell(question.request_id)
        return messages.Ack(incarnation=self._incarnation)

    def tell(self, request_id: str) -> None:
        """Answer the waiting questions about a request that have news now. Call this after each change of its lease."""
        if request_id not in self._of_request:
            return
        for waiting in list(self._of_request[request_id]):
            reply = self._now(waiting.question)
            if reply is not None:
                self._end(waiting, reply)

    def turn_away(self, why: str) -> None:
        """Open no further leases: refuse readers that wait for a lease, now and later, with the reason `why`."""
        self.turned_away = why
        for request_id in list(self._of_request):
            self.tell(request_id)

    def _note(self, request_id: str, reply: messages.LeaseAnswer) -> None:
        self._notes[request_id] = reply
        self.tell(request_id)

    def _now(self, question: messages.LeaseRequest) -> messages.Reply | None:
        """Return the answer by the table of the module, or None if the question must wait."""
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
        """Return the answer about a lease that the reader knows, or None if there is no news."""
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
        """Return a future of the answer; or, if the question may not wait, an answer without news."""
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
