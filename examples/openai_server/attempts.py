"""An answer by attempts, each with other workers, until an attempt gives a first token. One deadline covers them all.

After the first token a failure goes to the client, which has already seen a part of the answer. The caller provides the
way to make an attempt: `router` by HTTP, `ray_server.ingress` by a call to a Ray handle.
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
    """An attempt failed. The next attempt should avoid `worker`; None if no worker is at fault."""

    def __init__(self, failure: Failure, worker: Hashable | None = None) -> None:
        super().__init__(failure.message)
        self.failure = failure
        self.worker = worker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One request as the router sees it. `deadline` is a time of the event loop's clock."""

    id: str
    token_ids: Sequence[int]
    max_tokens: int
    deadline: float
    sampling: Sampling = GREEDY

    @property
    def remaining_s(self) -> float:
        return max(self.deadline - asyncio.get_running_loop().time(), 0.001)

    def prefill_request(self, request_id: str, neighbours: Sequence[str] = ()) -> PrefillRequest:
        """Return the request of one attempt to a prefill worker."""
        return PrefillRequest(
            request_id=request_id,
            prompt=list(self.token_ids),
            deadline_s=self.remaining_s,
            sampling=self.sampling,
            neighbours=list(neighbours),
        )

    def decode_request(self, request_id: str, offered: dict[str, Any] | None = None) -> DecodeRequest:
        """Return the request of one attempt to a decode worker. `offered` is the prefill worker's ticket."""
        return DecodeRequest(
            request_id=request_id,
            ticket=offered or {},
            prompt_count=len(self.token_ids),
            max_tokens=self.max_tokens,
            deadline_s=self.remaining_s,
            sampling=self.sampling,
        )


Attempt = Callable[[str, Prompt, set[Hashable]], AsyncGenerator[Step, None]]
"""A function that makes one attempt, and yields its steps.

It gets a request id that no other attempt has, the prompt, and the workers to avoid.
"""


async def answer(prompt: Prompt, attempt: Attempt, retried: Callable[[str], None]) -> AsyncGenerator[Step, None]:
    """Make attempts until one gives a step, and yield its steps. Raises AttemptError.

    `retried` is called with the kind of each failure after which another attempt is made.
    """
    avoid: set[Hashable] = set()
    for number in range(1, ATTEMPTS_MAX + 1):
        # Each attempt has its own request id, because blocks of an earlier attempt may still be on offer.
        async with aclosing(attempt(f"{prompt.id}-{number}-{secrets.token_hex(16)}", prompt, avoid)) as steps:
            try:
                step = await await_before(prompt.deadline, anext(steps))
            except AttemptError as error:
                if number == ATTEMPTS_MAX or not STATUS[error.failure.kind].retry:
                    raise
                logger.info("request %s, attempt %s: %s", prompt.id, number, error)
                retried(error.failure.kind)
                avoid.add(error.worker)
                continue
            yield step
            while step.finish_reason is None:
                step = await await_before(prompt.deadline, anext(steps))
                yield step
            return


async def await_before(deadline: float, result: Awaitable[Result]) -> Result:
    """Await `result` and return it. Raises AttemptError once the request's deadline has passed."""
    try:
        async with asyncio.timeout_at(deadline):
            return await result
    except TimeoutError:
        failure = Failure(kind=FailureKind.DEADLINE, message="the request's deadline has passed")
        raise AttemptError(failure) from None
