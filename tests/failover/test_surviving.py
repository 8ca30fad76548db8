"""A load of several tickets: the order of its sources, when the next one is read, and how the load ends."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import pytest
from pairs import host_of, known
from tests_support import PATIENT, WAIT_S, Records, each, in_virtual_time, leases_ended, limited, until

import kvflow
from kvflow import Attempt, Config, Lease, LoadReport, LoadRequest, ServeRequest, Ticket
from kvflow.core.policy.ledger import BlockCounts
from kvflow.errors import (
    BlocksBusy,
    DeadlineExceeded,
    KVFlowError,
    LeaseExpired,
    PeerUnreachable,
    PrefillFailed,
    PromptMismatch,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.runtime.load.requests import TICKETS_MAX, LoadingStatistics
from kvflow.runtime.load.steps import LoadSteps
from kvflow.runtime.peers.peer import Peer
from kvflow.testing import InprocCluster, InprocTransport, TestEngine, assert_loaded, assert_quiet
from kvflow.transport.base import TransportError

BLOCKS, OURS = [3, 7, 9], [0, 1, 2]
DEADLINE_S = 5.0
LONGER: dict[str, Any] = {"block_ids": [*BLOCKS, 1], "num_tokens": 16}
SLICE_BY_SLICE = limited(PATIENT, slice_bytes_max=1, slices_in_flight_max=1)


@dataclass
class Trio:
    """Two engines that hold the same prompt with different bytes, and an engine that loads it."""

    first: TestEngine
    second: TestEngine
    reader: TestEngine
    cluster: InprocCluster
    records: Records = field(default_factory=Records)

    @property
    def transport(self) -> InprocTransport:
        return self.reader.transport

    @property
    def posted(self) -> list[str]:
        """Return the ids of the engines that held reads read from."""
        return [read.peer.split("/")[0] for read in self.transport.held]

    @property
    def loading(self) -> LoadingStatistics:
        return known(self.reader.runtime.statistics().loading)

    @property
    def blocks(self) -> BlockCounts:
        return known(self.reader.runtime.statistics().blocks)

    def offer(self, engine: TestEngine, request_id: str = "req", **options: Any) -> Lease:
        options = {"block_ids": BLOCKS, "num_tokens": len(BLOCKS) * engine.layout.block_size, **options}
        return engine.runtime.serve_blocks(ServeRequest(request_id, **options))

    def both(self) -> list[Lease]:
        return [self.offer(self.first), self.offer(self.second)]

    async def gone(self) -> Lease:
        """Return an ended lease of the first engine."""
        lease = self.offer(self.first, "gone")
        await lease.revoke()
        return lease

    def later(self) -> Ticket:
        """Return a ticket of the second producer for a request that it has not offered yet."""
        return Ticket.rendezvous(self.second.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket, "later")

    def silent(self, ticket: Ticket) -> Ticket:
        """Return a ticket of a rank that takes questions and never answers."""
        config = Config(engine_id="first", listen="tcp://127.0.0.1:0")
        listener = self.cluster._exchange.listen(config, lambda *_: asyncio.get_running_loop().create_future())
        return msgspec.structs.replace(ticket, ranks=(msgspec.structs.replace(ticket.first, port=listener.port),))

    def start(self, leases: Sequence[Lease | Ticket], ours: Sequence[int] = OURS, **options: Any) -> kvflow.Load:
        tickets = [one.ticket if isinstance(one, Lease) else one for one in leases]
        request = LoadRequest("req", [one.to_params() for one in tickets], ours, **options)
        return self.reader.runtime.start_load(request)

    async def load(self, leases: Sequence[Lease | Ticket], **options: Any) -> LoadReport:
        return await self.start(leases, **options)

    async def held(self, leases: Sequence[Lease | Ticket], **options: Any) -> kvflow.Load:
        """Start a load. Its reads from the first producer are held, as are all later reads."""
        self.transport.faults.hold = True
        load = self.start(leases, **options)
        await until(lambda: "first" in self.posted)
        return load

    def let_go(self) -> None:
        """Perform the held reads, and hold no further reads."""
        self.transport.faults.hold = False
        self.transport.perform()

    async def warm(self) -> None:
        """Both are connected, and have a history."""
        for engine in (self.first, self.second):
            lease = self.offer(engine, "warm")
            load = self.reader.runtime.start_load(LoadRequest("warm", lease.ticket, [10, 11, 12]))
            self.transport.faults.hold = True
            await until(lambda: self.transport.held)
            await passes(load, 1e-3)
            self.let_go()
            await load
            await lease
        self.reader.cache.fill()
        self.records.loads.clear()

    def assert_read(self, report: LoadReport, *outcomes: tuple[str, str]) -> None:
        """So many sources had their turn, and every byte is the last one's; nothing beside was touched."""
        assert found(report.attempts) == list(outcomes)
        engine = self.first if outcomes[-1][0] == "first" else self.second
        assert_loaded(self.reader.cache, OURS, engine.cache, BLOCKS)


def found(attempts: Sequence[Attempt]) -> list[tuple[str, str]]:
    return [(one.engine_id, one.outcome) for one in attempts]


def unreachable(made: Trio, engine_id: str, why: list[str]) -> None:
    """Keep the reader from reaching an engine, as long as there is a reason."""
    handshakes: Any = host_of(made.reader.runtime).peers.handshakes

    def cut(inner: Any) -> Any:
        async def ask(peer: Peer, *args: Any) -> Any:
            if why and peer.engine_id == engine_id:
                raise peer.at.failure(PeerUnreachable, why[0])
            return await inner(peer, *args)

        return ask

    handshakes.connect, handshakes.ask = cut(handshakes.connect), cut(handshakes.ask)


async def passes(load: kvflow.Load, seconds: float) -> None:
    """So much time passes, unless the load ends before."""
    assert load._task is not None
    await asyncio.wait([load._task], timeout=seconds)


async def ends(lease: Lease, seconds: float) -> None:
    """So much time passes, unless the lease ends before."""
    await asyncio.wait([asyncio.ensure_future(lease.wait())], timeout=seconds)


async def never(attempts: Sequence[Attempt]) -> None:
    raise AssertionError(f"asked after {attempts}")


@contextlib.asynccontextmanager
async def trio(config: Config = PATIENT, *, warm: bool = False) -> AsyncIterator[Trio]:
    cluster, base = InprocCluster(), replace(config, load_deadline_s=DEADLINE_S)
    async with (
        cluster.engine("first", config=base) as first,
        cluster.engine("second", config=base) as second,
        cluster.engine("reader", config=base) as reader,
    ):
        made = Trio(first, second, reader, cluster)
        with reader.runtime._observers.adding(made.records):
            if warm:
                await made.warm()
            yield made
        for engine in (first, second, reader):
            incarnation = engine.runtime._supervisor.incarnation
            if incarnation is not None:
                incarnation.serving.close()
                await leases_ended(engine.runtime)
                assert_quiet(engine.runtime.statistics())


# --- who is read next


@in_virtual_time
async def test_the_first_gives_all_and_the_other_lease_is_given_back() -> None:
    """Of one ticket it is an ordinary load."""
    async with trio() as made:
        leases = made.both()
        report = await made.load(leases)
        made.assert_read(report, ("first", "loaded"))
        assert report.attempts[0].bytes == report.bytes
        assert [str(await lease) for lease in leases] == ["read", "read"]
        assert made.loading.sources_left == 0
        assert (await made.load([made.offer(made.first)])).attempts == ()
        assert made.records.loads[1].attempts == ()


@in_virtual_time
async def test_a_source_of_other_weights_is_followed_by_the_next() -> None:
    async with trio() as made:
        made.first.runtime.set_weights("step-7")
        leases = made.both()
        made.assert_read(await made.load(leases), ("first", "WeightsMismatch"), ("second", "loaded"))
        assert [str(await lease) for lease in leases] == ["read", "read"], "the first one's is given back"


@pytest.mark.parametrize("how", ["another ticket", "a rendezvous", "brought"])
@in_virtual_time
async def test_who_has_ended_is_followed_by_the_next(how: str) -> None:
    async with trio() as made:
        heard, tickets = list[list[tuple[str, str]]](), list[Lease | Ticket]([await made.gone()])

        async def again(attempts: Sequence[Attempt]) -> Any:
            heard.append(found(attempts))
            return made.offer(made.second).ticket.to_params()

        if how != "brought":
            tickets.append(made.later() if how == "a rendezvous" else made.offer(made.second))
        load = made.start(tickets, again=again)
        if how == "a rendezvous":
            await passes(load, 0.5)
            made.offer(made.second, "later")
        report = await load
        made.assert_read(report, ("first", "LeaseExpired"), ("second", "loaded"))
        assert heard == ([[("first", "LeaseExpired")]] if how == "brought" else [])
        (record,) = made.records.loads
        assert (record.outcome, record.peer_engine_id) == ("loaded", "second")
        assert tuple(record.attempts) == tuple(report.attempts)
        assert sum(record.seconds.values()) == pytest.approx(report.total_s)
        assert made.loading.sources_left == 1


@in_virtual_time
async def test_blocks_stay_claimed_from_source_to_source() -> None:
    """A failing read of the first, while others try to get the blocks in every turn of the loop."""
    async with trio(warm=True) as made:
        made.transport.faults.fail_next.append(TransportError("scripted"))
        load = made.start(made.both())
        refused = 0
        while not load.done:
            await asyncio.sleep(0)
            if not load.done and load.attempts is not None:
                with pytest.raises(BlocksBusy):
                    host_of(made.reader.runtime).resources.ledger.begin_load(load.entries.copy())
                refused += 1
        report = await load
        assert refused > 2
        made.assert_read(report, ("first", "TransferFailed"), ("second", "loaded"))
        assert "scripted" in report.attempts[0].error


@in_virtual_time
async def test_a_failed_load_names_all_and_leaves_its_tickets_to_its_caller() -> None:
    async with trio() as made:
        leases = made.both()
        made.transport.faults.fail_next.extend([TransportError("scripted")] * 2)
        with pytest.raises(TransferFailed, match="second") as caught:
            await made.load(leases)
        (note,) = caught.value.__notes__
        assert note.startswith("before that, 'first' at tcp://")
        (record,) = made.records.loads
        assert found(record.attempts) == [("first", "TransferFailed"), ("second", "TransferFailed")]
        assert [str(lease.state) for lease in leases] == ["offered", "offered"]
        assert found((await made.load(leases)).attempts)[-1][1] == "loaded"


@in_virtual_time
async def test_who_is_backed_off_from_comes_last() -> None:
    async with trio(warm=True) as made:
        for number in range(2):  # the second failed read in a row costs a wait
            made.transport.faults.fail_next.append(TransportError("scripted"))
            with pytest.raises(TransferFailed):
                await made.load([made.offer(made.first, f"failing {number}")])
        made.assert_read(await made.load(made.both()), ("second", "loaded"))


@in_virtual_time
async def test_a_prompt_that_breaks_while_it_is_computed_comes_from_the_next() -> None:
    """The first source's tokens are written again, so the load has reported no progress."""
    async with trio(limited(PATIENT, slice_bytes_max=1)) as made:
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
        made.assert_read(await load, ("first", "PrefillFailed"), ("second", "loaded"))


@in_virtual_time
async def test_leases_of_tickets_that_wait_are_kept() -> None:
    """The first one is read for much longer than the second one's lease was to last."""
    async with trio(SLICE_BY_SLICE, warm=True) as made:
        leases = [made.offer(made.first), made.offer(made.second, ttl_s=0.4)]
        load = await made.held(leases)
        for _ in range(2):
            await until(lambda: made.transport.held)
            await passes(load, 0.4)
            made.transport.perform()
        assert str(leases[1].state) == "offered"
        made.transport.faults.fail_next.append(TransportError("scripted"))
        made.let_go()
        made.assert_read(await load, ("first", "TransferFailed"), ("second", "loaded"))


@in_virtual_time
async def test_an_engine_that_no_load_has_ever_read_from_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Also where another one behind it hides that it never hands over."""
    async with trio() as made:
        for number in range(5):
            first, second = (made.offer(engine, f"{number}") for engine in (made.first, made.second))
            await first.revoke()
            await made.load([first, second])
            assert made.loading.never_read == (number >= 2)
        told = [one.getMessage() for one in caplog.records if "never read" in one.getMessage()]
        assert len([one for one in caplog.records if "has ever read from it" in one.getMessage()]) == 1, told
        await made.warm()
        assert made.loading.never_read == 0


@pytest.mark.parametrize("comes_back", [True, False])
@in_virtual_time
async def test_the_lease_of_a_source_that_was_unreachable_is_given_back_once_it_can_be(comes_back: bool) -> None:
    """After the load has succeeded from another; as long as it may be open, and with one line in the log."""
    async with trio() as made:
        unreachable(made, "first", down := ["it is gone"])
        first, second = made.both()
        made.assert_read(await made.load([first, second]), ("first", "PeerUnreachable"), ("second", "loaded"))
        assert str(await second) == "read"
        await ends(first, 1.0)
        assert not first.done
        if comes_back:
            down.clear()
            await ends(first, first.ticket.ttl_s / 2)
            assert first.done
            assert str(await first) == "read"
        else:
            await ends(first, first.ticket.ttl_s)
            assert not [one for one in asyncio.all_tasks() if one.get_name().startswith("kvflow-release")]
            assert str(await first) == "expired"


@in_virtual_time
async def test_a_source_that_was_not_even_asked_since_it_had_failed_gets_its_lease_back_too() -> None:
    async with trio() as made:
        unreachable(made, "first", down := ["it is gone"])
        first, second = made.both()
        with pytest.raises(PeerUnreachable):
            await made.load([first])
        down.clear()
        made.assert_read(await made.load([first, second]), ("second", "loaded"))
        assert str(await first) == "read"


# --- what does not lead on


@pytest.mark.parametrize("hangs", ["handshake", "wire", "compute"])
@in_virtual_time
async def test_a_source_that_stands_still_ends_the_load_at_its_deadline(hangs: str) -> None:
    """Its posted reads cannot be taken back, so the blocks are quarantined until they have stopped."""
    config = replace(PATIENT, handshake_timeout_s=DEADLINE_S * 2, cancel_grace_s=0.1)
    async with trio(config) as made:
        first = made.offer(made.first, computed_tokens=0 if hangs == "compute" else None)
        second = made.offer(made.second)
        made.transport.faults.hold = hangs == "wire"
        load = made.start([made.silent(first.ticket) if hangs == "handshake" else first, second], again=never)
        with pytest.raises(DeadlineExceeded) as caught:
            await load
        assert caught.value.phase == hangs
        assert caught.value.quarantine is (load if hangs == "wire" else None)
        assert asyncio.get_running_loop().time() == pytest.approx(DEADLINE_S + 0.1 * (hangs == "wire"), abs=0.2)
        assert found(made.records.loads[0].attempts) == [("first", "ended")]
        assert made.posted == ["first"] * (hangs == "wire")
        assert made.blocks.quarantined == len(OURS) * (hangs == "wire")
        made.let_go()
        await load.settled()
        assert made.blocks.free == 16
        assert str(second.state) == "offered"


@in_virtual_time
async def test_the_next_source_is_read_once_nothing_of_the_last_one_can_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the attempt's error: this attempt has failed and left a read in quarantine."""
    async with trio(replace(PATIENT, cancel_grace_s=0.05), warm=True) as made:
        perform = LoadSteps.perform

        async def fails(steps: LoadSteps, load: kvflow.Load) -> LoadReport:
            attempt = asyncio.ensure_future(perform(steps, load))
            if load.ticket.engine_id == "first":
                await until(lambda: "first" in made.posted)
                attempt.cancel()
                await asyncio.wait([attempt])
                raise load.failure(TransferFailed, "scripted")
            return await attempt

        monkeypatch.setattr(LoadSteps, "perform", fails)
        leases = made.both()
        load = await made.held(leases)
        await passes(load, 1.0)
        assert made.posted == ["first"], "the second one is not read into the same blocks yet"
        assert made.blocks.in_flight == len(OURS)
        made.transport.perform(1)
        await until(lambda: made.posted == ["second"])
        made.let_go()
        made.assert_read(await load, ("first", "TransferFailed"), ("second", "loaded"))
        assert [str(await lease) for lease in leases] == ["read", "read"], "the first one is told, too"
        assert made.blocks.free == 16


@pytest.mark.parametrize("fails", [False, True])
@in_virtual_time
async def test_a_source_that_stood_still_and_goes_on_is_what_the_load_gets(fails: bool) -> None:
    """Or what leads to the next one, if it has failed meanwhile."""
    async with trio(warm=True) as made:
        load = await made.held(made.both(), again=never)
        await passes(load, DEADLINE_S * 0.75)
        assert made.posted == ["first"]
        if fails:
            made.transport.faults.fail_next.append(TransportError("scripted"))
        made.let_go()
        report = await load
        made.assert_read(
            report, *([("first", "TransferFailed"), ("second", "loaded")] if fails else [("first", "loaded")])
        )


@pytest.mark.parametrize(
    ("end", "error"),
    [("cancelled", asyncio.CancelledError), ("DeadlineExceeded", DeadlineExceeded), ("RuntimeClosed", RuntimeClosed)],
)
@pytest.mark.parametrize("settles", [False, True])
@in_virtual_time
async def test_what_ends_a_load_ends_it_whoever_is_left_and_asks_nobody_else(
    settles: bool, end: str, error: type[BaseException]
) -> None:
    """Also while a source that has failed settles: reads of it that have not failed may still land."""
    async with trio(SLICE_BY_SLICE if not settles else limited(PATIENT, slice_bytes_max=1), warm=True) as made:
        leases = made.both()
        load = await made.held(leases, again=never, deadline_s=0.2 if end == "DeadlineExceeded" else None)
        task = load._task
        assert task is not None
        if settles:
            await until(lambda: len(made.transport.held) > 1)
            made.transport.faults.fail_next.append(TransportError("scripted"))
            made.transport.perform(1)
            await passes(load, 0.1)
            assert made.posted == ["first"] * len(made.posted), "the second one is not read into the same blocks yet"
            assert made.posted
        closing = asyncio.create_task(made.reader.runtime.aclose()) if end == "RuntimeClosed" else None
        if end == "cancelled":
            load.cancel()
        while not task.cancelling() and not task.done():
            await asyncio.wait([task], timeout=0.01)
        made.let_go()
        with pytest.raises(error):
            await load
        await load.settled()
        (record,) = made.records.loads
        assert (record.outcome, found(record.attempts)) == (end, [("first", "ended")])
        assert str(leases[1].state) == "offered"
        await asyncio.wait([closing] if closing else [task])


# --- another ticket is brought


@in_virtual_time
async def test_again_is_asked_so_many_times_and_no_more() -> None:
    async with trio() as made:
        asked: list[int] = []

        async def again(attempts: Sequence[Attempt]) -> Ticket:
            asked.append(len(attempts))
            return (await made.gone()).ticket

        for most, expected in (3, [1, 2, 3]), (0, []):
            with pytest.raises(LeaseExpired):
                await made.load([await made.gone()], again=again, again_max=most)
            assert asked == expected
            asked.clear()


@pytest.mark.parametrize("how", ["cancelled", "failed", "of another prompt"])
@in_virtual_time
async def test_what_again_brought_is_given_back_by_a_load_that_ends_without_it(how: str) -> None:
    """Nobody else knows of that ticket; those of its caller stay its caller's."""
    async with trio() as made:
        gone, kept = await made.gone(), made.offer(made.second)
        brought: list[Lease] = []

        async def again(_: Sequence[Attempt]) -> Ticket:
            brought.append(made.offer(made.second, "again", **(LONGER if how == "of another prompt" else {})))
            made.transport.faults.hold = True
            return brought[0].ticket

        load = made.start([gone], again=again, again_max=1)
        if how != "of another prompt":
            await until(lambda: made.posted == ["second"])
        if how == "cancelled":
            load.cancel()
        elif how == "failed":
            made.transport.faults.fail_next.append(TransportError("scripted"))
        made.let_go()
        with pytest.raises((asyncio.CancelledError, TransferFailed, PromptMismatch)):
            await load
        async with asyncio.timeout(WAIT_S):
            await brought[0]
        assert not kept.done


@pytest.mark.parametrize(
    ("brought", "error", "match"),
    [
        (ZeroDivisionError("scripted"), PrefillFailed, "`again` failed: ZeroDivisionError: scripted"),
        (PrefillFailed("no engine is left", request_id="req", peer=""), PrefillFailed, "no engine is left"),
        (None, LeaseExpired, "the lease has ended|it has ended"),
        ({"remote": 1}, RequestError, "request 'req': again: ticket"),
    ],
)
@in_virtual_time
async def test_what_again_does_wrong_ends_the_load(brought: Any, error: type[KVFlowError], match: str) -> None:
    async def again(_: Sequence[Attempt]) -> Any:
        if isinstance(brought, Exception):
            raise brought
        return brought

    async with trio() as made:
        gone = await made.gone()
        with pytest.raises(error, match=match):
            await made.load([gone], again=again)
        with pytest.raises(RequestError, match=r"again: expected an async function \(async def\), got 7"):
            await made.load([gone], again=7)
        assert made.blocks.free == 16


# --- what is refused


@in_virtual_time
async def test_tickets_of_different_prompts_are_refused_before_anybody_is_asked() -> None:
    """Also tickets from `again` or of an offer at a rendezvous, as soon as they are known."""
    lengths = r"'first' at .* offers 12 tokens, 'second' at .* 16"
    async with trio() as made:
        longer = made.offer(made.second, **LONGER)
        with pytest.raises(PromptMismatch, match=lengths):
            await made.load([made.offer(made.first), longer])
        other = [made.offer(engine, "same", prompt=[at] * 12) for at, engine in enumerate((made.first, made.second))]
        with pytest.raises(PromptMismatch, match=r"'first' at .* has digest .*, 'second' at"):
            await made.load(other)
        renamed = made.offer(made.second, "otherwise", prompt=[1] * 12)
        with pytest.raises(PromptMismatch, match="otherwise"):
            await made.load([other[0], renamed], prompt=[0] * 12)
        assert made.reader.runtime.statistics().peers == ()
        assert made.loading.refused == 3

        async def again(_: Sequence[Attempt]) -> Ticket:
            return longer.ticket

        gone = await made.gone()
        made.offer(made.second, "later", **LONGER)
        for tickets in [gone], [gone, made.later()]:
            with pytest.raises(PromptMismatch, match=lengths):
                await made.load(tickets, again=again)


@in_virtual_time
async def test_tickets_that_cannot_be_are_refused_before_anybody_is_asked() -> None:
    async with trio() as made:
        lease = made.offer(made.first)
        for wrong in ([lease.ticket, {"remote": 1}], [], [lease.ticket] * (TICKETS_MAX + 1), [lease.ticket, None], "x"):
            with pytest.raises(RequestError):
                await made.reader.runtime.load_blocks(LoadRequest("req", wrong, OURS))  # type: ignore[arg-type]
        assert made.reader.runtime.statistics().peers == ()
        await made.load([lease])


# --- every source is compared with the prompt


PROMPT, OTHERS_PROMPT = list(range(12)), list(range(1000, 1012))


@each("ours", [PROMPT, None])
@each("kind", ["ticket", "rendezvous"])
@in_virtual_time
async def test_what_again_brings_is_compared_with_the_prompt(ours: list[int] | None, kind: str) -> None:
    """By the request's own prompt and, where requests have one name, by what the first ticket says."""
    async with trio() as made:
        name = "again" if ours else "gone"
        gone = made.offer(made.first, "gone", prompt=PROMPT)
        await gone.revoke()
        introduction = made.second.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket
        other = made.offer(made.second, name, prompt=OTHERS_PROMPT)

        async def again(_: Sequence[Attempt]) -> Ticket:
            return other.ticket if kind == "ticket" else Ticket.rendezvous(introduction, name)

        with pytest.raises(PromptMismatch, match=r"^request 'req': "):
            await made.load([gone], again=again, again_max=1, prompt=ours)
        assert found(made.records.loads[0].attempts)[0] == ("first", "LeaseExpired")
        await leases_ended(made.second.runtime)  # what nobody else knows of is given back
        assert other.done


@in_virtual_time
async def test_a_ticket_after_a_rendezvous_is_compared_with_what_that_has_offered() -> None:
    async with trio() as made:
        hello = made.second.runtime.serve_blocks(ServeRequest("hello", [], 0)).ticket
        met = made.offer(made.second, "one name", prompt=PROMPT)
        other = made.offer(made.first, "one name", prompt=OTHERS_PROMPT)
        made.transport.faults.fail_next.append(TransportError("scripted"))
        with pytest.raises(PromptMismatch, match="not of one prompt"):
            await made.load([Ticket.rendezvous(hello, "one name"), other])
        met.revoke()
        other.revoke()
