"""Prefixes: what holders share, what readers pull, and what becomes of pins when anything fails in between."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from kvflow import (
    Config,
    LoadRequest,
    PeerAddress,
    Runtime,
    RuntimeState,
    ServeRequest,
)
from kvflow.core.protocol import messages
from kvflow.errors import (
    BlocksBusy,
    DeadlineExceeded,
    LayoutError,
    LeaseExpired,
    PeerNotReady,
    RequestError,
    UsageError,
    WeightsMismatch,
)
from kvflow.prefix import (
    PinnedPrefix,
    PrefixCache,
    Prefixes,
    PrefixOffer,
    PrefixReport,
    PrefixRequest,
    PrefixStatistics,
    SharedPrefixes,
    prefix_keys,
)
from kvflow.prefix.seek_request import SeekRequest
from kvflow.prefix.testing import FakePrefixCache
from kvflow.runtime.producer.goodbyes import Goodbyes
from kvflow.testing import CacheSize, TestEngine, assert_blocks_equal
from kvflow.testing.pair import open_engine
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.pairs import host_of, known, part_of
from tests.support.tests_support import WAIT_S, until

TOKENS = 4
PROMPT = list(range(100, 100 + 8 * TOKENS))
ALL_BUT_ONE = len(PROMPT) - 1
BASE = Config(engine_id="any", transport="inproc", drain_timeout_s=1.0)
SIZE = CacheSize(num_blocks=16, block_size=TOKENS)


@dataclass
class Holder:
    """An engine that shares its cache."""

    engine: TestEngine
    prefix_cache: FakePrefixCache
    sharing: SharedPrefixes

    @property
    def runtime(self) -> Runtime:
        return self.engine.runtime

    @property
    def prefixes(self) -> Prefixes:
        return part_of(self.runtime, Prefixes)

    @property
    def address(self) -> str:
        return self.runtime.address

    def share(self, prefix_cache: PrefixCache) -> SharedPrefixes:
        """Share this prefix cache from now on."""
        self.sharing.close()
        self.sharing = self.prefixes.share(prefix_cache, pinned_blocks_max=8)
        return self.sharing

    async def restart(self) -> None:
        """With the same cache at the same address, and nothing that is shared."""
        await self.runtime.unregister()
        await self.runtime.register_kv_caches(self.engine.kv_caches, self.engine.layout)


@dataclass(frozen=True)
class Fleet:
    """Engines that share prefixes, and an engine that pulls."""

    reader: TestEngine
    holders: list[Holder]
    given: dict[str, Any]
    """Fields of all its pulls."""

    @property
    def prefixes(self) -> Prefixes:
        return part_of(self.reader.runtime, Prefixes)

    @property
    def counts(self) -> PrefixStatistics:
        return known(self.prefixes.statistics)

    def request(self, **changes: Any) -> PrefixRequest:
        """For all of the prompt, from all holders, into the reader's first blocks."""
        given: dict[str, Any] = {
            "request_id": "req",
            "keys": prefix_keys(PROMPT, TOKENS),
            "key_tokens": TOKENS,
            "block_ids": range(8),
            "peers": [one.address for one in self.holders],
            "answer_within_s": WAIT_S,
        }
        return PrefixRequest(**{**given, **self.given, **changes})

    async def seek(self, **changes: Any) -> Sequence[PrefixOffer]:
        return await self.prefixes.seek(self.request(**changes))

    async def pull(self, **changes: Any) -> PrefixReport:
        async with asyncio.timeout(WAIT_S):
            return await self.prefixes.pull(self.request(**changes))

    async def hold(self, **changes: Any) -> asyncio.Task[PrefixReport]:
        """Start a pull, and wait until it has posted a read, which the transport holds."""
        transport = self.reader.transport
        transport.faults.hold = True
        task = asyncio.ensure_future(self.pull(**changes))
        await until(lambda: transport.held or task.done())
        return task

    def release_reads(self) -> None:
        """Perform the held reads, and hold no further reads."""
        self.reader.transport.faults.hold = False
        self.reader.transport.perform()

    def assert_read(self, holder: Holder, ours: Sequence[int], theirs: Sequence[int], **options: int) -> None:
        assert_blocks_equal(self.reader.cache, ours, holder.engine.cache, theirs, **options)

    async def assert_nothing_pinned(self) -> None:
        await until(lambda: not any(+one.prefix_cache.pins or one.sharing.pinned_blocks for one in self.holders))
        assert not any(known(one.runtime.statistics().serving).open_leases for one in self.holders)


@contextlib.asynccontextmanager
async def fleet(
    holders: int = 1, *, base: Config = BASE, pinned_blocks_max: int = 8, reader_size: CacheSize = SIZE
) -> AsyncIterator[Fleet]:
    network = InprocNetwork()

    def make(_: Config, name: str) -> InprocTransport:
        return InprocTransport(name, network)

    async with contextlib.AsyncExitStack() as stack:
        reader = await stack.enter_async_context(
            open_engine("reader", base, make, size=reader_size, parts=[Prefixes()])
        )
        found = []
        for number in range(holders):
            engine = await stack.enter_async_context(
                open_engine(f"holder-{number}", base, make, size=SIZE, parts=[Prefixes()])
            )
            prefix_cache = FakePrefixCache(TOKENS)
            found.append(
                Holder(
                    engine,
                    prefix_cache,
                    part_of(engine.runtime, Prefixes).share(prefix_cache, pinned_blocks_max=pinned_blocks_max),
                )
            )
        made = Fleet(reader, found, {})
        yield made
        await made.assert_nothing_pinned()


@pytest.fixture
async def them() -> AsyncIterator[Fleet]:
    """One holder, of the whole prompt."""
    async with fleet() as them:
        them.holders[0].prefix_cache.put(PROMPT, range(8))
        yield them


@pytest.fixture
async def two() -> AsyncIterator[Fleet]:
    """One holder of the whole prompt, and one of its half."""
    async with fleet(2) as them:
        them.holders[0].prefix_cache.put(PROMPT, range(8))
        them.holders[1].prefix_cache.put(PROMPT[: 4 * TOKENS], [11, 12, 13, 14])
        yield them


async def test_the_longest_run_is_read_from_whoever_has_it() -> None:
    async with fleet(3) as them:
        first, second, third = them.holders
        first.prefix_cache.put(PROMPT[: 2 * TOKENS], [3, 4])
        second.prefix_cache.put(PROMPT[: 5 * TOKENS], [9, 7, 5, 3, 1])
        report = await them.pull()
        them.assert_read(second, [0, 1, 2, 3, 4], [9, 7, 5, 3, 1])
        assert (report.num_tokens, report.pulled_tokens, report.source) == (20, 20, report.answers[0].peer)
        assert report.source.startswith("holder-1 ")
        counted = them.counts
        assert (counted.hits, counted.tokens, counted.bytes) == (1, 20, report.bytes)
        told = {answer.peer.split()[0]: (answer.num_tokens, answer.why) for answer in report.answers}
        assert told["holder-0"] == (8, "another peer was chosen")
        assert told["holder-2"] == (0, "it has no block of the prefix")
        assert third.sharing.statistics.missed == 1
        await them.assert_nothing_pinned()
        assert known(second.runtime.statistics().serving).read == 1


async def test_no_time_is_left_for_a_pull_or_a_search(them: Fleet) -> None:
    for seconds_left in (0, -0.25, float("-inf")):
        for call in (them.pull(deadline_s=seconds_left), them.seek(deadline_s=seconds_left)):
            with pytest.raises(DeadlineExceeded, match=r"^request 'req': (pull|seek): its deadline_s was") as caught:
                await call
            assert caught.value.phase == "queued"
    assert not them.holders[0].prefix_cache.asked


async def test_a_cache_that_has_moved_is_neither_shared_nor_filled(
    them: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    them.reader.kv_caches["layers.0"].share_memory_()
    with pytest.raises(LayoutError, match=r"layer 'layers\.0': its tensor has moved .* register again"):
        await them.pull()
    (holder,) = them.holders
    holder.engine.kv_caches["layers.1"].share_memory_()
    assert (await them.pull()).num_tokens == 0
    assert holder.sharing.statistics.failed == 1
    assert "layer 'layers.1': its tensor has moved" in caplog.text


async def test_what_is_cached_is_not_read(them: Fleet) -> None:
    report = await them.pull(cached_tokens=2 * TOKENS, block_ids=range(8, 14))
    them.assert_read(them.holders[0], range(8, 14), range(2, 8))
    assert (report.num_tokens, report.pulled_tokens) == (len(PROMPT), 6 * TOKENS)
    none = await them.pull(cached_tokens=len(PROMPT), block_ids=[])
    assert (none.num_tokens, none.answers[0].why) == (len(PROMPT), "it has no more tokens than the local cache")


async def test_a_prefix_of_other_weights_is_not_found(them: Fleet) -> None:
    """Whoever was told first. With equal weights it is found again, if the holder still has it."""
    (holder,), reader = them.holders, them.reader.runtime
    for told in (holder.runtime, reader):
        told.set_weights(f"of-{told.config.engine_id}")
        report = await them.pull()
        assert (report.num_tokens, report.answers[0].why) == (0, "it has no block of the prefix")
    assert holder.sharing.statistics.missed == 2
    assert not holder.prefix_cache.asked
    reader.set_weights("of-holder-0")
    assert (await them.pull()).num_tokens == len(PROMPT)


async def test_an_offer_from_before_new_weights_is_refused(them: Fleet) -> None:
    """The holder's lease ends; the reader, told first, does not even ask for it."""
    (offer,) = await them.seek()
    them.reader.runtime.set_weights("step-7")
    request = LoadRequest("req", offer.ticket, range(8))
    with pytest.raises(WeightsMismatch, match=r"ours 'step-7', theirs ''"):
        await them.reader.runtime.load_blocks(request)
    them.holders[0].runtime.set_weights("step-7")
    assert known(them.holders[0].runtime.statistics().serving).revoked == 1
    await them.assert_nothing_pinned()


async def test_blocks_that_were_found_before_new_weights_are_not_leased_after(them: Fleet) -> None:
    (holder,) = them.holders
    slow = SlowCache(holder.prefix_cache)
    holder.share(slow)
    pulling = asyncio.ensure_future(them.pull())
    await until(lambda: slow.asked)
    holder.runtime.set_weights("step-7")
    slow.open.set()
    assert (await pulling).num_tokens == 0
    assert holder.sharing.statistics.missed == 1
    await them.assert_nothing_pinned()


async def test_a_pull_under_way_brings_nothing_if_the_reader_gets_other_weights(them: Fleet) -> None:
    """Its cached tokens are of the old ones."""
    pulling = await them.hold()
    them.reader.runtime.set_weights("step-7")
    them.release_reads()
    report = await pulling
    assert (report.num_tokens, report.source) == (0, "")
    assert "were replaced by 'step-7'" in report.answers[0].why


async def test_nothing_found_is_no_error_nor_are_peers_that_cannot_be() -> None:
    async with fleet(2) as them:
        report = await them.pull()
        assert (report.num_tokens, report.source, report.load) == (0, "", None)
        nobody = await them.pull(
            peers=["tcp://127.0.0.1:1", PeerAddress(engine_id="gone", address="tcp://127.0.0.1:1")]
        )
        assert nobody.num_tokens == 0
        assert all("127.0.0.1:1" in answer.why for answer in nobody.answers)
        wrong = await them.pull(peers=["", "tcp://", "nonsense", 5, {}, {"remote_engine_id": object()}])
        assert wrong.num_tokens == 0
        assert all(answer.why for answer in wrong.answers)
        assert (await them.pull(peers=[])).answers == ()


async def test_a_holder_that_is_named_twice_is_asked_once(them: Fleet, caplog: pytest.LogCaptureFixture) -> None:
    """By the same name. A holder that is known in two ways has one offer, and its log has no error of the other."""
    (holder,) = them.holders
    by_name = PeerAddress(engine_id="holder-0", address=holder.address)
    (offer,) = await them.seek(peers=[holder.address] * 5)
    assert await them.reader.runtime.release_blocks(offer.ticket)
    report = await them.pull(peers=[holder.address, by_name, holder.address])
    assert [answer.num_tokens for answer in report.answers] in ([len(PROMPT), 0], [0, len(PROMPT)])
    assert any("has an offer already" in answer.why for answer in report.answers)
    assert report.num_tokens == len(PROMPT)
    assert holder.sharing.statistics.failed == 0
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_run_that_is_reclaimed_while_it_is_read_is_a_miss(them: Fleet) -> None:
    """And its blocks are its owner's at once: its seal is looked at after the last byte."""
    (holder,) = them.holders
    pull = await them.hold()
    assert holder.sharing.pinned_blocks == 8
    assert holder.sharing.reclaim(3) == 8
    assert not +holder.prefix_cache.pins
    assert known(holder.runtime.statistics().blocks).leased == 0
    holder.prefix_cache.evict(range(8))
    them.release_reads()
    report = await pull
    assert report.num_tokens == 0
    assert "the lease has ended" in report.answers[0].why
    assert holder.sharing.statistics.reclaimed == 1


async def test_the_oldest_runs_are_reclaimed_and_no_more_than_are_needed() -> None:
    async with fleet() as them:
        (holder,), other = them.holders, PROMPT[::-1]
        holder.prefix_cache.put(PROMPT[: 2 * TOKENS], [0, 1])
        holder.prefix_cache.put(other[: 3 * TOKENS], [5, 6, 7])
        await them.seek()
        (newer,) = await them.seek(request_id="newer", keys=prefix_keys(other, TOKENS))
        assert holder.sharing.pinned_blocks == 5
        assert holder.sharing.reclaim(1) == 2
        assert +holder.prefix_cache.pins == {5: 1, 6: 1, 7: 1}
        assert await them.reader.runtime.release_blocks(newer.ticket)


@pytest.mark.parametrize("late", [False, True])
async def test_the_rest_comes_from_the_next_source(two: Fleet, late: bool) -> None:
    """A source that answers while the best one is read counts, too. A whole prefix ends the wait for others."""
    first, second = two.holders
    slow = SlowCache(second.prefix_cache)
    if late:
        second.share(slow)
    pull = await two.hold()
    assert slow.asked == late
    first.sharing.close()
    two.release_reads()
    slow.open.set()
    report = await pull
    two.assert_read(second, [0, 1, 2, 3], [11, 12, 13, 14])
    assert (report.num_tokens, report.source.split()[0]) == (4 * TOKENS, "holder-1")
    assert two.counts.failed_sources == 1
    assert (await two.pull(peers=[first.address])).num_tokens == 0


@pytest.mark.parametrize("fails", [0, 1, 2])
async def test_holders_of_as_much_are_the_sources_of_one_load(fails: int) -> None:
    """The load goes on with the next holder. Failed holders have an error, and unread offers are given back."""
    async with fleet(3) as them:
        for holder in them.holders:
            holder.prefix_cache.put(PROMPT[: 7 * TOKENS], range(7))  # with all of it, others would not be waited for
        pull = await them.hold()
        for _ in range(fails):
            (read,) = them.reader.transport.held
            holder = next(one for one in them.holders if read.peer.startswith(f"{one.runtime.config.engine_id}/"))
            holder.sharing.close()
            them.reader.transport.perform()
            await until(lambda read=read: pull.done() or [read] != list(them.reader.transport.held) != [])  # type: ignore[misc]
        them.release_reads()
        report = await pull
        load = known(report.load)
        assert [one.outcome for one in load.attempts] == ["LeaseExpired"] * fails + ["loaded"]
        assert report.source.startswith(load.attempts[-1].engine_id)
        whys = sorted(answer.why for answer in report.answers)
        assert [why[:14] for why in whys] == ["", *["another peer w"] * (2 - fails), *["request 'req' "] * fails]
        counts = them.counts
        assert (counts.hits, counts.failed_sources, counts.bytes) == (1, fails, report.bytes)


async def test_a_pull_that_is_over_reads_from_no_other_source() -> None:
    """Not even from a source that is left: another load would have another deadline."""
    async with fleet(2, base=replace(BASE, cancel_grace_s=WAIT_S)) as them:
        for holder in them.holders:
            holder.prefix_cache.put(PROMPT, range(8))
        pull = await them.hold(deadline_s=0.2)
        assert not (await asyncio.wait({pull}, timeout=0.3))[0], "its blocks are not safe"
        them.reader.transport.perform()
        report = await pull
        assert (report.num_tokens, len(them.reader.transport.held)) == (0, 0)
        assert them.counts.failed_sources == 1


async def test_a_holder_without_free_host_blocks_is_busy_and_reports_no_fault_of_its_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An engine with fewer host blocks than its readers need at once."""
    kv_caches, _ = SIZE.make("any")
    block_bytes = sum(tensor.nbytes for tensor in kv_caches.values()) // SIZE.num_blocks
    async with fleet(base=replace(BASE, staging="always", host_buffer_bytes_max=5 * block_bytes)) as them:
        (holder,) = them.holders
        holder.prefix_cache.put(PROMPT[: 4 * TOKENS], range(4))
        (first,) = await them.seek()
        assert await them.seek() == ()
        counts = holder.sharing.statistics
        assert (counts.found, counts.busy, counts.failed) == (1, 1, 0)
        assert await them.reader.runtime.release_blocks(first.ticket)
        await them.assert_nothing_pinned()
    assert [one for one in caplog.records if one.levelname == "ERROR"] == []


async def test_what_is_pinned_is_bounded_and_each_block_counts_once() -> None:
    async with fleet(pinned_blocks_max=4) as them:
        (holder,) = them.holders
        holder.prefix_cache.put(PROMPT, range(8))
        holder.prefix_cache.put(other := [7] * 8 * TOKENS, range(8, 16))
        (first,), (second,) = [await them.seek() for _ in range(2)]
        assert first.num_tokens == second.num_tokens == 4 * TOKENS
        assert holder.sharing.pinned_blocks == 4
        assert await them.seek(keys=prefix_keys(other, TOKENS)) == ()
        assert holder.sharing.statistics.busy == 1
        for offer in (first, second):
            assert await them.reader.runtime.release_blocks(offer.ticket)
        await them.assert_nothing_pinned()
        assert (await them.pull(keys=prefix_keys(other, TOKENS))).num_tokens == 4 * TOKENS


async def test_many_pull_one_prefix_at_once() -> None:
    """Their leases share the blocks. The source with fewer pulls is asked first."""
    async with fleet(3) as them:
        for one in them.holders:
            one.prefix_cache.put(PROMPT[: 2 * TOKENS], [5, 6])
        keys = prefix_keys(PROMPT[: 2 * TOKENS], TOKENS)
        pulls = [them.pull(request_id=f"req-{at}", keys=keys, block_ids=[2 * at, 2 * at + 1]) for at in range(8)]
        reports = await asyncio.gather(*pulls)
        assert all(report.num_tokens == 2 * TOKENS for report in reports)
        await them.assert_nothing_pinned()
        (first, *_), (second, *_) = [await them.seek() for _ in range(2)]
        assert first.queued_bytes == 0
        assert second.queued_bytes == 2 * them.reader.layout.block_size_bytes
        for one in them.holders:
            one.sharing.reclaim(16)


async def test_an_offer_can_be_loaded_as_any_ticket(them: Fleet) -> None:
    (offer,) = await them.seek(block_ids=[])
    request = LoadRequest("req", ticket=offer.ticket.to_params(), block_ids=range(8), verify=True)
    assert (await them.reader.runtime.load_blocks(request)).verified
    them.assert_read(them.holders[0], range(8), range(8))


async def test_an_answer_that_comes_too_late_is_given_back(them: Fleet) -> None:
    (holder,) = them.holders
    slow = SlowCache(holder.prefix_cache)
    sharing = holder.share(slow)
    for why in "it has not answered in time", "it has not answered an earlier question yet":
        assert (await them.pull(answer_within_s=0.05)).answers[0].why == why
    slow.open.set()
    await until(lambda: sharing.statistics.found)
    await them.assert_nothing_pinned()
    assert (await them.pull()).num_tokens == len(PROMPT)


@pytest.mark.parametrize("how", ["cancelled", "another one has all of it", "a shorter time"])
async def test_who_has_not_answered_is_passed_over_only_once_its_time_has_passed(two: Fleet, how: str) -> None:
    """A healthy engine has the time that the question of now gives it, whatever has become of earlier ones."""
    first, second = two.holders
    slow = SlowCache(first.prefix_cache if how != "another one has all of it" else second.prefix_cache)
    holder = first if how != "another one has all of it" else second
    holder.share(slow)
    for asked in range(1, 4):
        if how == "cancelled":
            pull = asyncio.ensure_future(two.pull(peers=[holder.address]))
            await until(lambda asked=asked: slow.asked == asked)  # type: ignore[misc]
            pull.cancel()
            with pytest.raises(asyncio.CancelledError):
                await pull
        elif how == "a shorter time":
            assert (await two.pull(peers=[holder.address], answer_within_s=1e-4)).num_tokens == 0
        else:
            assert (await two.pull()).num_tokens == len(PROMPT)
            await until(lambda asked=asked: slow.asked == asked)  # type: ignore[misc]
    last = asyncio.ensure_future(two.pull(peers=[holder.address]))
    if how != "a shorter time":
        await until(lambda: slow.asked == 4)
    slow.open.set()
    assert (await last).num_tokens > 0


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(PinnedPrefix((0, 1), 9 * TOKENS), id="more than was asked for"),
        pytest.param(PinnedPrefix((0, 1), 3), id="no multiple"),
        pytest.param(PinnedPrefix((0, 99), 2 * TOKENS), id="blocks that are not there"),
        pytest.param(PinnedPrefix((0,), 2 * TOKENS), id="too few blocks"),
        pytest.param(PinnedPrefix(("a",), TOKENS), id="no blocks"),  # type: ignore[arg-type]
        pytest.param("run", id="no run"),
        pytest.param(ZeroDivisionError("bug"), id="raises"),
    ],
)
async def test_a_prefix_cache_that_lies_or_fails_costs_a_miss(them: Fleet, given: Any) -> None:
    prefix_cache = LyingCache(given)
    sharing = them.holders[0].share(prefix_cache)
    assert (await them.pull()).num_tokens == 0
    assert sharing.statistics.failed + sharing.statistics.missed == 1
    assert prefix_cache.unpinned == ([given] if isinstance(given, PinnedPrefix) else [])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_tokens": 33}, "it offers 33 tokens of a prefix, asked for up to 32, in steps of 4"),
        ({"num_tokens": 36}, "it offers 36 tokens of a prefix, asked for up to 32, in steps of 4"),
        ({"num_tokens": 1 << 62}, f"it offers {1 << 62} tokens of a prefix, asked for up to 32, in steps of 4"),
        ({"num_tokens": 30}, "it offers 30 tokens of a prefix, asked for up to 32, in steps of 4"),
        ({"num_tokens": 0}, "it offers 0 tokens of a prefix, asked for up to 32, in steps of 4"),
        (
            {"block_ids": ((0, 1, 2, 3, 4, 5, 6),)},
            "it offers 32 tokens of a prefix in 7 blocks of 4 tokens, which take 8",
        ),
        ({"block_ids": ((),)}, "it offers 32 tokens of a prefix in 0 blocks of 4 tokens, which take 8"),
        ({"block_ids": ((0, 1, 2, 3, 4, 5, 6, 99),)}, "99"),
    ],
)
async def test_an_offer_that_cannot_be_an_answer_is_not_believed(
    them: Fleet, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], says: str
) -> None:
    """Nor handed to anybody: a scheduler would make room for as many tokens as it says."""
    (holder,) = them.holders
    answer = holder.sharing.answer

    def lie(question: SeekRequest) -> Any:
        told = answer(question)
        assert isinstance(told, messages.LeaseAnswer)
        assert told.lease is not None
        return msgspec.structs.replace(told, offer=msgspec.structs.replace(told.offer, **changes))

    with monkeypatch.context() as patched:
        patched.setattr(holder.sharing, "answer", lie)
        assert await them.seek(block_ids=[]) == ()
        report = await them.pull()
        assert (report.num_tokens, report.load, report.answers[0].num_tokens) == (0, None, 0)
        assert "ProtocolError" not in report.answers[0].why
        assert says in report.answers[0].why
        holder.sharing.reclaim(8)
    assert (await them.pull()).num_tokens == len(PROMPT)


async def test_what_a_prefix_cache_gives_twice_ends_for_both_readers(them: Fleet) -> None:
    run = PinnedPrefix((0, 1), 2 * TOKENS)
    prefix_cache = LyingCache(run)
    sharing = them.holders[0].share(prefix_cache)
    for _ in range(2):
        (offer,) = await them.seek()
        assert offer.num_tokens == 2 * TOKENS
    assert (sharing.statistics.prefixes, sharing.pinned_blocks) == (2, 2)
    sharing.end(PinnedPrefix((0, 1), 2 * TOKENS))
    assert sharing.statistics.prefixes == 2, "another object"
    for _ in range(2):
        sharing.end(run)
        assert (sharing.statistics.prefixes, sharing.pinned_blocks) == (0, 0)
    assert sharing.statistics.reclaimed == 2
    assert prefix_cache.unpinned == [run, run]


async def test_what_takes_longer_than_computing_is_not_pulled(them: Fleet) -> None:
    assert (await them.pull(recompute_s_per_token=1e-12)).num_tokens == len(PROMPT)  # nobody knows yet
    report = await them.pull(recompute_s_per_token=1e-12)
    assert report.num_tokens == 0
    assert report.compute_s == pytest.approx(32e-12)
    assert report.pull_s is not None
    assert report.pull_s > 32e-12
    assert "computing takes" in report.answers[0].why
    assert (await them.pull(recompute_s_per_token=10.0)).num_tokens == len(PROMPT)


# --- early ends


async def test_a_pull_that_is_cancelled_gives_everything_back(two: Fleet) -> None:
    pull = await two.hold()
    pull.cancel()
    two.release_reads()
    with pytest.raises(asyncio.CancelledError):
        await pull
    await two.assert_nothing_pinned()


async def test_a_holder_that_unregisters_ends_what_it_shares(them: Fleet) -> None:
    (holder,) = them.holders
    (offer,) = await them.seek(block_ids=[])
    await holder.restart()
    assert not +holder.prefix_cache.pins
    with pytest.raises((LeaseExpired, PeerNotReady)):
        await them.reader.runtime.load_blocks(LoadRequest("req", ticket=offer.ticket, block_ids=range(8)))
    assert (await them.pull()).num_tokens == 0
    holder.prefixes.share(holder.prefix_cache)
    assert (await them.pull()).num_tokens == 4 * TOKENS  # a quarter of its blocks


async def test_a_holder_that_has_restarted_is_pulled_from_again(them: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under its address, and without a goodbye: its reader finds out by the answer."""
    monkeypatch.setattr(Goodbyes, "remember", lambda *_: None)
    (holder,) = them.holders
    assert (await them.pull()).num_tokens == len(PROMPT)
    await holder.restart()
    sharing = holder.share(holder.prefix_cache)
    assert (await them.pull()).num_tokens == len(PROMPT)
    assert sharing.statistics.found == 1


async def test_a_prefix_cache_that_answers_when_its_kv_cache_is_gone_is_unpinned(them: Fleet) -> None:
    (holder,) = them.holders
    slow = SlowCache(holder.prefix_cache)
    holder.share(slow)
    pull = asyncio.ensure_future(them.pull(answer_within_s=0.5))
    await until(lambda: slow.asked)
    await holder.restart()
    slow.open.set()
    await until(lambda: holder.prefix_cache.asked)
    assert (await pull).num_tokens == 0


# --- what is refused


async def test_what_a_reader_writes_cannot_be_shared(two: Fleet) -> None:
    """Blocks are a load's until it has ended: the prefix cache has said too early that they hold something."""
    first, second = two.holders
    sharing = two.prefixes.share(prefix_cache := FakePrefixCache(TOKENS))
    prefix_cache.put(PROMPT, range(8))
    pull = await two.hold(peers=[first.address])
    asked = two.request(block_ids=[], peers=[two.reader.runtime.address])
    assert await second.prefixes.seek(asked) == ()
    assert sharing.statistics.failed == 1
    two.release_reads()
    await pull
    sharing.close()


async def test_a_request_that_cannot_be_right_or_whose_blocks_are_busy(them: Fleet) -> None:
    """Values of another type are in `tests/test_border.py`."""
    wrong: list[tuple[str, Any]] = [
        ("keys", []),
        ("keys", [b"short"]),
        ("key_tokens", 0),
        ("peers", ["tcp://127.0.0.1:1"] * 65),
        ("cached_tokens", -1),
        ("deadline_s", float("nan")),
        ("recompute_s_per_token", -1),
        ("block_ids", [99]),
    ]
    for name, value in wrong:
        with pytest.raises(RequestError, match=f"request 'req'.*{name.removesuffix('_ids')}"):
            await them.pull(**{name: value})
    lease = them.reader.runtime.serve_blocks(ServeRequest("other", block_ids=[2], num_tokens=TOKENS))
    with pytest.raises(BlocksBusy):
        await them.pull()
    await lease.revoke()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"block_ids": range(7)},
            "7 blocks of 4 tokens, but its keys are for 32 tokens, 0 of them cached, which take 8",
        ),
        (
            {"block_ids": range(9)},
            "9 blocks of 4 tokens, but its keys are for 32 tokens, 0 of them cached, which take 8",
        ),
        ({"block_ids": []}, "0 blocks of 4 tokens, but its keys are for 32 tokens, 0 of them cached, which take 8"),
        ({"cached_tokens": 8}, "8 blocks of 4 tokens, but its keys are for 32 tokens, 8 of them cached, which take 6"),
        (
            {"cached_tokens": 32},
            "8 blocks of 4 tokens, but its keys are for 32 tokens, 32 of them cached, which take 0",
        ),
        ({"key_tokens": 2, "block_ids": range(8)}, "8 blocks of 4 tokens, but its keys are for 16 tokens"),
        (
            {"keys": prefix_keys(PROMPT, 16), "key_tokens": 16, "block_ids": [0, 1]},
            "2 blocks of 4 tokens, but its keys",
        ),
        ({"cached_tokens": 33, "block_ids": []}, "cached_tokens is 33, beyond its keys, which are for 32 tokens"),
        ({"cached_tokens": 36, "block_ids": []}, "cached_tokens is 36, beyond its keys, which are for 32 tokens"),
        ({"cached_tokens": 1 << 62, "block_ids": []}, "beyond its keys, which are for 32 tokens"),
    ],
)
async def test_blocks_that_are_not_those_of_the_keys_are_refused_before_anybody_is_asked(
    them: Fleet, changes: dict[str, Any], says: str
) -> None:
    """Fewer would be filled from the wrong end, and reported as the whole prefix."""
    with pytest.raises(RequestError, match=f"^request 'req': .*{says}"):
        await them.pull(**changes)
    assert (them.holders[0].prefix_cache.asked, them.counts.pulls) == (0, 0)
    if "cached_tokens" in changes and not changes.get("block_ids", True):
        with pytest.raises(RequestError, match=says):
            await them.seek(**changes)


async def test_who_may_not_share_is_told(them: Fleet) -> None:
    """Sharing twice, an object that is no prefix cache, another thread, a consumer."""
    (holder,) = them.holders
    with pytest.raises(UsageError, match="shared already"):
        holder.prefixes.share(FakePrefixCache(TOKENS))
    with pytest.raises(UsageError, match="expected a PrefixCache"):
        them.prefixes.share(object())  # type: ignore[arg-type]
    for work in (
        lambda: holder.sharing.reclaim(1),
        lambda: holder.sharing.end(PinnedPrefix((), 4)),
        holder.sharing.close,
    ):
        with pytest.raises(UsageError, match="loop that opened"):
            await asyncio.to_thread(work)
    async with fleet(0, base=replace(BASE, role="consumer")) as consumer:
        with pytest.raises(UsageError, match="'consumer'"):
            consumer.prefixes.share(FakePrefixCache(TOKENS))


async def test_an_engine_without_the_part_says_so_and_is_asked_in_vain(them: Fleet) -> None:
    """It is no error of the reader's, and the peer is as good as before: loads from it go on."""
    base = replace(them.reader.runtime.config, listen="tcp://127.0.0.1:0", engine_id="without")
    network = them.reader.transport._network
    async with open_engine("without", base, lambda _, name: InprocTransport(name, network), size=SIZE) as without:
        report = await them.pull(peers=[without.runtime.address, them.holders[0].address])
        assert report.num_tokens == len(PROMPT)
        (why,) = (answer.why for answer in report.answers if answer.peer.startswith("without"))
        assert "refused: nothing here answers a question of kind 'seek'" in why
        lease = without.runtime.serve_blocks(ServeRequest("req", [3], TOKENS))
        assert (await them.reader.runtime.load_blocks(LoadRequest("req", lease.ticket, [9]))).tokens == TOKENS


async def test_a_pull_under_way_is_waited_for_when_its_runtime_drains(two: Fleet) -> None:
    """Also while it has no load: it waits for an answer."""
    first = two.holders[0]
    slow = SlowCache(first.prefix_cache)
    first.share(slow)
    pull = asyncio.ensure_future(two.pull(peers=[first.address]))
    await until(lambda: slow.asked)
    assert two.counts.open_requests == 1
    draining = asyncio.ensure_future(two.reader.runtime.drain(WAIT_S))
    await until(lambda: two.reader.runtime.state is RuntimeState.DRAINING)
    slow.open.set()
    assert await draining
    assert (await pull).num_tokens == len(PROMPT)
    assert two.counts.open_requests == 0


async def test_forged_questions_pin_nothing(them: Fleet) -> None:
    (holder,) = them.holders
    await them.pull()
    await them.assert_nothing_pinned()
    asked, host = holder.prefix_cache.asked, host_of(holder.runtime)
    question = SeekRequest(
        reader="somebody/0.0.0#1",
        target=host.context.local.caller,
        request_id="forged",
        keys=b"",
        key_tokens=TOKENS,
    )
    for keys, key_tokens in ((b"x" * 33, 4), (b"x" * 32, 1 << 62), (b"x" * (32 * 1024), 4)):
        reply = holder.sharing.answer(msgspec.structs.replace(question, keys=keys, key_tokens=key_tokens))
        assert isinstance(reply, messages.Refusal | messages.LeaseAnswer)
    assert holder.prefix_cache.asked <= asked + 1
    assert holder.sharing.pinned_blocks == 0


class SlowCache:
    """A prefix cache that lives elsewhere, and answers when it is let."""

    def __init__(self, inside: FakePrefixCache) -> None:
        self.inside = inside
        self.open = asyncio.Event()
        self.asked = 0

    def match(self, keys: Sequence[bytes], key_tokens: int) -> Awaitable[PinnedPrefix | None]:
        self.asked += 1

        async def answer() -> PinnedPrefix | None:
            await self.open.wait()
            return self.inside.match(keys, key_tokens)

        return answer()

    def unpin(self, run: PinnedPrefix) -> None:
        self.inside.unpin(run)


class LyingCache:
    def __init__(self, given: Any) -> None:
        self.given = given
        self.unpinned: list[PinnedPrefix] = []

    def match(self, keys: Sequence[bytes], key_tokens: int) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given

    def unpin(self, run: PinnedPrefix) -> None:
        self.unpinned.append(run)
