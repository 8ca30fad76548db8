"""What a router does for each request: prompt to the one engine, ticket to the other, tokens to the user."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import kvflow
from disaggregated.engines import EngineProcesses
from disaggregated.messages import DecodeRequest, Generate, Loaded, Prefilled, PrefillRequest, Released
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
    request = PrefillRequest(request_id=request_id, prompt=prompt, max_tokens=max_tokens, deadline_s=ANSWER_TIMEOUT_S)
    await prefill.send(request)
    prefilled = await prefill.expect(Prefilled)
    show(prefill.agreed([rank.token for rank in prefilled]))
    await decode.send(
        DecodeRequest(
            request_id=request_id,
            tickets=[_one_ticket([rank.ticket for rank in prefilled])],
            prompt_count=len(prompt),
            max_tokens=max_tokens,
            deadline_s=ANSWER_TIMEOUT_S,
        )
    )
    loaded = await decode.expect(Loaded)
    token_ids: list[int] = []
    async with aclosing(decode.tokens()) as tokens:
        async for token in tokens:
            if token_ids:  # the first one is shown, and came with the blocks
                show(token)
            token_ids.append(token)
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
