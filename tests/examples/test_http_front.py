"""The example of an HTTP front: two processes, real NIXL, real HTTP and signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import httpx2
import pytest
from tiny_model import EXAMPLES

import kvflow
from tests.support.hand_overs import free_ports

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]
TOKENS = list(range(41))


@contextlib.asynccontextmanager
async def front(role: str) -> AsyncIterator[tuple[Process, httpx2.AsyncClient]]:
    """Yield the process of one engine, and a client of its port."""
    port = free_ports(1)
    command = (sys.executable, str(EXAMPLES / "http_front.py"), role, "--port", str(port))
    process = await asyncio.create_subprocess_exec(*command, stderr=PIPE)
    try:
        assert process.stderr is not None
        while b"Uvicorn running" not in (line := await process.stderr.readline()):
            assert line, "the process has ended"
        async with httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=200) as client:
            yield process, client
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.communicate()


async def hang_up(client: httpx2.AsyncClient, path: str, body: object) -> None:
    """Send a request, and close the connection before the answer."""
    _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    text = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write(head.encode() + text)
    await writer.drain()
    writer.close()
    await writer.wait_closed()


async def test_hand_over_hang_up_and_sigterm() -> None:
    async with front("prefill") as (prefilling, prefill), front("decode") as (decoding, decode):

        async def hand_over(name: str) -> httpx2.Response:
            prompt = {"request_id": name, "tokens": TOKENS}
            ticket = (await prefill.post("/prefill", json=prompt)).json()
            return await decode.post("/decode", json=prompt | {"ticket": ticket})

        for client in (prefill, decode):
            assert (await client.get("/health")).status_code == 200
        for number in range(30):  # more blocks than the engine has: all come back
            assert (await hand_over(f"request-{number}")).json() == {"sum": float(sum(TOKENS))}

        # Loads that wait for an offer that no engine makes end when their clients hang up, and give back their blocks.
        ticket = (await prefill.post("/prefill", json={"request_id": "known", "tokens": TOKENS})).json()
        never = kvflow.Ticket.rendezvous(ticket, kvflow.secret_id("never"), ttl_s=600.0).to_params()
        for _ in range(30):
            await hang_up(decode, "/decode", {"request_id": "waits", "tokens": TOKENS, "ticket": never})
        while (answer := await hand_over("after")).status_code == 503:
            pass
        assert answer.status_code == 200

        mixed_up = {"request_id": "known", "tokens": TOKENS[1:], "ticket": ticket}
        refused = await decode.post("/decode", json=mixed_up)
        assert (refused.status_code, refused.text) == (400, "PromptMismatch")

        for process in (decoding, prefilling):
            process.terminate()
        said = [await process.communicate() for process in (decoding, prefilling)]
        assert all(b"Application shutdown complete" in text for _, text in said)
        assert [process.returncode for process in (decoding, prefilling)] == [-signal.SIGTERM] * 2
