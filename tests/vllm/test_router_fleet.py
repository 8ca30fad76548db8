"""vLLM's own router in front of two prefill and two decode servers: it routes by KV events, and servers are killed.

A request may fail if its server dies. Every answer is right, and after a while the remaining servers answer all.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import httpx
import pytest
import zmq
import zmq.asyncio

from kvflow.prefix.kv_events import BlockRemoved, BlockStored, Publisher
from kvflow.prefix.kv_events.batches import KVEvent, decode_batch
from tests.support.ports import free_port
from tests.support.traffic import Traffic
from tests.vllm.servers import MODELS, Server, Setup
from tests.vllm.test_failures import LOADS, until_free
from tests.vllm.test_hand_over import ENDED
from tests.vllm.test_models import BLOCK_SIZE, OPTIONS, prompt_of
from tests.vllm.test_router import ALONE, completion, received, router, until

ROUTED_BLOCK = 16
"""Tokens of a block in the events that this router matches prompts with; in this mode no option changes it."""
OFTEN = ("--health-check-interval-secs", "1", "--health-failure-threshold", "1", "--retry-max-retries", "3")
HITS = "vllm:prefix_cache_hits_total"
CREDITED = "vllm_router_pd_credited_prefix_tokens_total"

_seeds = itertools.count(1)


@dataclass
class Fleet:
    prefills: list[Server] = field(default_factory=list)
    decodes: list[Server] = field(default_factory=list)
    events: dict[int, str] = field(default_factory=dict)
    """Where a prefill server publishes its events, by its port."""

    @property
    def servers(self) -> list[Server]:
        return [*self.prefills, *self.decodes]


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """Four servers of a tiny model. The decode side computes a prompt after a failed load."""
    made = Fleet()
    tiny = Setup(role="kv_consumer", core=1, model=MODELS / "full", options=OPTIONS, policy="recompute")
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            port = free_port()
            events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": f"tcp://*:{port}"}
            options = (*OPTIONS, "--kv-events-config", json.dumps(events))
            extra = (*tiny.extra, ("lease_ttl_s", 5.0))
            server = Server.start(replace(tiny, role="kv_producer", core=0, options=options, extra=extra))
            made.prefills.append(server)
            made.decodes.append(Server.start(tiny))
            made.events[server.port] = f"tcp://127.0.0.1:{port}"
        for server in made.servers:
            stack.callback(lambda server=server: server.alive and server.stop())
        for server in made.servers:
            server.wait_up()
        yield made


def prompts(count: int) -> list[list[int]]:
    """Return new prompts."""
    return [prompt_of(60 + 20 * number, seed=next(_seeds)) for number in range(count)]


def endless() -> Iterator[list[int]]:
    while True:
        yield from prompts(8)


def half_names(name: int | bytes) -> list[bytes]:
    """Names of the two halves of a block."""
    whole = name if isinstance(name, bytes) else name.to_bytes(8, "big")
    return [whole + b"a", whole + b"b"]


def in_halves(event: KVEvent) -> KVEvent:
    """The same event, in blocks of half the size."""
    if isinstance(event, BlockStored):
        parent = event.parent_block_hash
        return BlockStored(
            block_hashes=[half for name in event.block_hashes for half in half_names(name)],
            parent_block_hash=None if parent is None else half_names(parent)[1],
            token_ids=event.token_ids,
            block_size=event.block_size // 2,
            medium=event.medium,
        )
    if isinstance(event, BlockRemoved):
        return BlockRemoved(
            block_hashes=[half for name in event.block_hashes for half in half_names(name)], medium=event.medium
        )
    return event


@contextlib.asynccontextmanager
async def published_in_halves(endpoint: str) -> AsyncIterator[Publisher]:
    """kvflow's publisher of what a server publishes in blocks that are twice as large."""

    async def relay(socket: zmq.asyncio.Socket, publisher: Publisher) -> None:
        while True:
            *_, payload = await socket.recv_multipart()
            publisher.publish([in_halves(event) for event in decode_batch(payload)])

    with zmq.asyncio.Context.instance().socket(zmq.SUB) as socket:
        socket.connect(endpoint)
        socket.subscribe(b"")
        async with Publisher("tcp://127.0.0.1:0") as publisher:
            task = asyncio.create_task(relay(socket, publisher))
            try:
                yield publisher
            finally:
                task.cancel()
                await asyncio.wait([task])


def credited(port: int) -> float:
    """Prompt tokens that the router takes for cached where it has sent them."""
    lines = httpx.get(f"http://127.0.0.1:{port}/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(CREDITED))


def test_prompts_go_where_events_say_that_their_prefix_is(fleet: Fleet) -> None:
    """vLLM's own events here have blocks of 32, which the router cannot use: the test publishes them in halves."""
    assert BLOCK_SIZE == 2 * ROUTED_BLOCK

    async def go() -> None:
        async with contextlib.AsyncExitStack() as stack:
            places = {}
            for server in fleet.prefills:
                publisher = await stack.enter_async_context(published_in_halves(fleet.events[server.port]))
                places[server] = publisher.endpoint
            await asyncio.to_thread(routed_by, fleet, places)

    asyncio.run(go())


def test_prompts_are_spread_if_events_have_other_blocks(fleet: Fleet) -> None:
    with pytest.raises(AssertionError, match="nothing is credited"):
        routed_by(fleet, {server: fleet.events[server.port] for server in fleet.prefills}, patience_s=5.0)


def routed_by(fleet: Fleet, endpoints: dict[Server, str], patience_s: float = 60.0) -> None:
    """Fail unless a router that follows these events sends all prompts where their prefix is."""
    port = free_port()
    options = [word for server, place in endpoints.items() for word in ("--pd-kv-events", f"{server.url}={place}")]
    with router(
        fleet.prefills, fleet.decodes, "--prefill-policy", "kv_aware", "--prometheus-port", str(port), *options
    ) as client:
        for server in fleet.prefills:
            deadline_s = time.monotonic() + patience_s
            while True:  # the router may not have heard of a prefix yet, and sends it to the other one
                prefix = prompt_of(10 * BLOCK_SIZE, seed=next(_seeds))
                asked = [[*prefix, *prompt_of(40, seed=next(_seeds))] for _ in range(5)]
                server.ids(asked.pop(), 1)
                before, hits = credited(port), hits_of(fleet.prefills)
                answers = [ask(client, asked[0])]
                if credited(port) > before:
                    break
                assert time.monotonic() < deadline_s, "nothing is credited"
            with received(fleet.decodes):
                answers += [ask(client, prompt) for prompt in asked[1:]]
            assert credited(port) - before == len(asked) * len(prefix)
            for one, then in zip(fleet.prefills, hits, strict=True):
                hit = then + len(asked) * len(prefix) * (one is server)
                one.wait_metric(HITS, hit)
                assert one.metric(HITS) == hit
            assert answers == [(200, server.ids(prompt, 8, **ALONE)) for prompt in asked]


def hits_of(servers: Iterable[Server]) -> list[float]:
    return [server.metric(HITS) for server in servers]


def ask(client: httpx.Client, prompt: Sequence[int], tokens: int = 8) -> tuple[int, list[int]]:
    """Status and tokens of an answer."""
    body = completion(list(prompt), tokens, return_token_ids=True, ignore_eos=True)
    answer = client.post("/v1/completions", json=body)
    return answer.status_code, answer.json()["choices"][0]["token_ids"] if answer.status_code == 200 else []


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_one_of_two_is_killed_under_traffic(fleet: Fleet, role: str) -> None:
    """Every answer is right; after a while the remaining servers answer all requests, and receive their prompts."""
    side = fleet.prefills if role == "prefill" else fleet.decodes
    with router(fleet.prefills, fleet.decodes, *OFTEN) as client:
        with Traffic(lambda prompt: ask(client, prompt, 24), endless()) as traffic:
            traffic.until_answered(8)
            assert all(server.metric(LOADS) for server in fleet.decodes), "one was left out: this would show little"
            victim = side.pop(0)
            killed_s = time.monotonic()
            victim.kill()
            traffic.until_answered(12, killed_s)
        traffic.check(role, killed_s, lambda prompt: fleet.prefills[0].ids(prompt, 24, **ALONE))
        wanted = prompts(8)
        read = sum(server.metric(ENDED, outcome="read") for server in fleet.prefills)
        with received(fleet.decodes, sum(map(len, wanted))), ThreadPoolExecutor(4) as clients:
            for prompt, found in zip(wanted, clients.map(lambda prompt: ask(client, prompt), wanted), strict=True):
                assert found == (200, fleet.prefills[0].ids(prompt, 8, **ALONE))
        until(
            lambda: sum(server.metric(ENDED, outcome="read") for server in fleet.prefills) == read + len(wanted),
            "not all leases of those that are left were read",
        )
    for server in fleet.servers:
        until(lambda server=server: server.metric("vllm:num_requests_running") == 0, "requests go on")
        until_free(server)
        assert server.metric("vllm:kvflow_late_reads_total") == 0
