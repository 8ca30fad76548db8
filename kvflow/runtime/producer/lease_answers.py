"""Answers about leases: whether a lease is open, has more blocks, is complete, has failed or has ended.

Readers ask one kind of question (`messages.LeaseRequest`). It waits until this rank knows something that the reader
does not: *news*.

| state of the request on this rank | the reader knows no lease | the reader knows a lease |
|---|---|---|
| the lease that the reader means is open | open: the lease, and the offer if the reader lacks it | see below |
| another lease, or a lease of other blocks, is open | ended | ended |
| the lease had no blocks | complete: the offer | ended |
| the request is declined, or its lease has failed | failed: the reason | failed: the reason |
| the lease ended lately | ended | ended |
| the request went to another engine | failed: the pending ticket of that engine | ended |
| this rank opens no further leases | refused | ended |
| the same, and an engine takes this one's place | failed: a pending ticket of that engine | ended |
| none of these | the question waits | ended |

If the reader knows the lease, the answer has news in three cases: the lease is complete (the answer has its payload),
it has blocks that the reader does not know, or at most `missing_max` tokens are missing. Otherwise the question waits.

A waiting question is answered exactly once: by an event of its request, by the end of its `wait_s`, or by the end of
the registration. If there is no room for another waiting question, the answer says that there is no news, and the
reader asks again a little later. So a reader that floods this rank with questions delays other readers, but never keeps
an existing answer from them.

An answer proves nothing: only the seal says whether a lease has covered a read.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from kvflow.checks import printable
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.messages import LeaseAnswerState
from kvflow.limits import QUESTION_WAIT_S
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.clock import Clock, Timer
from kvflow.runtime.producer.lease import OpenLease

WAITING_MAX = 1 << 14
"""Maximum number of waiting questions. Above it a question is answered immediately, and the reader asks again later."""
WAITING_OF_READER_MAX = 1 << 12
WAITING_OF_REQUEST_MAX = 256
_KEPT_ANSWERS_MAX = 1 << 12
_REASON_CHARS_MAX = 500
_ENDED = messages.LeaseAnswer(state=LeaseAnswerState.ENDED)


@dataclass(slots=True, eq=False)
class _WaitingQuestion:
    """A reader's question that waits until the lease has changed, and the future of its reply."""

    question: messages.LeaseRequest
    reply: asyncio.Future[messages.Reply]
    timer: Timer | None = None
    """Timer that ends the wait after the question's `wait_s`, with the answer that nothing has changed."""


class LeaseAnswers:
    """Answers readers' questions about leases, immediately or once a lease has changed, and holds waiting questions."""

    def __init__(
        self,
        clock: Clock,
        open_lease: Callable[[str], OpenLease | None],
        served: Callable[[str], bool],
    ) -> None:
        """`open_lease(request_id)` returns the open lease or None, `served(request_id)` whether one ended lately."""
        self._open_lease = open_lease
        self._ended_recently = served
        self._clock = clock
        self._of_request: dict[str, dict[_WaitingQuestion, None]] = {}
        """Waiting questions by request id, in order of arrival. The inner dict serves as an ordered set."""
        self._of_reader: Counter[str] = Counter()
        self.waiting = 0
        self._kept_answers: BoundedMap[str, messages.LeaseAnswer] = BoundedMap(_KEPT_ANSWERS_MAX)
        """Answers by request id, for the last few thousand requests that were declined, failed or had no blocks.

        They answer questions that come when the request has no open lease.
        """
        self._redirects = BoundedMap[str, messages.LeaseAnswer](_KEPT_ANSWERS_MAX)
        """Answers by request id, for requests that the router sent to another engine, as recorded by `redirect`."""
        self._successor_params: Callable[[str], bytes] | None = None
        """Function that takes a request id and returns the encoded pending ticket for the engine that takes this one's
        place; None if there is no such engine."""
        self.refusal_reason = ""
        """Reason why this rank opens no further leases; "" while it still opens leases."""

    def answer(self, question: messages.LeaseRequest) -> Answered:
        """Return the answer to `question`, or a future of the answer if the question must wait.

        A question waits for at most its `wait_s`. WireError if `question.known` does not fit the lease's blocks.
        """
        reply = self._answer_now(question)
        return self._hold_question(question) if reply is None else reply

    def opened(self, found: OpenLease, *, empty: bool) -> None:
        """Answer the questions that wait for `found`, a lease that was just opened.

        `empty`: the lease has no blocks and ends now. Waiting and later questions then get an empty offer.
        """
        request_id = found.ticket.request_id
        self._kept_answers.pop(request_id, None)
        if empty:
            self._keep_answer(request_id, messages.LeaseAnswer(state=LeaseAnswerState.COMPLETE, offer=found.offer()))
        else:
            self.answer_waiting(request_id)

    def decline(self, request_id: str, reason: str) -> None:
        """Answer waiting and later questions about a request: its prompt will not be computed, because of `reason`."""
        self._keep_answer(request_id, _failed_answer(reason))

    def redirect(self, request_id: str, reason: str, instead: bytes) -> None:
        """Answer waiting and later questions about a request that the router has sent to another engine.

        The answer has `reason` and, unless `instead` is empty, the encoded pending ticket with which readers go on at
        the other engine. A request that is or was served here, or is declined here, keeps its answers.
        """
        self._redirects[request_id] = _failed_answer(reason, instead)
        self.answer_waiting(request_id)

    def answer_waiting(self, request_id: str) -> None:
        """Answer those waiting questions about a request that can be answered now.

        Call this after each change of the request's lease.
        """
        if request_id not in self._of_request:
            return
        for waiting in list(self._of_request[request_id]):
            reply = self._answer_now(waiting.question)
            if reply is not None:
                self._reply(waiting, reply)

    def refuse_questions(self, why: str, successor_params: Callable[[str], bytes] | None = None) -> None:
        """Refuse questions about leases that are not open, those that wait now and all later ones.

        `why`: reason why this rank opens no further leases, for the refusals. `successor_params`: takes a request id,
        and returns the encoded pending ticket with which readers go on at another engine instead; empty to refuse them.
        An earlier one is kept.
        """
        self.refusal_reason, self._successor_params = why, successor_params or self._successor_params
        for request_id in list(self._of_request):
            self.answer_waiting(request_id)

    def _keep_answer(self, request_id: str, reply: messages.LeaseAnswer) -> None:
        self._kept_answers[request_id] = reply
        self.answer_waiting(request_id)

    def _answer_now(self, question: messages.LeaseRequest) -> messages.Reply | None:
        """Return the answer to `question` by the table in the module docstring, or None if the question must wait."""
        request_id = question.request_id
        found = self._open_lease(request_id)
        if question.lease_id is not None:
            return self._answer_known(question, found)
        # A request may be offered again with other blocks. The digest says which of its leases the ticket means.
        if found is not None and question.blocks_digest:
            is_meant = found.matches(question.num_tokens, question.blocks_digest)
            return messages.LeaseAnswer(state=LeaseAnswerState.OPEN, lease=found.rank_lease()) if is_meant else _ENDED
        if request_id in self._kept_answers:
            return self._kept_answers[request_id]
        if found is not None:
            return messages.LeaseAnswer(state=LeaseAnswerState.OPEN, lease=found.rank_lease(), offer=found.offer())
        if self._ended_recently(request_id):
            return _ENDED
        if request_id in self._redirects:
            return self._redirects[request_id]
        if self._successor_params is not None and (instead := self._successor_params(request_id)):
            return _failed_answer(self.refusal_reason, instead)
        if self.refusal_reason:
            return refusal(self.refusal_reason, transient=True)
        return None

    def _answer_known(self, question: messages.LeaseRequest, found: OpenLease | None) -> messages.LeaseAnswer | None:
        """Return the answer to `question`, from a reader that knows the lease, or None if the question must wait.

        `found`: the open lease of the request, or None.
        """
        if found is None or found.held.lease_id != question.lease_id:
            noted = self._kept_answers.get(question.request_id)
            return noted if found is None and noted is not None and noted.state is LeaseAnswerState.FAILED else _ENDED
        tables, known = found.held.readable, question.known
        counts = tuple(map(len, tables))
        if known != counts and (len(known) != len(counts) or any(map(_outside, known, counts))):
            raise codec.WireError(f"known: expected at most, by group, {counts}, got {known[:8]}")
        complete = found.complete
        if known == counts and not complete and found.held.missing > question.missing_max:
            return None
        more = tuple(tuple(ids[at:].tolist()) for at, ids in zip(known, tables, strict=True))
        if complete:
            return messages.LeaseAnswer(
                state=LeaseAnswerState.COMPLETE, more_block_ids=more, payload=found.payload or b""
            )
        return messages.LeaseAnswer(state=LeaseAnswerState.OPEN, more_block_ids=more)

    def _hold_question(self, question: messages.LeaseRequest) -> Answered:
        """Add `question` to the waiting questions, and return the future of its reply.

        If too many questions wait already, or if `question.wait_s` is 0, return the answer that nothing has changed.
        """
        reader = messages.claimed_engine_id(question)
        others = self._of_request.get(question.request_id, ())
        # Neither one reader nor the readers of one request take all the room: others may wait, too (I8).
        room = self.waiting < WAITING_MAX and len(others) < WAITING_OF_REQUEST_MAX
        if not room or self._of_reader[reader] >= WAITING_OF_READER_MAX or not question.wait_s:
            return messages.NOTHING_YET
        waiting = _WaitingQuestion(question, asyncio.get_running_loop().create_future())
        ending = partial(self._reply, waiting, messages.NOTHING_YET)
        # The reader names the time, this rank bounds it (I7).
        waiting.timer = self._clock.call_later(min(question.wait_s, QUESTION_WAIT_S), ending)
        self._of_request.setdefault(question.request_id, {})[waiting] = None
        self._of_reader[reader] += 1
        self.waiting += 1
        return waiting.reply

    def _reply(self, waiting: _WaitingQuestion, reply: messages.Reply) -> None:
        request_id, reader = waiting.question.request_id, messages.claimed_engine_id(waiting.question)
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


def _failed_answer(reason: str, instead: bytes = b"") -> messages.LeaseAnswer:
    return messages.LeaseAnswer(
        state=LeaseAnswerState.FAILED, reason=printable(reason, _REASON_CHARS_MAX), instead=instead
    )
