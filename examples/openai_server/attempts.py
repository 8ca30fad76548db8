"""An answer by attempts: each starts over with other workers until one gives a first token; one deadline covers all.

What fails later is the client's to handle: it has seen a part of the answer. How an attempt is made its owner says:
`router`, by HTTP, and `ray_server.ingress`, by a call of Ray's.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from disaggregated.messages import DecodeRequest, Failure, FailureKind, PrefillRequest, Step
from paged_engine import GREEDY, Sampling

from openai_server.failures import STATUS

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

ATTEMPTS_MAX = 3


class AttemptError(Exception):
    """An attempt failed; the next one should avoid `worker`."""

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

    @property
    def remaining_s(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.001)

    def to_compute(self, request_id: str, neighbours: Sequence[str] = ()) -> PrefillRequest:
        """Return what a prefill worker is asked in one attempt."""
        return PrefillRequest(
            request_id=request_id,
            prompt=list(self.token_ids),
            deadline_s=self.remaining_s,
            sampling=self.sampling,
            neighbours=list(neighbours),
        )

    def to_answer(self, request_id: str, offered: dict[str, Any] | None = None) -> DecodeRequest:
        """Return what a decode worker is asked in one attempt; `offered` is the prefill worker's ticket."""
        return DecodeRequest(
            request_id=request_id,
            ticket=offered or {},
            prompt_count=len(self.token_ids),
            max_tokens=self.max_tokens,
            deadline_s=self.remaining_s,
            sampling=self.sampling,
        )


Attempt = Callable[[str, Prompt, set[Hashable]], AsyncGenerator[Step, None]]
"""Yields the steps of one attempt: of a request id that no other attempt has, avoiding these workers."""


async def answer(prompt: Prompt, attempt: Attempt, retried: Callable[[str], None]) -> AsyncGenerator[Step, None]:
    """Yield the steps of the first attempt that gives one. Raises AttemptError.

    Arguments:
        retried: called with the kind of each failure that another attempt follows.
    """
    avoid: set[Hashable] = set()
    for number in range(1, ATTEMPTS_MAX + 1):
        # Each attempt has its own id: an earlier one's blocks may still be on offer.
        async with aclosing(attempt(f"{prompt.id}-{number}-{secrets.token_hex(16)}", prompt, avoid)) as steps:
            try:
                step = await before(prompt.deadline, anext(steps))
            except AttemptError as error:
                if number == ATTEMPTS_MAX or not STATUS[error.failure.kind].retry:
                    raise
                logger.info("request %s, attempt %s: %s", prompt.id, number, error)
                retried(error.failure.kind)
                avoid.add(error.worker)
                continue
            yield step
            while step.finish_reason is None:
                step = await before(prompt.deadline, anext(steps))
                yield step
            return


async def before(deadline: float, result: Awaitable[Result]) -> Result:
    """Wait for the result until the request's deadline. Raises AttemptError."""
    try:
        async with asyncio.timeout_at(deadline):
            return await result
    except TimeoutError:
        failure = Failure(kind=FailureKind.DEADLINE, message="the request's deadline has passed")
        raise AttemptError(failure) from None
