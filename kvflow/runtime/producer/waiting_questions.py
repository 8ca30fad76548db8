"""Questions of readers that wait until there is an answer: bounded in number and in time.

A question waits under its request id. It is settled exactly once: by an event of the request, by its reader's time, or
by the end of the registration. Where there is no room for a question it is answered at once that there is nothing yet,
and its reader asks again a little later. So whoever fills the room with questions slows others down, but keeps nobody
from an answer that is there.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import asked_by
from kvflow.limits import QUESTION_WAIT_S
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.clock import Alarm, Clock

WAITING_MAX = 1 << 14
"""Questions that wait at once; those beyond are answered at once, and asked again a little later."""
OF_READER_MAX = 1 << 12
OF_REQUEST_MAX = 256


@dataclass(slots=True, eq=False)
class _Question:
    """A question that waits."""

    question: messages.LeaseRequest
    reply: asyncio.Future[messages.Reply]
    due_s: float


class WaitingQuestions:
    """All questions that wait at one rank."""

    def __init__(
        self,
        clock: Clock,
        answer: Callable[[messages.LeaseRequest], messages.Reply | None],
    ) -> None:
        """`answer` gives the reply to a question, if there is one by now."""
        self._answer = answer
        self._clock = clock
        self._of_request: dict[str, dict[_Question, None]] = {}
        """Questions by request, in the order in which they came."""
        self._of_reader: Counter[str] = Counter()
        self._count = 0
        self._due: list[tuple[float, int, _Question]] = []
        """Heap of questions by their time, settled ones among them."""
        self._numbers = itertools.count()
        self._alarm = Alarm(clock, self._look)
        """Time that the timer is set to."""

    def __len__(self) -> int:
        return self._count

    def wait(self, question: messages.LeaseRequest) -> Answered:
        """Promise an answer; or give one at once, if there is no room to wait."""
        reader = asked_by(question)
        others = self._of_request.get(question.request_id, ())
        room = self._count < WAITING_MAX and len(others) < OF_REQUEST_MAX
        if not room or self._of_reader[reader] >= OF_READER_MAX or not question.wait_s:
            return messages.NOTHING_YET
        due_s = self._clock.now_s() + min(question.wait_s, QUESTION_WAIT_S)
        waiting = _Question(question, asyncio.get_running_loop().create_future(), due_s)
        self._of_request.setdefault(question.request_id, {})[waiting] = None
        self._of_reader[reader] += 1
        self._count += 1
        heapq.heappush(self._due, (due_s, next(self._numbers), waiting))
        self._set_timer()
        return waiting.reply

    def settle(self, request_id: str) -> None:
        """Settle the questions of a request that have an answer now."""
        if request_id not in self._of_request:
            return
        for waiting in list(self._of_request[request_id]):
            reply = self._answer(waiting.question)
            if reply is not None:
                self._end(waiting, reply)
        self._set_timer()

    def settle_all(self) -> None:
        """Settle the questions of all requests."""
        for request_id in list(self._of_request):
            self.settle(request_id)

    def _end(self, waiting: _Question, reply: messages.Reply) -> None:
        request_id, reader = waiting.question.request_id, asked_by(waiting.question)
        del self._of_request[request_id][waiting]
        if not self._of_request[request_id]:
            del self._of_request[request_id]
        self._of_reader[reader] -= 1
        if not self._of_reader[reader]:
            del self._of_reader[reader]
        self._count -= 1
        if not waiting.reply.done():
            waiting.reply.set_result(reply)

    def _set_timer(self) -> None:
        """Set the timer to the end of the next question's time, if there is one."""
        while self._due and self._is_settled(self._due[0][2]):
            heapq.heappop(self._due)
        self._alarm.set(self._due[0][0] if self._due else math.inf)

    def _is_settled(self, waiting: _Question) -> bool:
        return waiting not in self._of_request.get(waiting.question.request_id, ())

    def _look(self) -> None:
        """Callback of the alarm: answer questions whose time is over."""
        now_s = self._clock.now_s()
        while self._due and self._due[0][0] <= now_s:
            waiting = heapq.heappop(self._due)[2]
            if not self._is_settled(waiting):
                self._end(waiting, messages.NOTHING_YET)
        self._set_timer()
