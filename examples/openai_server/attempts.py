"""An answer by attempts, each with other workers, until an attempt gives a first token. One deadline covers them all.

After the first token a failure goes to the client, which has already seen a part of the answer. The caller provides the
way to make an attempt: `router` by HTTP, `ray_server.ingress` by a call to a Ray handle.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from contextlib import aclosing
from typing import TypeVar

import msgspec
from disaggregated.messages import AnswerRequest, Failure, FailureKind, Step

from openai_server.failures import STATUS

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ATTEMPTS_MAX = 3


class AttemptError(Exception):
    """An attempt failed. The next attempt should avoid `worker`; None if no worker is at fault."""

    def __init__(self, failure: Failure, worker: Hashable | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.worker = worker


Attempt = Callable[[AnswerRequest, set[Hashable]], AsyncGenerator[Step, None]]
"""A function that makes one attempt, and yields its steps.

It gets the request with an id that no other attempt has, and the workers to avoid.
"""


async def answer(
    request: AnswerRequest, attempt: Attempt, retried: Callable[[str], None]
) -> AsyncGenerator[Step, None]:
    """Make attempts until one gives a step, and yield its steps. Raises AttemptError.

    `retried` is called with the kind of each failure after which another attempt is made.
    """
    deadline = asyncio.get_running_loop().time() + request.deadline_s
    avoid: set[Hashable] = set()
    for number in range(1, ATTEMPTS_MAX + 1):
        # Each attempt has its own request id, because blocks of an earlier attempt may still be on offer.
        this = renamed(request, f"{request.request_id}-{number}", deadline)
        async with aclosing(attempt(this, avoid)) as steps:
            try:
                step = await await_before(deadline, anext(steps))
            except AttemptError as error:
                if number == ATTEMPTS_MAX or not STATUS[error.failure.kind].retry:
                    raise
                logger.info("request %s, attempt %s: %s", request.request_id, number, error)
                retried(error.failure.kind)
                avoid.add(error.worker)
                continue
            yield step
            while step.finish_reason is None:
                step = await await_before(deadline, anext(steps))
                yield step
            return


def renamed(request: AnswerRequest, request_id: str, deadline: float) -> AnswerRequest:
    """Return the request with another id, and with the time that is left to `deadline`, a time of the loop's clock."""
    remaining_s = max(deadline - asyncio.get_running_loop().time(), 0.001)
    return msgspec.structs.replace(request, request_id=request_id, deadline_s=remaining_s)


async def await_before(deadline: float, result: Awaitable[Result]) -> Result:
    """Await `result` and return it. Raises AttemptError once the request's deadline has passed."""
    try:
        async with asyncio.timeout_at(deadline):
            return await result
    except TimeoutError:
        failure = Failure(kind=FailureKind.DEADLINE, message="the request's deadline has passed")
        raise AttemptError(failure) from None
