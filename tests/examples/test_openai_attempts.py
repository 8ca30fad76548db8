"""Attempts of the example server: when another one follows, and whom it avoids."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Hashable

from disaggregated.messages import Failure, FailureKind, Step
from openai_server.attempts import AttemptError, Attempts, Prompt

LOST = Failure(kind=FailureKind.WORKER_LOST, message="lost")


def prompt(remaining_s: float = 60.0) -> Prompt:
    return Prompt(id="r", token_ids=[1], max_tokens=2, deadline=asyncio.get_running_loop().time() + remaining_s)


class Scripted:
    """Attempts that fail one after the other, then one that succeeds."""

    def __init__(self, *errors: AttemptError) -> None:
        self._errors = list(errors)
        self.ids: list[str] = []
        self.avoided: list[set[Hashable]] = []

    async def attempt(self, request_id: str, _: Prompt, avoid: set[Hashable]) -> AsyncGenerator[Step, None]:
        self.ids.append(request_id)
        self.avoided.append(set(avoid))
        if self._errors:
            raise self._errors.pop(0)
        yield Step(token=1)
        yield Step(token=2, finish_reason="length")


async def test_each_attempt_has_an_id_of_its_own_and_avoids_who_has_failed() -> None:
    scripted, told = Scripted(AttemptError(LOST, "a"), AttemptError(LOST)), list[str]()
    stream = await Attempts(attempt=scripted.attempt, retried=told.append).stream(prompt())
    assert [step.token async for step in stream.steps()] == [1, 2]
    assert scripted.avoided == [set(), {"a"}, {"a"}]
    assert len(set(scripted.ids)) == 3
    assert told == [FailureKind.WORKER_LOST, FailureKind.WORKER_LOST]
