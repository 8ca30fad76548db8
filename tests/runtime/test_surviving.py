"""A load of several tickets: who is read next, when, what counts, and what ends it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pairs import cache_of, known
from tests_support import PATIENT, WAIT_S, Records, in_virtual_time, leases_ended, until

import kvflow
from kvflow import Attempt, Config, Lease, LoadReport, LoadRequest, ServeRequest, Ticket
from kvflow.errors import (
    BlocksBusy,
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.load.surviving import LATE_LEAST_S, SOURCES_MAX
from kvflow.testing import InprocCluster, InprocTransport, TestEngine, assert_loaded, assert_quiet
from kvflow.transport.base import TransportError

BLOCKS, OURS = [3, 7, 9], [0, 1, 2]
DEADLINE_S = 5.0
READ_S = 1e-3


@dataclass
class Trio:
    """Two engines that hold the same prompt, by different bytes, and one that loads it."""

    cluster: InprocCluster
    first: TestEngine
    second: TestEngine
    reader: TestEngine
    records: Records = field(default_factory=Records)

    @property
    def transport(self) -> InprocTransport:
        return self.reader.transport

    @property
    def posted(self) -> list[str]:
        """Of whom reads are held, by engine."""
        return [read.peer.split("/")[0] for read in self.transport.held]

    def offer(self, engine: TestEngine, request_id: str = "req", **options: Any) -> Lease:
        tokens = len(BLOCKS) * engine.layout.block_size
        options = {"block_ids": BLOCKS, "num_tokens": tokens, **options}
        return engine.runtime.serve_blocks(ServeRequest(request_id, **options))

    def both(self) -> list[Lease]:
        return [self.offer(self.first), self.offer(self.second)]

    def request(self, leases: Sequence[Lease | Ticket], **options: Any) -> LoadRequest:
        tickets = [one.ticket if isinstance(one, Lease) else one for one in leases]
        return LoadRequest("req", [one.to_params() for one in tickets], OURS, **options)

    async def load(self, leases: Sequence[Lease | Ticket], **options: Any) -> LoadReport:
        return await self.reader.runtime.load_blocks(self.request(leases, **options))

    def start(self, leases: Sequence[Lease | Ticket], **options: Any) -> kvflow.Load:
        return self.reader.runtime.start_load(self.request(leases, **options))

    async def warm(self) -> None:
        """Both are connected, and have a history."""
        for engine in (self.first, self.second):
            lease = self.offer(engine, "warm")
            load = self.reader.runtime.start_load(LoadRequest("warm", lease.ticket, [10, 11, 12]))
            self.transport.faults.hold = True
            await until(lambda: self.transport.held)
            await asyncio.wait([asyncio.create_task(load.settled())], timeout=READ_S)
            self.transport.faults.hold = False
            self.transport.perform()
            await load
            await lease
        self.reader.cache.fill()
        self.records.loads.clear()

    def assert_all_of(self, engine: TestEngine) -> None:
        """Every byte is this engine's, and nothing beside was touched."""
        assert_loaded(self.reader.cache, OURS, engine.cache, BLOCKS)

    def outcomes(self, attempts: Sequence[Attempt]) -> list[tuple[str, str]]:
        return [(one.engine_id, one.outcome) for one in attempts]


@contextlib.asynccontextmanager
async def trio(config: Config = PATIENT) -> AsyncIterator[Trio]:
    cluster, base = InprocCluster(), replace(config, load_deadline_s=DEADLINE_S)
    async with (
        cluster.engine("first", config=base) as first,
        cluster.engine("second", config=base) as second,
        cluster.engine("reader", config=base) as reader,
    ):
        made = Trio(cluster, first, second, reader)
        with reader.runtime.observed_by(made.records):
            yield made
        for engine in (first, second, reader):
            cache = engine.runtime._supervisor.cache
            if cache is not None:
                cache.serving.close()
                await leases_ended(engine.runtime)
                assert_quiet(engine.runtime.statistics())


@in_virtual_time
async def test_the_first_gives_all_and_the_other_lease_is_given_back() -> None:
    async with trio() as made:
        leases = made.both()
        report = await made.load(leases)
        made.assert_all_of(made.first)
        assert made.outcomes(report.attempts) == [("first", "loaded")]
        assert report.attempts[0].bytes == report.bytes
        assert [str(await lease) for lease in leases] == ["read", "read"]
        assert known(made.reader.runtime.statistics().loading).sources_left == 0


@in_virtual_time
async def test_one_ticket_is_an_ordinary_load() -> None:
    async with trio() as made:
        lease = made.offer(made.first)
        assert (await made.load([lease])).attempts == ()
        assert made.records.loads[0].attempts == ()


@in_virtual_time
async def test_who_has_ended_is_followed_by_the_next() -> None:
    async with trio() as made:
        leases = made.both()
        await leases[0].revoke()
        report = await made.load(leases)
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "LeaseExpired"), ("second", "loaded")]
        (record,) = made.records.loads
        assert (record.outcome, record.peer_engine_id) == ("loaded", "second")
        assert tuple(record.attempts) == tuple(report.attempts)
        assert sum(record.seconds.values()) == pytest.approx(report.total_s)
        assert known(made.reader.runtime.statistics().loading).sources_left == 1


@in_virtual_time
async def test_blocks_stay_claimed_from_source_to_source() -> None:
    """A failing read of the first, while others try to get the blocks in every turn of the loop."""
    async with trio() as made:
        await made.warm()
        made.transport.faults.fail_next.append(TransportError("scripted"))
        load = made.start(made.both())
        refused = 0
        while not load.done:
            await asyncio.sleep(0)
            if not load.done and load.work is not None and load.work.attempts is not None:
                with pytest.raises(BlocksBusy):
                    cache_of(made.reader.runtime).ledger.begin_load(load.work.entries.copy())
                refused += 1
        report = await load
        assert refused > 2
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "TransferFailed"), ("second", "loaded")]
        assert "scripted" in report.attempts[0].error


@in_virtual_time
async def test_who_is_late_is_left_once_nothing_of_it_can_land() -> None:
    async with trio() as made:
        await made.warm()
        loop, leases = asyncio.get_running_loop(), made.both()
        made.transport.faults.hold = True
        begun_s, load = loop.time(), made.start(leases)
        await asyncio.wait([asyncio.ensure_future(asyncio.sleep(0))])
        await until(lambda: made.posted == ["first"])
        await asyncio.wait([load._task], timeout=LATE_LEAST_S * 3)  # type: ignore[list-item]
        assert made.posted == ["first"], "the second one is not read into the same blocks yet"
        made.transport.perform(1)  # what was asked of the first lands after all
        await until(lambda: made.posted == ["second"])
        made.transport.faults.hold = False
        made.transport.perform()
        report = await load
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "late"), ("second", "loaded")]
        assert "no read of it has ended for" in report.attempts[0].error
        assert LATE_LEAST_S < report.attempts[0].seconds <= loop.time() - begun_s
        assert [str(await lease) for lease in leases] == ["read", "read"], "the late one is told, too"
        peers = {one.engine_id: one.failures for one in made.reader.runtime.statistics().peers}
        assert peers == {"first": 1, "second": 0}


@in_virtual_time
async def test_who_is_late_holds_nothing_where_its_reads_can_be_given_up() -> None:
    async with trio(replace(PATIENT, cancel_grace_s=0.1)) as made:
        await made.warm()
        made.transport.faults.hold = made.transport.faults.gives_up = True
        load = made.start(made.both())
        await asyncio.wait([load._task], timeout=LATE_LEAST_S * 3)  # type: ignore[list-item]
        assert made.posted == ["second"]
        made.transport.faults.hold = False
        made.transport.perform()
        report = await load
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "late"), ("second", "loaded")]
        assert "no read of it has ended for" in report.attempts[0].error


@in_virtual_time
async def test_a_source_that_never_settles_ends_the_load_at_its_deadline_with_its_quarantine() -> None:
    async with trio(replace(PATIENT, cancel_grace_s=0.1)) as made:
        await made.warm()
        made.transport.faults.hold = True
        begun_s, load = asyncio.get_running_loop().time(), made.start(made.both())
        with pytest.raises(DeadlineExceeded) as caught:
            await load
        assert asyncio.get_running_loop().time() - begun_s == pytest.approx(DEADLINE_S, abs=0.2)
        assert caught.value.quarantine is load
        assert made.posted == ["first"]
        (record,) = made.records.loads
        assert made.outcomes(record.attempts) == [("first", "ended")]
        assert known(made.reader.runtime.statistics().blocks).quarantined == len(OURS)
        made.transport.faults.hold = False
        made.transport.perform()
        await load.settled()
        assert known(made.reader.runtime.statistics().blocks).free == 16


@in_virtual_time
async def test_the_last_source_is_never_late() -> None:
    """Nor one that has only `again` behind it."""
    async with trio() as made:
        await made.warm()
        made.transport.faults.hold = True
        load = made.start([made.offer(made.first)], again=never, deadline_s=LATE_LEAST_S * 4)
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait([load._task], timeout=LATE_LEAST_S * 4)  # type: ignore[list-item]
            made.transport.faults.hold = False
            made.transport.perform()
            await load


async def never(attempts: Sequence[Attempt]) -> None:
    raise AssertionError(f"asked after {attempts}")


@in_virtual_time
async def test_progress_keeps_a_source() -> None:
    """Reads that end one after the other, each sooner than it would be late: the whole load takes much longer."""
    config = replace(PATIENT, limits=replace(PATIENT.limits, slice_bytes_max=1, slices_in_flight_max=1))
    async with trio(config) as made:
        await made.warm()
        made.transport.faults.hold = True
        load = made.start(made.both())
        for _ in range(len(BLOCKS)):
            await until(lambda: made.transport.held)
            await asyncio.wait([load._task], timeout=LATE_LEAST_S * 0.8)  # type: ignore[list-item]
            made.transport.perform()
        made.transport.faults.hold = False
        report = await load
        assert report.total_s > LATE_LEAST_S * 2
        assert made.outcomes(report.attempts) == [("first", "loaded")]


@in_virtual_time
async def test_when_all_have_failed_the_last_error_names_the_others() -> None:
    async with trio() as made:
        leases = made.both()
        for lease in leases:
            await lease.revoke()
        with pytest.raises(LeaseExpired, match="second") as caught:
            await made.load(leases)
        (note,) = caught.value.__notes__
        assert note.startswith("before that, 'first' at tcp://")
        (record,) = made.records.loads
        assert made.outcomes(record.attempts) == [("first", "LeaseExpired"), ("second", "LeaseExpired")]


@in_virtual_time
async def test_a_failed_load_leaves_its_tickets_to_its_caller() -> None:
    async with trio() as made:
        leases = made.both()
        made.transport.faults.fail_next.extend([TransportError("scripted")] * 2)
        with pytest.raises(TransferFailed):
            await made.load(leases)
        assert [str(lease.state) for lease in leases] == ["offered", "offered"]
        report = await made.load(leases)
        assert made.outcomes(report.attempts)[-1][1] == "loaded"


@in_virtual_time
async def test_who_is_backed_off_from_comes_last() -> None:
    async with trio() as made:
        await made.warm()
        for _ in range(2):  # the second failed read in a row costs a wait
            made.transport.faults.fail_next.append(TransportError("scripted"))
            with pytest.raises(TransferFailed):
                await made.load([made.offer(made.first, f"failing {_}")])
        report = await made.load(made.both())
        assert made.outcomes(report.attempts) == [("second", "loaded")]


@in_virtual_time
async def test_again_brings_another_ticket_and_hears_what_failed() -> None:
    async with trio() as made:
        leases, heard = made.both(), list[list[tuple[str, str]]]()
        await leases[0].revoke()

        async def again(attempts: Sequence[Attempt]) -> Any:
            heard.append(made.outcomes(attempts))
            return leases[1].ticket.to_params()

        report = await made.load(leases[:1], again=again)
        made.assert_all_of(made.second)
        assert heard == [[("first", "LeaseExpired")]]
        assert made.outcomes(report.attempts) == [("first", "LeaseExpired"), ("second", "loaded")]


@in_virtual_time
async def test_again_is_asked_so_many_times_and_no_more() -> None:
    async with trio() as made:
        asked: list[int] = []

        async def again(attempts: Sequence[Attempt]) -> Ticket:
            asked.append(len(attempts))
            lease = made.offer(made.second, f"again {len(attempts)}")
            await lease.revoke()
            return lease.ticket

        lease = made.offer(made.first)
        await lease.revoke()
        with pytest.raises(LeaseExpired):
            await made.load([lease], again=again, again_max=3)
        assert asked == [1, 2, 3]
        with pytest.raises(LeaseExpired):
            await made.load([lease], again=again, again_max=0)
        assert asked == [1, 2, 3]


@in_virtual_time
@pytest.mark.parametrize("how", ["cancelled", "failed", "of another prompt"])
async def test_what_again_brought_is_given_back_by_a_load_that_ends_without_it(how: str) -> None:
    """Nobody else knows of that ticket; those of its caller stay its caller's."""
    async with trio() as made:
        gone, kept = made.both()
        await gone.revoke()
        brought: list[Lease] = []

        async def again(_: Sequence[Attempt]) -> Ticket:
            other = {"block_ids": [*BLOCKS, 1], "num_tokens": 16} if how == "of another prompt" else {}
            brought.append(made.offer(made.second, "again", **other))
            made.transport.faults.hold = True
            return brought[0].ticket

        load = made.start([gone], again=again, again_max=1)
        if how != "of another prompt":
            await until(lambda: made.posted == ["second"])
        if how == "cancelled":
            load.cancel()
        elif how == "failed":
            made.transport.faults.fail_next.append(TransportError("scripted"))
        made.transport.faults.hold = False
        made.transport.perform()
        with pytest.raises((asyncio.CancelledError, TransferFailed, PromptMismatch)):
            await load
        async with asyncio.timeout(WAIT_S):
            await brought[0]
        assert not kept.done


@in_virtual_time
async def test_what_again_does_wrong_ends_the_load() -> None:
    async with trio() as made:
        lease = made.offer(made.first)
        await lease.revoke()
        longer = made.offer(made.second, block_ids=[*BLOCKS, 1], num_tokens=16)

        async def bug(_: Sequence[Attempt]) -> Ticket:
            raise ZeroDivisionError("scripted")

        async def refusing(_: Sequence[Attempt]) -> Ticket:
            raise PrefillFailed("no engine is left", request_id="req", peer="")

        async def nothing(_: Sequence[Attempt]) -> None:
            return None

        async def another_prompt(_: Sequence[Attempt]) -> Ticket:
            return longer.ticket

        async def nonsense(_: Sequence[Attempt]) -> Any:
            return {"remote": 1}

        cases: list[tuple[Any, type[KVFlowError], str]] = [
            (bug, PrefillFailed, "`again` failed: ZeroDivisionError: scripted"),
            (refusing, PrefillFailed, "no engine is left"),
            (nothing, LeaseExpired, "the offer|it has ended"),
            (another_prompt, PromptMismatch, "'first' at .* offers 12 tokens, 'second' at .* 16"),
            (nonsense, RequestError, "request 'req': again: ticket"),
        ]
        for again, error, match in cases:
            with pytest.raises(error, match=match):
                await made.load([lease], again=again)
        with pytest.raises(RequestError, match="again: expected an async function, got 7"):
            await made.load([lease], again=7)
        assert known(made.reader.runtime.statistics().blocks).free == 16


@in_virtual_time
async def test_tickets_of_different_prompts_are_refused_before_anybody_is_asked() -> None:
    async with trio() as made:
        longer = made.offer(made.second, block_ids=[*BLOCKS, 1], num_tokens=16)
        with pytest.raises(PromptMismatch, match=r"'first' at .* offers 12 tokens, 'second' at .* 16"):
            await made.load([made.offer(made.first), longer])
        other = [made.offer(engine, "same", prompt=[at] * 12) for at, engine in enumerate((made.first, made.second))]
        with pytest.raises(PromptMismatch, match=r"'first' at .* has digest .*, 'second' at"):
            await made.load(other)
        salted = [made.offer(engine, engine.runtime.config.engine_id, prompt=[1] * 12) for engine in (made.first,)]
        salted += [made.offer(made.second, "otherwise", prompt=[2] * 12)]
        with pytest.raises(PromptMismatch, match="otherwise"):
            await made.load(salted, prompt=[1] * 12)
        assert made.reader.runtime.statistics().peers == ()
        assert known(made.reader.runtime.statistics().loading).refused == 3


@in_virtual_time
async def test_tickets_that_cannot_be_are_refused_before_anybody_is_asked() -> None:
    async with trio() as made:
        lease = made.offer(made.first)
        for wrong in ([lease.ticket, {"remote": 1}], [], [lease.ticket] * (SOURCES_MAX + 1), [lease.ticket, None], "x"):
            with pytest.raises(RequestError):
                await made.reader.runtime.load_blocks(LoadRequest("req", wrong, OURS))  # type: ignore[arg-type]
        assert made.reader.runtime.statistics().peers == ()
        await made.load([lease])


@in_virtual_time
async def test_a_cancelled_load_asks_nobody_else() -> None:
    async with trio() as made:
        await made.warm()
        made.transport.faults.hold = True
        leases = made.both()
        load = made.start(leases, again=never)
        await until(lambda: made.posted == ["first"])
        load.cancel()
        made.transport.faults.hold = False
        made.transport.perform()
        with pytest.raises(asyncio.CancelledError):
            await load
        await load.settled()
        (record,) = made.records.loads
        assert (record.outcome, made.outcomes(record.attempts)) == ("cancelled", [("first", "ended")])
        assert str(leases[1].state) == "offered"


@in_virtual_time
async def test_who_is_cancelled_while_the_source_turns_out_to_be_late_is_cancelled() -> None:
    """The two cancellations of one task are told apart, whichever comes first."""
    async with trio() as made:
        await made.warm()
        made.transport.faults.hold = True
        load = made.start(made.both())
        work = load.work
        assert work is not None
        await until(lambda: made.posted == ["first"])
        task = work.task
        assert task is not None
        while task.cancelling() == 0:
            await asyncio.wait([task], timeout=0.01)
        load.cancel()  # while it waits for the first one to settle
        made.transport.faults.hold = False
        made.transport.perform()
        with pytest.raises(asyncio.CancelledError):
            await load
        assert made.records.loads[0].outcome == "cancelled"


@in_virtual_time
async def test_a_deadline_while_a_late_source_settles_is_a_deadline() -> None:
    async with trio() as made:
        await made.warm()
        made.transport.faults.hold = True
        load = made.start(made.both(), deadline_s=LATE_LEAST_S * 2)
        await until(lambda: made.posted == ["first"])
        task = load.work.task  # type: ignore[union-attr]
        assert task is not None
        while task.cancelling() < 2:
            await asyncio.wait([task], timeout=0.01)
        made.transport.faults.hold = False
        made.transport.perform()
        with pytest.raises(DeadlineExceeded):
            await load
        assert made.records.loads[0].outcome == "DeadlineExceeded"


@in_virtual_time
async def test_closing_ends_it_whatever_is_left() -> None:
    async with trio() as made:
        await made.warm()
        made.transport.faults.hold = True
        load = made.start(made.both(), again=never)
        await until(lambda: made.posted == ["first"])
        closing = asyncio.create_task(made.reader.runtime.aclose())
        await asyncio.wait([closing], timeout=2.0)
        made.transport.faults.hold = False
        made.transport.perform()
        with pytest.raises(RuntimeClosed):
            await load
        await closing


@in_virtual_time
async def test_leases_of_tickets_that_wait_are_kept() -> None:
    """The first one is read for much longer than the second one's lease was to last."""
    config = replace(PATIENT, limits=replace(PATIENT.limits, slice_bytes_max=1, slices_in_flight_max=1))
    async with trio(config) as made:
        await made.warm()
        leases = [made.offer(made.first), made.offer(made.second, ttl_s=0.4)]
        made.transport.faults.hold = True
        load = made.start(leases)
        for _ in range(2):
            await until(lambda: made.transport.held)
            await asyncio.wait([load._task], timeout=0.4)  # type: ignore[list-item]
            made.transport.perform()
        assert str(leases[1].state) == "offered"
        made.transport.faults.fail_next.append(TransportError("scripted"))
        made.transport.faults.hold = False
        made.transport.perform()
        report = await load
        assert made.outcomes(report.attempts) == [("first", "TransferFailed"), ("second", "loaded")]
        made.assert_all_of(made.second)


@in_virtual_time
async def test_a_rendezvous_may_be_among_the_tickets() -> None:
    async with trio() as made:
        introduction = made.second.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket
        first = made.offer(made.first)
        await first.revoke()
        load = made.start([first, Ticket.rendezvous(introduction, "later")])
        await asyncio.wait([load._task], timeout=0.5)  # type: ignore[list-item]
        made.offer(made.second, "later")
        report = await load
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "LeaseExpired"), ("second", "loaded")]


@in_virtual_time
async def test_what_a_rendezvous_offers_is_compared_with_the_other_tickets() -> None:
    async with trio() as made:
        introduction = made.second.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket
        made.offer(made.second, "later", block_ids=[*BLOCKS, 1], num_tokens=16)
        first = made.offer(made.first)
        await first.revoke()
        with pytest.raises(PromptMismatch, match=r"'first' at .* offers 12 tokens, 'second' at .* 16"):
            await made.load([first, Ticket.rendezvous(introduction, "later")])


@in_virtual_time
async def test_a_prompt_that_breaks_while_it_is_computed_comes_from_the_next() -> None:
    """What the first had given by then is written again, so nobody was told that it may be used."""
    async with trio(replace(PATIENT, limits=replace(PATIENT.limits, slice_bytes_max=1))) as made:
        first, second = made.offer(made.first, computed_tokens=4), made.offer(made.second)
        load = made.start([first, second])

        async def follow() -> list[int]:
            return [progress.tokens async for progress in load]

        following = asyncio.create_task(follow())
        await asyncio.wait([following], timeout=0.5)
        first.advance(8)
        await asyncio.wait([following], timeout=0.5)
        first.fail("out of memory")
        assert await following == [12]
        report = await load
        made.assert_all_of(made.second)
        assert made.outcomes(report.attempts) == [("first", "PrefillFailed"), ("second", "loaded")]


@in_virtual_time
async def test_an_engine_that_no_load_has_ever_read_from_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where another one behind it hides that it never hands over."""
    async with trio() as made:
        for number in range(5):
            first, second = (made.offer(engine, f"{number}") for engine in (made.first, made.second))
            await first.revoke()
            await made.load([first, second])
            loading = known(made.reader.runtime.statistics().loading)
            assert loading.never_read == (number >= 2)
        told = [one.getMessage() for one in caplog.records if "never read" in one.getMessage()]
        assert len([one for one in caplog.records if "has ever read from it" in one.getMessage()]) == 1, told
        await made.warm()
        assert known(made.reader.runtime.statistics().loading).never_read == 0
