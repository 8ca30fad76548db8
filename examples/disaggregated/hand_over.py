"""What a router does for each request: prompt to the one engine, ticket to the other, tokens to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import kvflow
from disaggregated.engines import EngineProcesses
from disaggregated.messages import Decode, Generate, Loaded, Prefill, Prefilled, Released


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
    await prefill.send(Prefill(request_id=request_id, prompt=prompt))
    prefilled = await prefill.expect(Prefilled)
    first = prefill.agreed([rank.token for rank in prefilled])
    show(first)
    await decode.send(
        Decode(
            request_id=request_id,
            prompt_count=len(prompt),
            token=first,
            ticket=_one_ticket([rank.ticket for rank in prefilled]),
            max_tokens=max_tokens - 1,
        )
    )
    loaded = await decode.expect(Loaded)
    token_ids = [first]
    async with aclosing(decode.tokens()) as tokens:
        async for token in tokens:
            token_ids.append(token)
            show(token)
    released = await prefill.expect(Released)
    return HandOver(token_ids=token_ids, loaded=loaded, outcomes=[rank.outcome for rank in released])


async def answer_alone(engine: EngineProcesses, prompt: list[int], max_tokens: int) -> list[int]:
    """One engine's answer without hand-over."""
    await engine.send(Generate(prompt=prompt, max_tokens=max_tokens))
    async with aclosing(engine.tokens()) as tokens:
        return [token async for token in tokens]


def _one_ticket(tickets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Each rank of the prefill engine offers its own part; the decode engine wants to know all of them."""
    return kvflow.merge_tickets([kvflow.Ticket.from_params(ticket) for ticket in tickets]).to_params()
