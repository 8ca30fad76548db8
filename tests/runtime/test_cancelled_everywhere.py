"""The verbs of growth, rendezvous, checksums and keeping, cancelled at every moment: nothing is left, and all go on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from kvflow import LeaseOutcome, LoadRequest, ServeRequest, Ticket
from kvflow.errors import KVFlowError
from kvflow.limits import QUESTION_WAIT_S
from kvflow.runtime.load.load import Load
from kvflow.testing import InprocPair, assert_quiet, cancel_everywhere
from tests.support.growing_pairs import BLOCKS, CONFIG, TAKEN, pair_of
from tests.support.pairs import host_of
from tests.support.tests_support import limited

GROWING = {"computed_tokens": 0, "extends": True, "payload": True}
Verb = Callable[[InprocPair, list[Load]], Coroutine[Any, Any, object]]


def load_request(pair: InprocPair, ticket: Ticket, **more: Any) -> LoadRequest:
    return LoadRequest("cancelled", ticket.to_params(), TAKEN, **more)


def met(pair: InprocPair) -> Ticket:
    hello = pair.producer.runtime.introduce()
    return Ticket.rendezvous(hello, "req")


async def prefill(pair: InprocPair) -> None:
    """A prompt that comes in steps, with more blocks, an end and a payload."""
    await asyncio.sleep(0.05)
    lease = pair.producer.runtime.serve_blocks(ServeRequest("req", BLOCKS[:1], 16, **GROWING))
    for computed, known in ((1, 3), (3, 4), (4, 4)):
        await asyncio.sleep(0.05)
        lease.advance(4 * computed)
        if computed < known:
            lease.extend(BLOCKS[computed:known])
    lease.complete(b"token")


async def rendezvous(pair: InprocPair, loads: list[Load]) -> None:
    """Reads while the prompt is computed, from before it is known on, and compares."""
    async with asyncio.TaskGroup() as group:
        group.create_task(prefill(pair))
        loads.append(pair.consumer.runtime.start_load(load_request(pair, met(pair), verify=True)))
        report = await loads[0]
    assert (report.payload, report.verified) == (b"token", True)


async def awaited(pair: InprocPair, _: list[Load]) -> None:
    """The same in the caller's own task."""
    async with asyncio.TaskGroup() as group:
        group.create_task(prefill(pair))
        await pair.consumer.runtime.load_blocks(load_request(pair, met(pair)))


async def verified(pair: InprocPair, _: list[Load]) -> None:
    """Is read once more, since some bits flip."""
    pair.consumer.transport.faults.flip_next = 1
    lease = pair.offer(BLOCKS, "req")
    await pair.consumer.runtime.load_blocks(load_request(pair, lease.ticket, verify=True))


async def kept(pair: InprocPair, _: list[Load]) -> None:
    """Leases are kept, and given back, of an offer that comes meanwhile."""
    ticket = met(pair)
    with pair.consumer.runtime.keep_leases(ticket):
        await prefill(pair)
        await asyncio.sleep(0.1)
    await pair.consumer.runtime.release_blocks(ticket)


async def prewarmed(pair: InprocPair, _: list[Load]) -> None:
    lease = pair.offer(BLOCKS, "req")
    await pair.consumer.runtime.prewarm([lease.ticket])
    await pair.consumer.runtime.forget_peer("producer")
    await pair.consumer.runtime.load_blocks(load_request(pair, lease.ticket))


async def failed(pair: InprocPair, loads: list[Load]) -> None:
    """The prefill breaks while the load waits for it."""
    lease = pair.producer.runtime.serve_blocks(ServeRequest("req", BLOCKS[:1], 16, **GROWING))
    loads.append(pair.consumer.runtime.start_load(load_request(pair, lease.ticket)))
    await asyncio.sleep(0.05)
    lease.advance(4)
    await asyncio.sleep(0.05)
    lease.fail("out of memory")
    with contextlib.suppress(KVFlowError):
        await loads[0]
    assert await lease is LeaseOutcome.FAILED


@contextlib.asynccontextmanager
async def a_pair(verb: Verb, staging: str) -> AsyncIterator[Coroutine[Any, Any, object]]:
    loads: list[Load] = []
    async with pair_of(staging, cancel_grace_s=5.0, limits=limited(CONFIG, lease_wait_s=0.5).limits) as pair:
        yield verb(pair, loads)
        pair.consumer.transport.faults.flip_next = 0
        consumer, producer = pair.consumer.runtime, pair.producer.runtime
        for load in loads:
            load.cancel()
            await load.settled()
        serving = host_of(producer).serving
        for opened in list(serving._open_leases.values()):
            serving.revoke(opened.entry)
            await opened.outcome
        await asyncio.sleep(QUESTION_WAIT_S + 1.0)  # whoever has asked is gone; it is answered then
        assert serving.lease_answers.waiting == 0
        assert not [task for task in asyncio.all_tasks() if "kvflow-" in task.get_name() and "req" in task.get_name()]
        for runtime in (consumer, producer):
            assert_quiet(runtime.statistics())
        lease = pair.offer(BLOCKS, "after")
        await consumer.load_blocks(replace(pair.wanted(lease, TAKEN), deadline_s=9.0))
        assert await lease is LeaseOutcome.READ
        pair.assert_loaded(TAKEN, BLOCKS)


@pytest.mark.parametrize(
    ("verb", "staging"),
    [
        pytest.param(rendezvous, "always", marks=pytest.mark.thorough),
        (awaited, "never"),
        pytest.param(verified, "never", marks=pytest.mark.thorough),
        (kept, "never"),
        pytest.param(prewarmed, "never", marks=pytest.mark.thorough),
        (failed, "always"),
    ],
)
def test_cancelled_at_every_moment_it_leaves_nothing(verb: Verb, staging: str) -> None:
    moments = cancel_everywhere(partial(a_pair, verb, staging))
    print(f"cancelled at {moments} moments")
    assert moments > 10
