"""An answer by attempts: each starts over, elsewhere, until a client has seen a token; one deadline covers all of them.

An attempt is one prefill and one decode, side by side (`hand_over`): the decode worker loads the prompt's blocks while
they are computed, and the first token comes to it with the last of them. They meet by the attempt's id, which nobody
else knows. Which workers, and how they are asked, their owner says: `router`, for attempts and `hand_over`, and
`ray_server.ingress`, whose attempts are one call of Ray's each.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Hashable, Sequence
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

from disaggregated.keeper import StartTask
from disaggregated.messages import Again, DecodeRequest, Failure, FailureKind, PrefillReply, PrefillRequest, Step
from paged_engine import GREEDY, Sampling

from kvflow import Ticket
from openai_server.failures import STATUS

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class AttemptError(Exception):
    """An attempt failed, and which worker the next one should avoid."""

    def __init__(self, failure: Failure, worker: Hashable | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.worker = worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One request as the router sees it. `deadline` is a time of the loop's clock."""

    id: str
    token_ids: Sequence[int]
    max_tokens: int
    deadline: float
    sampling: Sampling = GREEDY

    @classmethod
    def asked(cls, request: PrefillRequest) -> Self:
        """What another process asks, by this process's clock."""
        return cls(
            id=request.request_id,
            token_ids=request.prompt,
            max_tokens=request.max_tokens,
            deadline=asyncio.get_running_loop().time() + request.deadline_s,
            sampling=request.sampling,
        )

    @property
    def remaining_s(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.001)

    def to_compute(self, request_id: str) -> PrefillRequest:
        """What a prefill worker is asked, for one attempt."""
        return PrefillRequest(
            request_id=request_id,
            prompt=list(self.token_ids),
            max_tokens=self.max_tokens,
            deadline_s=self.remaining_s,
            sampling=self.sampling,
        )

    def to_answer(self, request_id: str, tickets: Sequence[Ticket] = ()) -> DecodeRequest:
        """What a decode worker is asked, for one attempt."""
        return DecodeRequest(
            request_id=request_id,
            tickets=[ticket.to_params() for ticket in tickets],
            prompt_count=len(self.token_ids),
            max_tokens=self.max_tokens,
            deadline_s=self.remaining_s,
            sampling=self.sampling,
        )


class Answers(Protocol):
    """What the front needs of a router."""

    async def whole(self, prompt: Prompt, read: Callable[[AsyncIterator[Step]], Awaitable[Result]]) -> Result:
        """What `read` makes of the answer, of which it may take as much as it wants. Raises AttemptError.

        It is called again for every attempt.
        """

    async def stream(self, prompt: Prompt) -> Stream:
        """The answer, once its first token is there. Raises AttemptError until then, and the stream after that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """See `Answers`."""

    attempt: Callable[[str, Prompt, set[Hashable]], AsyncGenerator[Step, None]]
    """The steps of one attempt, from its id, which nobody else knows, and the workers that it should avoid."""
    retried: Callable[[str], None] = lambda kind: None
    """Is told why another attempt follows."""
    attempts_max: int = 3

    async def whole(self, prompt: Prompt, read: Callable[[AsyncIterator[Step]], Awaitable[Result]]) -> Result:
        async def attempt(steps: AsyncGenerator[Step, None]) -> Result:
            async with aclosing(steps):
                return await read(steps)

        return await before(prompt.deadline, self._tried(prompt, attempt))

    async def stream(self, prompt: Prompt) -> Stream:
        async def attempt(steps: AsyncGenerator[Step, None]) -> Stream:
            try:
                return Stream(prompt=prompt, first=await anext(steps), rest=steps)
            except BaseException:
                await steps.aclose()
                raise

        return await before(prompt.deadline, self._tried(prompt, attempt))

    async def _tried(
        self, prompt: Prompt, attempt: Callable[[AsyncGenerator[Step, None]], Awaitable[Result]]
    ) -> Result:
        """The result of the first attempt that succeeds."""
        avoid: set[Hashable] = set()
        number = 1
        while True:
            try:
                # Each attempt has its own id: an earlier one's blocks may still be on offer.
                attempt_id = f"{prompt.id}-{number}-{secrets.token_hex(16)}"
                return await attempt(self.attempt(attempt_id, prompt, avoid))
            except AttemptError as error:
                if number == self.attempts_max or not STATUS[error.failure.kind].retry:
                    raise
                logger.info("request %s, attempt %s: %s", prompt.id, number, error)
                self.retried(error.failure.kind)
                if error.worker is not None:
                    avoid.add(error.worker)
                number += 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Stream:
    """An answer whose first token is there. Close it when nobody wants the rest."""

    prompt: Prompt
    first: Step
    rest: AsyncGenerator[Step, None]

    async def steps(self) -> AsyncGenerator[Step, None]:
        """All steps, once. Raises AttemptError."""
        step = self.first
        yield step
        while step.finish_reason is None:
            step = await before(self.prompt.deadline, anext(self.rest))
            yield step

    async def aclose(self) -> None:
        await self.rest.aclose()


class PrefillWorker(Protocol):
    """The prefill worker that was picked for an attempt."""

    @property
    def introduction(self) -> Ticket:
        """Where its blocks are to be had."""

    async def ask(self, request: PrefillRequest) -> PrefillReply:
        """Have a prompt computed; what it answers after the first step says no more. Raises AttemptError."""

    def give_up(self, request_id: str) -> None:
        """Nobody is going to load it."""


Decoding = Callable[[DecodeRequest], AbstractAsyncContextManager[AsyncGenerator[Step | Again, None]]]
"""The steps of an answer; entering it waits until there is room for them. Both raise AttemptError."""


async def hand_over(
    request_id: str, prompt: Prompt, prefills: Sequence[PrefillWorker], decoding: Decoding, start_task: StartTask
) -> AsyncGenerator[Step, None]:
    """One attempt: the prompt is computed by the one worker, while the other one loads it and goes on from there.

    If the blocks do not come the decode worker says so, keeps its own, and the next prefill worker is asked.

    The decode worker is asked first, and the prefill worker once that has room for the answer, for the reason that
    `DecodeWorker.decode` gives.
    """
    if prompt.max_tokens == 1:
        yield (await prefills[0].ask(prompt.to_compute(request_id))).step
        return
    tickets = [Ticket.rendezvous(one.introduction, request_id, ttl_s=prompt.remaining_s) for one in prefills]
    async with decoding(prompt.to_answer(request_id, tickets)) as steps, aclosing(steps):
        for number, prefill in enumerate(prefills, 1):
            asked = asyncio.create_task(prefill.ask(prompt.to_compute(request_id)), name=f"prefill {request_id}")
            try:
                first = await _first_step(asked, steps, last=number == len(prefills))
            except BaseException:
                prefill.give_up(request_id)
                raise
            # The prefill worker's own answer comes when it likes, and says no more.
            start_task(_over(asked, prompt), f"prefill {request_id}")
            if isinstance(first, Step):
                break
            logger.info("request %s: its blocks did not come: %s", request_id, first.again)
            prefill.give_up(request_id)
        assert isinstance(first, Step), "no Again follows the last ticket"
        yield first
        async for step in steps:
            assert isinstance(step, Step), "the blocks are there"
            yield step


async def _first_step(
    asked: asyncio.Task[PrefillReply], steps: AsyncGenerator[Step | Again, None], *, last: bool
) -> Step | Again:
    """The first step, or the first failure of either worker, which ends both.

    Unless this prefill worker is the last one, its failure is the decode worker's to find: it asks for the next one.
    """
    first = asyncio.create_task(_next(steps), name="first step")
    try:
        await asyncio.wait((asked, first), return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and (last or not _leads_on(asked)):
            asked.result()
        return await first
    except BaseException:
        asked.cancel()
        first.cancel()
        await asyncio.gather(asked, first, return_exceptions=True)
        raise


def _leads_on(asked: asyncio.Task[PrefillReply]) -> bool:
    """Whether a prefill worker has failed in a way in which another one need not."""
    error = asked.exception()
    return isinstance(error, AttemptError) and STATUS[error.failure.kind].retry


async def _next(steps: AsyncGenerator[Step | Again, None]) -> Step | Again:
    return await anext(steps)


async def _over(asked: asyncio.Task[PrefillReply], prompt: Prompt) -> None:
    """Wait for an answer that nobody needs; nor does it count how it ends."""
    with suppress(AttemptError, TimeoutError):
        async with asyncio.timeout_at(prompt.deadline):
            await asked


async def before(deadline: float, result: Awaitable[Result]) -> Result:
    """Wait for the result, but not longer than the request may take. Raises AttemptError."""
    try:
        async with asyncio.timeout_at(deadline):
            return await result
    except TimeoutError:
        failure = Failure(kind=FailureKind.DEADLINE, message="the request's deadline has passed")
        raise AttemptError(failure) from None
