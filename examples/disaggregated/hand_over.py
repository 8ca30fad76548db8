"""The router's work for one request: prompt to the prefill engine, ticket to the decode engine, tokens to the user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import kvflow
from disaggregated.engines import ANSWER_TIMEOUT_S, EngineProcesses
from disaggregated.messages import AnswerRequest, Generate
from disaggregated.worker import Loaded


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOver:
    """An answer by two engines, and the reports of its hand-over."""

    token_ids: list[int]
    loaded: list[Loaded]
    """Report of the load of each rank of the decode engine."""
    outcomes: list[str]
    """Outcome of the lease of each rank of the prefill engine."""


async def hand_over(
    prefill: EngineProcesses,
    decode: EngineProcesses,
    *,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    show: Callable[[int], None] | None = None,
) -> HandOver:
    """Answer the prompt with two engines. Call `show` with each token as it arrives."""
    request = AnswerRequest(request_id=request_id, prompt=prompt, max_tokens=max_tokens, deadline_s=ANSWER_TIMEOUT_S)
    async with aclosing(prefill.call(request.prefill_request())) as offered:
        # Each rank of the prefill engine offers its part of the cache; the decode engine gets one ticket for all parts.
        ticket = kvflow.merge_tickets([kvflow.Ticket.from_params(ticket) for ticket in await anext(offered)])
        token_ids: list[int] = []
        async with aclosing(decode.call(request.decode_request(ticket.to_params()))) as answers:
            loaded = await anext(answers)
            async for tokens in answers:
                token_ids.append(decode.common(tokens))
                if show is not None:
                    show(token_ids[-1])
        (outcomes,) = [outcomes async for outcomes in offered]
    return HandOver(token_ids=token_ids, loaded=loaded, outcomes=outcomes)


async def answer_alone(engine: EngineProcesses, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the answer of one engine without a hand-over."""
    async with aclosing(engine.call(Generate(prompt=prompt, max_tokens=max_tokens))) as answers:
        return [engine.common(tokens) async for tokens in answers]
