"""The router's work for one request: prompt to the prefill engine, ticket to the decode engine, tokens to the user."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import kvflow
from disaggregated.engines import EngineProcesses
from disaggregated.messages import DecodeRequest, Generate, Loaded, Offered, PrefillRequest, Released
from disaggregated.router import ANSWER_TIMEOUT_S


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
    show: Callable[[int], None],
) -> HandOver:
    """Answer the prompt with two engines. Call `show` with each token as it arrives."""
    await prefill.send(PrefillRequest(request_id=request_id, prompt=prompt, deadline_s=ANSWER_TIMEOUT_S))
    offers = await prefill.expect(Offered)
    # Each rank of the prefill engine offers its part of the cache; the decode engine gets one ticket for all parts.
    ticket = kvflow.merge_tickets([kvflow.Ticket.from_params(offer.ticket) for offer in offers])
    await decode.send(
        DecodeRequest(
            request_id=request_id,
            ticket=ticket.to_params(),
            prompt_count=len(prompt),
            max_tokens=max_tokens,
            deadline_s=ANSWER_TIMEOUT_S,
        )
    )
    loaded = await decode.expect(Loaded)
    token_ids: list[int] = []
    async with aclosing(decode.tokens()) as tokens:
        async for token in tokens:
            show(token)
            token_ids.append(token)
    released = await prefill.expect(Released)
    return HandOver(token_ids=token_ids, loaded=loaded, outcomes=[rank.outcome for rank in released])


async def answer_alone(engine: EngineProcesses, prompt: list[int], max_tokens: int) -> list[int]:
    """Return the answer of one engine without a hand-over."""
    await engine.send(Generate(prompt=prompt, max_tokens=max_tokens))
    async with aclosing(engine.tokens()) as tokens:
        return [token async for token in tokens]
