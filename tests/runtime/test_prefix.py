"""Prefixes: what holders share, what readers pull, and what becomes of pins when anything fails in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from kvflow import (
    Config,
    LeaseOutcome,
    LoadRequest,
    PeerAddress,
    PrefixReport,
    PrefixRequest,
    Run,
    Runtime,
    ServeRequest,
    SharedPrefixes,
    prefix_keys,
)
from kvflow.core.protocol import messages
from kvflow.errors import (
    BlocksBusy,
    DeadlineExceeded,
    LeaseExpired,
    PeerNotReady,
    PeerUnreachable,
    RequestError,
    UsageError,
)
from kvflow.runtime.load.leases import RemoteLeases
from kvflow.runtime.producer.farewells import Farewells
from kvflow.testing import BlockShelf, CacheSize, TestEngine, assert_blocks_equal
from kvflow.testing.pair import open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport

WAIT_S = 20.0
TOKENS = 4
PROMPT = list(range(100, 100 + 8 * TOKENS))
BASE = Config(engine_id="any", transport="inproc", drain_timeout_s=1.0)
SIZE = CacheSize(num_blocks=16, block_size=TOKENS)


@dataclass(frozen=True)
class Holder:
    """An engine that shares its cache."""

    engine: TestEngine
    shelf: BlockShelf
    sharing: SharedPrefixes

    @property
    def runtime(self) -> Runtime:
        return self.engine.runtime

    @property
    def address(self) -> str:
        return self.runtime.address


@dataclass(frozen=True)
class Fleet:
    """Engines that share, and one that pulls."""

    reader: TestEngine
    holders: list[Holder]

    def request(self, **changes: Any) -> PrefixRequest:
        """For all of the prompt, from all holders, into the reader's first blocks."""
        given: dict[str, Any] = {
            "request_id": "req",
            "keys": prefix_keys(PROMPT, TOKENS),
            "key_tokens": TOKENS,
            "block_ids": list(range(8)),
            "peers": [one.address for one in self.holders],
            "answer_within_s": WAIT_S,
        }
        return PrefixRequest(**{**given, **changes})

    async def pull(self, **changes: Any) -> PrefixReport:
        async with asyncio.timeout(WAIT_S):
            return await self.reader.runtime.pull_prefix(self.request(**changes))

    async def hold(self, pull: Coroutine[Any, Any, PrefixReport]) -> asyncio.Task[PrefixReport]:
        """Start a pull, and wait until it has posted a read, which the transport holds."""
        transport = self.reader.transport
        transport.faults.hold = True
        task = asyncio.ensure_future(pull)
        async with asyncio.timeout(WAIT_S):
            while not transport.held and not task.done():
                await asyncio.sleep(0)
        return task

    def release_reads(self) -> None:
        """Perform what is held, and hold no more."""
        self.reader.transport.faults.hold = False
        self.reader.transport.perform()

    def assert_read(self, holder: Holder, ours: Sequence[int], theirs: Sequence[int]) -> None:
        assert_blocks_equal(self.reader.cache, ours, holder.engine.cache, theirs)

    async def assert_nothing_pinned(self) -> None:
        async with asyncio.timeout(WAIT_S):
            for one in self.holders:
                while +one.shelf.pins or one.sharing.pinned_blocks:
                    await asyncio.sleep(0)
                assert one.runtime.statistics().serving.open_leases == 0  # type: ignore[union-attr]


@contextlib.asynccontextmanager
async def fleet(
    holders: int = 1, *, base: Config = BASE, pinned_blocks_max: int | None = None, reader_size: CacheSize = SIZE
) -> AsyncIterator[Fleet]:
    network = InprocNetwork()

    def make(_: Config, name: str) -> InprocTransport:
        return InprocTransport(name, network)

    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(open_engine("reader", base, make, size=reader_size))
        found = []
        for number in range(holders):
            engine = await stack.enter_async_context(open_engine(f"holder-{number}", base, make, size=SIZE))
            shelf = BlockShelf(TOKENS)
            found.append(Holder(engine, shelf, engine.runtime.share(shelf, pinned_blocks_max=pinned_blocks_max)))
        made = Fleet(reader, found)
        yield made
        await made.assert_nothing_pinned()


async def test_the_longest_run_is_read_from_whoever_has_it() -> None:
    async with fleet(3, pinned_blocks_max=8) as them:
        first, second, third = them.holders
        first.shelf.put(PROMPT[: 2 * TOKENS], [3, 4])
        second.shelf.put(PROMPT[: 5 * TOKENS], [9, 7, 5, 3, 1])
        report = await them.pull()
        them.assert_read(second, [0, 1, 2, 3, 4], [9, 7, 5, 3, 1])
        assert (report.num_tokens, report.pulled_tokens, report.source) == (20, 20, report.answers[0].peer)
        assert report.source.startswith("holder-1 ")
        told = {answer.peer.split()[0]: (answer.num_tokens, answer.why) for answer in report.answers}
        assert told["holder-0"] == (8, "another one was taken")
        assert told["holder-2"] == (0, "it has nothing of it")
        assert third.sharing.statistics.missed == 1
        await them.assert_nothing_pinned()
        assert second.runtime.statistics().serving.read == 1  # type: ignore[union-attr]


async def test_nothing_found_is_no_error() -> None:
    async with fleet(2) as them:
        report = await them.pull()
        assert (report.num_tokens, report.source, report.loads) == (0, "", ())
        nobody = await them.pull(
            peers=["tcp://127.0.0.1:1", PeerAddress(engine_id="gone", address="tcp://127.0.0.1:1")]
        )
        assert nobody.num_tokens == 0
        assert all("127.0.0.1:1" in answer.why for answer in nobody.answers)
        assert (await them.pull(peers=[])).answers == ()


async def test_what_is_cached_is_not_read() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        them.holders[0].shelf.put(PROMPT[: 5 * TOKENS], [9, 7, 5, 3, 1])
        report = await them.pull(cached_tokens=2 * TOKENS, block_ids=[8, 9, 10, 11, 12, 13])
        them.assert_read(them.holders[0], [8, 9, 10], [9, 7, 5, 3, 1])
        assert (report.num_tokens, report.pulled_tokens) == (20, 12)
        none = await them.pull(cached_tokens=5 * TOKENS, block_ids=[0, 1, 2])
        assert (none.num_tokens, none.answers[0].why) == (20, "it has no more than is cached here")


async def test_a_holder_that_is_named_twice_is_asked_once(caplog: pytest.LogCaptureFixture) -> None:
    """By the same words; one that is known by two ways has one offer, and its log says nothing of the other."""
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.shelf.put(PROMPT, list(range(8)))
        known = PeerAddress(engine_id="holder-0", address=holder.address)
        (offer,) = await them.reader.runtime.seek_prefix(them.request(peers=[holder.address] * 5))
        assert await them.reader.runtime.release_blocks(offer.ticket)
        report = await them.pull(peers=[holder.address, known, holder.address])
        assert [answer.num_tokens for answer in report.answers] in ([len(PROMPT), 0], [0, len(PROMPT)])
        assert any("has an offer already" in answer.why for answer in report.answers)
        assert report.num_tokens == len(PROMPT)
        assert holder.sharing.statistics.failed == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_salts_never_share() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        them.holders[0].shelf.put(PROMPT, list(range(8)), salt=b"tenant a")
        for salt in (b"", b"tenant b"):
            assert (await them.pull(keys=prefix_keys(PROMPT, TOKENS, salt=salt))).num_tokens == 0
        assert (await them.pull(keys=prefix_keys(PROMPT, TOKENS, salt=b"tenant a"))).num_tokens == len(PROMPT)


async def test_a_run_that_is_reclaimed_while_it_is_read_is_a_miss() -> None:
    """And its blocks are its owner's at once: its seal is looked at after the last byte."""
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.shelf.put(PROMPT, list(range(8)))
        pull = await them.hold(them.pull())
        assert holder.sharing.pinned_blocks == 8
        assert holder.sharing.reclaim(3) == 8
        assert not +holder.shelf.pins
        assert holder.runtime.statistics().blocks.leased == 0  # type: ignore[union-attr]
        holder.shelf.evict(range(8))
        them.release_reads()
        report = await pull
        assert report.num_tokens == 0
        assert "the offer is over" in report.answers[0].why
        assert holder.sharing.statistics.reclaimed == 1


async def test_the_rest_comes_from_the_next_source() -> None:
    async with fleet(2, pinned_blocks_max=8) as them:
        first, second = them.holders
        first.shelf.put(PROMPT, list(range(8)))
        second.shelf.put(PROMPT[: 4 * TOKENS], [11, 12, 13, 14])
        pull = await them.hold(them.pull())
        first.sharing.close()
        them.release_reads()
        report = await pull
        them.assert_read(second, [0, 1, 2, 3], [11, 12, 13, 14])
        assert report.num_tokens == 4 * TOKENS
        assert report.source.startswith("holder-1 ")
        assert them.reader.runtime.statistics().prefixes.failed_sources == 1  # type: ignore[union-attr]
        assert (await them.pull(peers=[first.address])).num_tokens == 0


async def test_who_answers_while_the_best_one_is_read_is_a_source_too() -> None:
    """A whole prefix ends the wait for others; their answers count until the pull is over."""
    async with fleet(2, pinned_blocks_max=8) as them:
        first, second = them.holders
        first.shelf.put(PROMPT, list(range(8)))
        second.shelf.put(PROMPT[: 4 * TOKENS], [11, 12, 13, 14])
        second.sharing.close()
        slow = SlowShelf(second.shelf)
        sharing = second.runtime.share(slow, pinned_blocks_max=8)
        pull = await them.hold(them.pull())
        assert slow.asked == 1
        first.sharing.close()
        them.release_reads()
        slow.open.set()
        report = await pull
        assert (report.num_tokens, report.source.split()[0]) == (4 * TOKENS, "holder-1")
        them.assert_read(second, [0, 1, 2, 3], [11, 12, 13, 14])
        async with asyncio.timeout(WAIT_S):
            while sharing.pinned_blocks:
                await asyncio.sleep(0)


async def test_a_pull_that_is_over_reads_from_no_other_source() -> None:
    """Not even from one that is left: another load would have another time to end in."""
    async with fleet(2, base=replace(BASE, cancel_grace_s=WAIT_S), pinned_blocks_max=8) as them:
        for holder in them.holders:
            holder.shelf.put(PROMPT, list(range(8)))
        pull = await them.hold(them.pull(deadline_s=0.2))
        assert not (await asyncio.wait({pull}, timeout=0.3))[0], "its blocks are not safe"
        them.reader.transport.perform()
        report = await pull
        assert (report.num_tokens, len(them.reader.transport.held)) == (0, 0)
        assert them.reader.runtime.statistics().prefixes.failed_sources == 1  # type: ignore[union-attr]


async def test_what_is_pinned_is_bounded_and_each_block_counts_once() -> None:
    async with fleet(pinned_blocks_max=4) as them:
        (holder,) = them.holders
        other = [7] * 8 * TOKENS
        holder.shelf.put(PROMPT, list(range(8)))
        holder.shelf.put(other, list(range(8, 16)))
        (first,), (second,) = [await them.reader.runtime.seek_prefix(them.request()) for _ in range(2)]
        assert first.num_tokens == second.num_tokens == 4 * TOKENS
        assert holder.sharing.pinned_blocks == 4
        asked = them.request(keys=prefix_keys(other, TOKENS))
        assert await them.reader.runtime.seek_prefix(asked) == ()
        assert holder.sharing.statistics.busy == 1
        for offer in (first, second):
            assert await them.reader.runtime.release_blocks(offer.ticket)
        await them.assert_nothing_pinned()
        assert (await them.pull(keys=prefix_keys(other, TOKENS))).num_tokens == 4 * TOKENS


async def test_many_pull_one_prefix_at_once() -> None:
    """Their leases share the blocks; who has been asked for less is asked first."""
    async with fleet(3, pinned_blocks_max=8) as them:
        for one in them.holders:
            one.shelf.put(PROMPT[: 2 * TOKENS], [5, 6])
        pulls = [them.pull(request_id=f"req-{at}", block_ids=[2 * at, 2 * at + 1]) for at in range(8)]
        reports = await asyncio.gather(*pulls)
        assert all(report.num_tokens == 2 * TOKENS for report in reports)
        await them.assert_nothing_pinned()
        (first, *_), (second, *_) = [await them.reader.runtime.seek_prefix(them.request()) for _ in range(2)]
        assert first.queued_bytes == 0
        assert second.queued_bytes == 2 * them.reader.layout.block_size_bytes
        for one in them.holders:
            one.sharing.reclaim(16)


async def test_an_offer_can_be_loaded_as_any_ticket() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        them.holders[0].shelf.put(PROMPT, list(range(8)))
        (offer,) = await them.reader.runtime.seek_prefix(them.request(block_ids=[]))
        request = LoadRequest("req", ticket=offer.ticket.to_params(), block_ids=list(range(8)), verify=True)
        assert (await them.reader.runtime.load_blocks(request)).verified
        them.assert_read(them.holders[0], range(8), range(8))


async def test_an_answer_that_comes_too_late_is_given_back() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        slow = SlowShelf(holder.shelf)
        holder.sharing.close()
        sharing = holder.runtime.share(slow, pinned_blocks_max=8)
        holder.shelf.put(PROMPT, list(range(8)))
        report = await them.pull(answer_within_s=0.05)
        assert report.answers[0].why == "it has not answered in time"
        assert (await them.pull()).answers[0].why == "it has not answered an earlier question yet"
        slow.open.set()
        async with asyncio.timeout(WAIT_S):
            while sharing.statistics.found == 0 or sharing.pinned_blocks:
                await asyncio.sleep(0)
        assert (await them.pull()).num_tokens == len(PROMPT)


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(Run((0, 1), 9 * TOKENS), id="more than was asked for"),
        pytest.param(Run((0, 1), 3), id="no multiple"),
        pytest.param(Run((0, 99), 2 * TOKENS), id="blocks that are not there"),
        pytest.param(Run((0,), 2 * TOKENS), id="too few blocks"),
        pytest.param(Run(("a",), TOKENS), id="no blocks"),  # type: ignore[arg-type]
        pytest.param("run", id="no run"),
        pytest.param(ZeroDivisionError("bug"), id="raises"),
    ],
)
async def test_a_shelf_that_lies_or_fails_costs_a_miss(given: Any) -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.sharing.close()
        shelf = LyingShelf(given)
        sharing = holder.runtime.share(shelf, pinned_blocks_max=8)
        assert (await them.pull()).num_tokens == 0
        assert sharing.statistics.failed + sharing.statistics.missed == 1
        assert shelf.unpinned == ([given] if isinstance(given, Run) else [])
        sharing.close()


async def test_a_run_that_a_shelf_gives_twice_ends_for_both_readers() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.sharing.close()
        run = Run((0, 1), 2 * TOKENS)
        shelf = LyingShelf(run)
        sharing = holder.runtime.share(shelf, pinned_blocks_max=8)
        for _ in range(2):
            (offer,) = await them.reader.runtime.seek_prefix(them.request())
            assert offer.num_tokens == 2 * TOKENS
        assert (sharing.statistics.runs, sharing.pinned_blocks) == (2, 2)
        sharing.end(Run((0, 1), 2 * TOKENS))
        assert sharing.statistics.runs == 2, "another object"
        for _ in range(2):
            sharing.end(run)
            assert (sharing.statistics.runs, sharing.pinned_blocks) == (0, 0)
        assert sharing.statistics.reclaimed == 2
        assert shelf.unpinned == [run, run]


async def test_two_sources_for_one_prompt() -> None:
    """A prefix from one, the rest from the engine that has computed all of it; one outcome."""
    async with fleet(2, pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        tokens = 8 * TOKENS - 1
        lease = prefill.runtime.serve_blocks(
            ServeRequest("req", block_ids=list(range(8)), num_tokens=tokens, prompt=PROMPT[:tokens])
        )
        report = await them.pull(peers=[near.address], rest=lease.ticket.to_params(), prompt=PROMPT)
        them.assert_read(near, [0, 1, 2], [9, 8, 7])
        assert (report.num_tokens, report.pulled_tokens) == (tokens, 3 * TOKENS)
        assert await lease is LeaseOutcome.READ
        assert [one.tokens for one in report.loads] == [3 * TOKENS, tokens - 3 * TOKENS]


async def test_a_prefix_that_fails_is_read_from_the_engine_of_the_rest() -> None:
    async with fleet(2, pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        pull = await them.hold(them.pull(peers=[near.address], rest=lease.ticket.to_params()))
        near.sharing.close()
        them.release_reads()
        report = await pull
        them.assert_read(prefill, range(8), range(8))
        assert (report.num_tokens, report.pulled_tokens) == (len(PROMPT), 0)
        assert await lease is LeaseOutcome.READ


async def test_a_prefix_that_fails_when_its_pull_is_over_is_read_from_nobody() -> None:
    async with fleet(2, base=replace(BASE, cancel_grace_s=WAIT_S), pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        pull = await them.hold(them.pull(peers=[near.address], rest=lease.ticket.to_params(), deadline_s=0.5))
        held = them.reader.transport.held
        async with asyncio.timeout(WAIT_S):
            while them.reader.runtime.statistics().loading.open_loads > 1:  # type: ignore[union-attr]
                of_rest = [read for read in held if read.peer.startswith("holder-1/")]
                held.extendleft([held.remove(read) or read for read in of_rest])  # type: ignore[func-returns-value]
                them.reader.transport.perform(len(of_rest))
                await asyncio.sleep(0)
        assert not (await asyncio.wait({pull}, timeout=0.6))[0], "its blocks are not safe"
        them.reader.transport.perform()
        with pytest.raises(DeadlineExceeded) as caught:
            await pull
        assert (caught.value.request_id, caught.value.quarantine, len(held)) == ("req/prefix", None, 0)
        await lease.revoke()


async def test_a_rest_that_fails_fails_the_pull_once_no_byte_can_land() -> None:
    async with fleet(2, pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        await lease.revoke()
        with pytest.raises(LeaseExpired):
            await them.pull(peers=[near.address], rest=lease.ticket.to_params())
        assert them.reader.runtime.statistics().blocks.in_flight == 0  # type: ignore[union-attr]


async def test_a_prefix_ends_where_a_local_block_does_if_the_rest_comes_from_elsewhere() -> None:
    """Whatever the keys are for: what a prefix has of a block more would have to share that with the rest."""
    async with fleet(2, pinned_blocks_max=8, reader_size=CacheSize(num_blocks=16, block_size=2 * TOKENS)) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        report = await them.pull(peers=[near.address], rest=lease.ticket.to_params(), block_ids=list(range(4)))
        them.assert_read(near, [0], [9, 8])
        them.assert_read(prefill, [1, 2, 3], [2, 3, 4, 5, 6, 7])
        assert (report.num_tokens, report.pulled_tokens) == (len(PROMPT), 2 * TOKENS)
        assert await lease is LeaseOutcome.READ


async def test_an_engine_of_the_rest_that_cannot_be_told_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """All bytes are there by then; its lease runs out."""

    async def release(*_: object) -> bool:
        raise PeerUnreachable("it is gone", peer="tcp://127.0.0.1:1")

    async with fleet(2, pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        with monkeypatch.context() as patched:
            patched.setattr(RemoteLeases, "release", release)
            report = await them.pull(peers=[near.address], rest=lease.ticket.to_params())
        assert (report.num_tokens, report.pulled_tokens) == (len(PROMPT), 3 * TOKENS)
        await lease.revoke()


async def test_a_pull_that_is_late_names_all_blocks_that_bytes_may_land_in() -> None:
    """Of both loads, and it waits for neither beyond its deadline."""
    async with fleet(2, base=replace(BASE, cancel_grace_s=0.01), pinned_blocks_max=8) as them:
        near, prefill = them.holders
        near.shelf.put(PROMPT[: 3 * TOKENS], [9, 8, 7])
        lease = prefill.runtime.serve_blocks(ServeRequest("req", block_ids=list(range(8)), num_tokens=len(PROMPT)))
        pull = await them.hold(them.pull(peers=[near.address], rest=lease.ticket.to_params(), deadline_s=0.5))
        with pytest.raises(DeadlineExceeded) as caught:
            await pull
        held = caught.value.quarantine
        assert held is not None
        assert (held.request_id, sorted(held.block_ids), held.safe) == ("req", list(range(8)), False)
        them.release_reads()
        await held.settled()
        assert held.safe
        await lease.revoke()


async def test_what_takes_longer_than_computing_is_not_pulled() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        them.holders[0].shelf.put(PROMPT, list(range(8)))
        assert (await them.pull(recompute_s_per_token=1e-12)).num_tokens == len(PROMPT)  # nobody knows yet
        report = await them.pull(recompute_s_per_token=1e-12)
        assert (report.num_tokens, report.compute_s) == (0, pytest.approx(32e-12))
        assert report.pull_s is not None
        assert report.pull_s > 32e-12
        assert "to compute" in report.answers[0].why
        assert (await them.pull(recompute_s_per_token=10.0)).num_tokens == len(PROMPT)


async def test_a_pull_that_is_cancelled_gives_everything_back() -> None:
    async with fleet(2, pinned_blocks_max=8) as them:
        for one in them.holders:
            one.shelf.put(PROMPT, list(range(8)))
        pull = await them.hold(them.pull())
        pull.cancel()
        them.release_reads()
        with pytest.raises(asyncio.CancelledError):
            await pull
        await them.assert_nothing_pinned()


async def test_a_holder_that_unregisters_ends_what_it_shares() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.shelf.put(PROMPT, list(range(8)))
        (offer,) = await them.reader.runtime.seek_prefix(them.request(block_ids=[]))
        await holder.runtime.unregister()
        assert not +holder.shelf.pins
        with pytest.raises((LeaseExpired, PeerNotReady)):
            await them.reader.runtime.load_blocks(LoadRequest("req", ticket=offer.ticket, block_ids=list(range(8))))
        await holder.runtime.register_kv_caches(holder.engine.kv_caches, holder.engine.layout)
        assert (await them.pull()).num_tokens == 0
        holder.runtime.share(holder.shelf)
        assert (await them.pull()).num_tokens == 4 * TOKENS  # a quarter of its blocks


async def test_a_holder_that_has_restarted_is_pulled_from_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its address, and without a goodbye: its reader finds out by the answer."""
    monkeypatch.setattr(Farewells, "remember", lambda *_: None)
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.shelf.put(PROMPT, list(range(8)))
        assert (await them.pull()).num_tokens == len(PROMPT)
        await holder.runtime.unregister()
        await holder.runtime.register_kv_caches(holder.engine.kv_caches, holder.engine.layout)
        sharing = holder.runtime.share(holder.shelf, pinned_blocks_max=8)
        assert (await them.pull()).num_tokens == len(PROMPT)
        assert sharing.statistics.found == 1


async def test_a_shelf_that_answers_when_its_cache_is_gone_is_unpinned() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.sharing.close()
        holder.shelf.put(PROMPT, list(range(8)))
        slow = SlowShelf(holder.shelf)
        holder.runtime.share(slow, pinned_blocks_max=8)
        pull = asyncio.ensure_future(them.pull(answer_within_s=0.5))
        async with asyncio.timeout(WAIT_S):
            while not slow.asked:
                await asyncio.sleep(0)
            await holder.runtime.unregister()
            slow.open.set()
            while not holder.shelf.asked:
                await asyncio.sleep(0)
        assert (await pull).num_tokens == 0
        await holder.runtime.register_kv_caches(holder.engine.kv_caches, holder.engine.layout)


async def test_what_a_reader_writes_cannot_be_shared() -> None:
    """Blocks are a load's until it has ended: the shelf has said too early that they hold something."""
    async with fleet(2, pinned_blocks_max=8) as them:
        first, second = them.holders
        second.shelf.put(PROMPT, list(range(8)))
        sharing = them.reader.runtime.share(shelf := BlockShelf(TOKENS))
        shelf.put(PROMPT, list(range(8)))
        pull = await them.hold(them.pull(peers=[second.address]))
        found = await first.runtime.seek_prefix(them.request(block_ids=[], peers=[them.reader.runtime.address]))
        assert found == ()
        assert sharing.statistics.failed == 1
        them.release_reads()
        await pull
        sharing.close()


async def test_local_blocks_that_are_busy_are_said() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        them.holders[0].shelf.put(PROMPT, list(range(8)))
        lease = them.reader.runtime.serve_blocks(ServeRequest("other", block_ids=[2], num_tokens=TOKENS))
        with pytest.raises(BlocksBusy):
            await them.pull()
        await lease.revoke()


async def test_a_request_that_cannot_be_right() -> None:
    """Values of another type are in `tests/test_border.py`."""
    async with fleet() as them:
        for changes, match in (
            ({"keys": []}, "keys"),
            ({"keys": [b"short"]}, "keys"),
            ({"key_tokens": 0}, "key_tokens"),
            ({"peers": ["tcp://127.0.0.1:1"] * 65}, "peers"),
            ({"cached_tokens": -1}, "cached_tokens"),
            ({"deadline_s": 0}, "deadline_s"),
            ({"block_ids": [99]}, "block"),
            ({"recompute_s_per_token": -1}, "recompute_s_per_token"),
        ):
            with pytest.raises(RequestError, match=f"request 'req'.*{match}"):
                await them.pull(**changes)


async def test_peers_that_cannot_be() -> None:
    async with fleet() as them:
        report = await them.pull(peers=["", "tcp://", "nonsense", 5, {}, {"remote_engine_id": object()}])
        assert report.num_tokens == 0
        assert all(answer.why for answer in report.answers)


async def test_sharing_twice_or_by_a_consumer_is_refused() -> None:
    async with fleet() as them:
        with pytest.raises(UsageError, match="shared already"):
            them.holders[0].runtime.share(BlockShelf(TOKENS))
        with pytest.raises(UsageError, match="expected a Shelf"):
            them.reader.runtime.share(object())  # type: ignore[arg-type]
    async with fleet(0, base=replace(BASE, role="consumer")) as them:
        with pytest.raises(UsageError, match="'consumer'"):
            them.reader.runtime.share(BlockShelf(TOKENS))


async def test_what_is_shared_belongs_to_its_loop() -> None:
    async with fleet() as them:
        (holder,) = them.holders
        for work in (lambda: holder.sharing.reclaim(1), lambda: holder.sharing.end(Run((), 4)), holder.sharing.close):
            with pytest.raises(UsageError, match="loop that opened"):
                await asyncio.to_thread(work)


async def test_forged_questions_pin_nothing() -> None:
    async with fleet(pinned_blocks_max=8) as them:
        (holder,) = them.holders
        holder.shelf.put(PROMPT, list(range(8)))
        await them.pull()
        await them.assert_nothing_pinned()
        asked = holder.shelf.asked
        cache = holder.runtime._supervisor.cache
        assert cache is not None
        for keys, key_tokens in ((b"x" * 33, 4), (b"x" * 32, 1 << 62), (b"x" * (32 * 1024), 4)):
            reply = cache.sharing.answer(  # type: ignore[union-attr]
                messages.SeekRequest(
                    reader="somebody/0.0.0#1",
                    target=cache.local.caller.target,
                    request_id="forged",
                    keys=keys,
                    key_tokens=key_tokens,
                )
            )
            assert isinstance(reply, messages.Refusal | messages.NoLease)
        assert holder.shelf.asked <= asked + 1
        assert holder.sharing.pinned_blocks == 0


class SlowShelf:
    """A shelf that lives elsewhere, and answers when it is let."""

    def __init__(self, inside: BlockShelf) -> None:
        self.inside = inside
        self.open = asyncio.Event()
        self.asked = 0

    def match(self, keys: Sequence[bytes], key_tokens: int) -> Awaitable[Run | None]:
        self.asked += 1

        async def answer() -> Run | None:
            await self.open.wait()
            return self.inside.match(keys, key_tokens)

        return answer()

    def unpin(self, run: Run) -> None:
        self.inside.unpin(run)


class LyingShelf:
    def __init__(self, given: Any) -> None:
        self.given = given
        self.unpinned: list[Run] = []

    def match(self, keys: Sequence[bytes], key_tokens: int) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def unpin(self, run: Run) -> None:
        self.unpinned.append(run)
