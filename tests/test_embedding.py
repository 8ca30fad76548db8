"""Programs that are pasted from docs/embedding.md, with faults: every block comes back, once, and in time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from doc_blocks import PAGES, blocks_of, check_blocks
from doc_embedding import BLOCKS, Embedded, embedded
from tests_support import lose_errors

import kvflow
from kvflow import Lease, LeaseOutcome, LoadRequest, ServeRequest, errors
from kvflow.testing import InprocCluster, run_virtual, watch_loads
from kvflow.transport.base import TransportError

PAGE = PAGES["docs/embedding.md"].read_text()
PROMPT = tuple(range(48))

Play = Callable[[Embedded], Coroutine[Any, Any, None]]
Trouble = Callable[[Embedded, SimpleNamespace, Lease], object]
Going = Callable[[kvflow.Runtime], Coroutine[Any, Any, object]]


def run_page(play: Play, text: str = PAGE) -> None:
    """Run the page's program, and `play` while it serves, in virtual time; afterwards every block must be back."""

    async def main() -> None:
        lose_errors()
        cluster = InprocCluster()
        async with embedded(cluster) as engine, AsyncExitStack() as stack:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(kvflow, "Runtime", partial(kvflow.Runtime, world=cluster.world()))
                await check_blocks(blocks_of("docs/embedding.md", text), engine.names, Path())
                stack.enter_context(watch_loads(engine.runtime))
            running = asyncio.create_task(engine.names["main"]())
            await engine.serving.wait()
            try:
                await play(engine)
                await all_given_back(engine)
            finally:
                engine.let_go()
                engine.ending.set()
                await running
            engine.assert_whole()

    run_virtual(main())


def wanted(lease: Lease | None = None, request_id: str = "request") -> SimpleNamespace:
    """A request of the engine, with the ticket of a lease if it is to be loaded."""
    params = lease.ticket.to_params() if lease else None
    return SimpleNamespace(id=request_id, prompt=PROMPT, kv_transfer_params=params, seconds_left=20.0)


def offer(engine: Embedded, request_id: str = "request") -> Lease:
    """The other engine has computed a prompt."""
    request = ServeRequest(request_id, block_ids=BLOCKS, num_tokens=len(PROMPT), prompt=PROMPT)
    return engine.other.runtime.serve_blocks(request)


async def all_given_back(engine: Embedded) -> None:
    """Blocks come back by themselves, but not while a read into or from them is held."""
    if engine.transport.held or engine.other.transport.held:
        assert engine.background, "given back under a read"
        await asyncio.wait(engine.background, timeout=5.0)
        assert engine.taken, "given back under a read"
        engine.let_go()
    if engine.background:
        await asyncio.wait(engine.background, timeout=100.0)
    engine.assert_whole()


async def offer_is_given_back(lease: Lease) -> None:
    """Its blocks do not stay taken for the rest of its time."""
    waiting = asyncio.ensure_future(lease.wait())
    done, _ = await asyncio.wait([waiting], timeout=5.0)
    assert done, "its blocks stay taken"
    assert waiting.result() is not LeaseOutcome.EXPIRED


async def held_load(engine: Embedded, lease: Lease | None = None) -> asyncio.Task[None]:
    """Return the task of a request with posted reads that do not end."""
    engine.transport.faults.hold = True
    decoding = asyncio.create_task(engine.decode(wanted(lease or offer(engine))))
    await asyncio.wait([decoding], timeout=1.0)
    assert engine.transport.held
    return decoding


# --- decode


async def a_prompt_is_loaded(engine: Embedded) -> None:
    await engine.decode(wanted(offer(engine)))
    assert engine.answer is not None
    assert torch.equal(engine.answer, engine.other.kv_caches["layers.0"][:, BLOCKS])


def load_fails(kind: type[Exception], trouble: Trouble, *, told: bool = True) -> Play:
    async def play(engine: Embedded) -> None:
        lease = offer(engine)
        request = wanted(lease)
        under_way = trouble(engine, request, lease)
        if asyncio.iscoroutine(under_way):
            await under_way
        with pytest.raises(kind):
            await engine.decode(request)
        if told:
            await offer_is_given_back(lease)

    return play


async def cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def cancelled_while_bytes_may_land(engine: Embedded) -> None:
    lease = offer(engine)
    decoding = await held_load(engine, lease)
    await cancel(decoding)
    await offer_is_given_back(lease)
    with pytest.raises(errors.BlocksBusy):
        await engine.runtime.load_blocks(LoadRequest("another", offer(engine, "another").ticket, BLOCKS))


async def cancelled_before_the_load_has_begun(engine: Embedded) -> None:
    lease = offer(engine)
    decoding = asyncio.create_task(engine.decode(wanted(lease)))
    await asyncio.sleep(0)
    assert engine.taken
    await cancel(decoding)
    await offer_is_given_back(lease)


async def cancelled_while_a_rendezvous_is_waited_for(engine: Embedded) -> None:
    request = wanted()
    rendezvous = kvflow.Ticket.rendezvous(engine.other.runtime.introduce().to_params(), "secret", ttl_s=30.0)
    request.kv_transfer_params = rendezvous.to_params()
    decoding = asyncio.create_task(engine.decode(request))
    await asyncio.wait([decoding], timeout=1.0)
    await cancel(decoding)
    assert engine.background, "nobody waits for the offer"
    await asyncio.wait(engine.background, timeout=10.0)
    await offer_is_given_back(offer(engine, "secret"))


async def closed_under_a_load(engine: Embedded) -> None:
    decoding = await held_load(engine)
    engine.ending.set()
    with pytest.raises(errors.RuntimeClosed) as caught:
        await decoding
    assert caught.value.quarantine is not None


async def asks_for_another_prefill(engine: Embedded) -> None:
    lease = offer(engine).revoke()
    with pytest.raises(engine.names["PrefillAgain"]) as caught:
        await engine.names["answer"](wanted(lease))
    assert isinstance(caught.value.__cause__, errors.LeaseExpired)


# --- prefill


async def an_offer_is_read(engine: Embedded) -> None:
    params = await engine.prefill(wanted())
    engine.other.transport.faults.hold = True
    load = engine.other.runtime.start_load(LoadRequest("request", ticket=params, block_ids=[0, 1, 2]))
    await asyncio.wait(engine.background, timeout=1.0)
    await all_given_back(engine)
    await load
    assert (engine.other.kv_caches["layers.0"][:, :3] == 1.0).all()


async def an_offer_runs_out(engine: Embedded) -> None:
    await engine.prefill(wanted())
    assert engine.taken


def prefill_fails(kind: type[Exception], part: str = "", request_id: str = "request") -> Play:
    async def play(engine: Embedded) -> None:
        engine.broken.add(part)
        with pytest.raises(kind):
            await engine.prefill(wanted(request_id=request_id))

    return play


async def cancelled_while_computing(engine: Embedded) -> None:
    engine.computing.clear()
    prefilling = asyncio.create_task(engine.prefill(wanted()))
    await asyncio.wait([prefilling], timeout=1.0)
    await cancel(prefilling)


def gone_before_the_offer(kind: type[Exception], go: Going) -> Play:
    async def play(engine: Embedded) -> None:
        engine.computing.clear()
        prefilling = asyncio.create_task(engine.prefill(wanted()))
        await go(engine.runtime)
        engine.computing.set()
        with pytest.raises(kind):
            await prefilling

    return play


async def closed_under_a_lease(engine: Embedded) -> None:
    await engine.prefill(wanted())
    engine.ending.set()


# --- prefill, in chunks


async def a_growing_offer_is_read(engine: Embedded) -> None:
    engine.computing.clear()
    prefilling, ticket = engine.prefill_in_chunks(wanted())
    load = engine.other.runtime.start_load(LoadRequest("request", await ticket, block_ids=[0, 1, 2], prompt=PROMPT))
    await asyncio.wait([prefilling], timeout=1.0)
    assert (load.done, engine.chunks_computed) == (False, 0)
    engine.computing.set()
    await prefilling
    assert (await load).tokens == len(PROMPT)
    assert (engine.other.kv_caches["layers.0"][:, :3] == 1.0).all()


def growing_fails(kind: type[Exception], trouble: Callable[[Embedded, asyncio.Task[None]], object]) -> Play:
    async def play(engine: Embedded) -> None:
        engine.computing.clear()
        prefilling, ticket = engine.prefill_in_chunks(wanted())
        load = engine.other.runtime.start_load(LoadRequest("request", await ticket, block_ids=[0, 1, 2]))
        await asyncio.wait([prefilling], timeout=1.0)
        trouble(engine, prefilling)
        engine.computing.set()
        loading = asyncio.ensure_future(load)
        await asyncio.wait([prefilling, loading], timeout=5.0)
        assert isinstance(loading.exception(), errors.PrefillFailed)
        assert prefilling.cancelled() or isinstance(prefilling.exception(), kind)

    return play


async def a_growing_offer_is_given_back(engine: Embedded) -> None:
    """Its prompt is not computed to its end."""
    engine.computing.clear()
    prefilling, ticket = engine.prefill_in_chunks(wanted())
    await engine.other.runtime.release_blocks(await ticket)
    engine.computing.set()
    await prefilling
    assert engine.chunks_computed == 1


PLAYS: dict[str, Play] = {
    "read while it grows": a_growing_offer_is_read,
    "compute fails while it grows": growing_fails(MemoryError, lambda engine, _: engine.broken.add("compute")),
    "cancelled while it grows": growing_fails(asyncio.CancelledError, lambda _, prefilling: prefilling.cancel()),
    "given back while it grows": a_growing_offer_is_given_back,
    "loaded": a_prompt_is_loaded,
    "lease over": load_fails(errors.LeaseExpired, lambda _, __, lease: lease.revoke()),
    "no peer": load_fails(
        errors.PeerUnreachable, lambda _, request, __: request.kv_transfer_params.update(remote_port=1), told=False
    ),
    "mixed up": load_fails(errors.PromptMismatch, lambda _, request, __: vars(request).update(prompt=PROMPT[::-1])),
    "torn": load_fails(
        errors.TransferFailed, lambda engine, _, __: engine.transport.faults.fail_next.append(TransportError("torn"))
    ),
    "deadline": load_fails(
        errors.DeadlineExceeded, lambda engine, _, __: vars(engine.transport.faults).update(hold=True)
    ),
    "no blocks": load_fails(MemoryError, lambda engine, _, __: engine.broken.add("take")),
    "no prefix": load_fails(MemoryError, lambda engine, _, __: engine.broken.add("cached_blocks")),
    "generate fails": load_fails(MemoryError, lambda engine, _, __: engine.broken.add("generate")),
    "cancelled under a read": cancelled_while_bytes_may_land,
    "cancelled at once": cancelled_before_the_load_has_begun,
    "cancelled before the offer": cancelled_while_a_rendezvous_is_waited_for,
    "closed under a read": closed_under_a_load,
    "load while draining": load_fails(errors.RuntimeDraining, lambda engine, _, __: engine.runtime.drain()),
    "load when closed": load_fails(errors.RuntimeClosed, lambda engine, _, __: engine.runtime.aclose(), told=False),
    "load when asleep": load_fails(
        errors.CacheUnregistered, lambda engine, _, __: engine.runtime.unregister(), told=False
    ),
    "again": asks_for_another_prefill,
    "read": an_offer_is_read,
    "runs out": an_offer_runs_out,
    "no blocks to compute": prefill_fails(MemoryError, "take"),
    "compute fails": prefill_fails(MemoryError, "compute"),
    "serve refuses": prefill_fails(errors.RequestError, request_id=""),
    "cancelled while computing": cancelled_while_computing,
    "offer while draining": gone_before_the_offer(errors.RuntimeDraining, kvflow.Runtime.drain),
    "offer when closed": gone_before_the_offer(errors.RuntimeClosed, kvflow.Runtime.aclose),
    "offer when asleep": gone_before_the_offer(errors.CacheUnregistered, kvflow.Runtime.unregister),
    "closed under a lease": closed_under_a_lease,
}


@pytest.mark.parametrize("name", PLAYS)
def test_every_block_comes_back_once_and_in_time(name: str) -> None:
    run_page(PLAYS[name])


def test_blocks_stay_taken_when_nobody_can_know_when_they_are_safe() -> None:
    async def play(engine: Embedded) -> None:
        decoding = await held_load(engine)
        engine.transport.die(RuntimeError("no more"))
        with pytest.raises(errors.RuntimeBroken):
            await decoding
        await asyncio.wait(engine.background, timeout=100.0)
        engine.let_go()

    with pytest.raises(AssertionError, match="never given back"):
        run_page(play)


FINALLY, ON_LOAD_ERROR = "    finally:\n", "    except kvflow.errors.LoadError:\n"
RELEASE = "        in_background(give_offer_back(request))  #"
GIVE_BACK = "    allocator.give_back(block_ids)\n"


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("    await load.settled()", "    pass", ["cancelled under a read", "deadline", "closed under a read"]),
        (FINALLY, ON_LOAD_ERROR, ["mixed up", "compute fails"]),
        ("    await lease  #", "    pass  #", ["read", "closed under a lease"]),
        (GIVE_BACK, GIVE_BACK + GIVE_BACK, ["loaded"]),
        (
            RELEASE,
            "        pass  #",
            ["mixed up", "torn", "no blocks", "cancelled at once", "cancelled before the offer"],
        ),
    ],
)
def test_a_mistake_on_the_page_is_found(old: str, new: str, names: list[str]) -> None:
    assert old in PAGE
    for name in names:
        with pytest.raises(AssertionError):
            run_page(PLAYS[name], PAGE.replace(old, new))


def test_a_load_that_does_not_end_with_its_request_is_cancelled() -> None:
    """An engine that polls instead of awaiting must cancel the load, or the load outlives its request."""
    polls = "        while not load.done:\n            await asyncio.sleep(0.01)\n        await load\n"
    page, forgotten = PAGE.replace("        await load\n", polls), "    load.cancel()  #"
    assert page != PAGE
    assert forgotten in page
    run_page(cancelled_while_bytes_may_land, page)
    with pytest.raises(AssertionError, match="nobody waits for it"):
        run_page(cancelled_while_bytes_may_land, page.replace(forgotten, "    pass  #"))
