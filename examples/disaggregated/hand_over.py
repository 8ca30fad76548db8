"""What a router does for each request: prompt to the one engine, ticket to the other, tokens to the user."""

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
    """An answer that two engines gave together, and how the KV cache went from one to the other."""

    token_ids: list[int]
    loaded: list[Loaded]
    """What each rank of the decode engine has loaded."""
    outcomes: list[str]
    """How the lease of each rank of the prefill engine has ended."""


async def hand_over(
    prefill: EngineProcesses,
    decode: EngineProcesses,
    *,
    request_id: str,
    prompt: list[int],
    max_tokens: int,
    show: Callable[[int], None],
) -> HandOver:
    """Answer the prompt with two engines; `show` gets each token as soon as it is known."""
    await prefill.send(PrefillRequest(request_id=request_id, prompt=prompt, deadline_s=ANSWER_TIMEOUT_S))
    offers = await prefill.expect(Offered)
    # Each rank of the prefill engine offers its own part; a decode engine takes one ticket of all of them.
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
    """One engine's answer without hand-over."""
    await engine.send(Generate(prompt=prompt, max_tokens=max_tokens))
    async with aclosing(engine.tokens()) as tokens:
        return [token async for token in tokens]
