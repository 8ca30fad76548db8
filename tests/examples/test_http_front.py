"""The example of an HTTP front: two processes, real NIXL, real HTTP and signals."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import httpx2
import pytest
from tiny_model import EXAMPLES

import kvflow
from tests.support.hand_overs import free_ports

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(120)]
TOKENS = list(range(41))


@contextlib.asynccontextmanager
async def front(role: str) -> AsyncIterator[tuple[subprocess.Popen[bytes], httpx2.AsyncClient]]:
    """Yield the process of one engine, and a client of its port once it is healthy."""
    port = free_ports(1)
    command = [sys.executable, str(EXAMPLES / "http_front.py"), role, "--port", str(port)]
    with subprocess.Popen(command) as process:  # noqa: ASYNC220 - that it takes a moment disturbs nobody
        try:
            async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
                await until(lambda: healthy(client, process))
                yield process, client
        finally:
            process.kill()


async def healthy(client: httpx2.AsyncClient, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return (await client.get("/health")).status_code == 200
    except httpx2.TransportError:
        return False


async def until(condition: Callable[[], Any]) -> None:
    while not await condition():
        await asyncio.sleep(0.01)


async def test_hand_over_hang_up_and_sigterm() -> None:
    async with front("prefill") as (prefilling, prefill), front("decode") as (decoding, decode):

        async def hand_over(name: str) -> httpx2.Response:
            prompt = {"request_id": name, "tokens": TOKENS}
            ticket = (await prefill.post("/prefill", json=prompt)).json()
            return await decode.post("/decode", json=prompt | {"ticket": ticket})

        for number in range(30):  # more blocks than the engine has: all come back
            assert (await hand_over(f"request-{number}")).json() == {"sum": float(sum(TOKENS))}

        # An offer that no engine makes: the load waits for it, and ends when the client hangs up.
        ticket = (await prefill.post("/prefill", json={"request_id": "known", "tokens": TOKENS})).json()
        never = kvflow.Ticket.rendezvous(ticket, secrets.token_hex(16), ttl_s=60.0).to_params()
        waits = {"request_id": "waits", "tokens": TOKENS, "ticket": never}
        for _ in range(30):
            with pytest.raises(httpx2.ReadTimeout):
                await decode.post("/decode", json=waits, timeout=0.05)
        assert (await hand_over("after")).status_code == 200

        mixed_up = {"request_id": "known", "tokens": TOKENS[1:], "ticket": ticket}
        refused = await decode.post("/decode", json=mixed_up)
        assert (refused.status_code, refused.text) == (400, "PromptMismatch")

        for process in (decoding, prefilling):
            process.terminate()
        assert [await asyncio.to_thread(process.wait, 30) for process in (decoding, prefilling)] == [
            -signal.SIGTERM
        ] * 2
