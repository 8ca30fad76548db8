"""Verified loads: bytes compared with the producer's by digests, read once more where they differ.

`test_topologies` checks that digests are equal on both sides in all topologies, `test_digests` that they find errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import pytest
from pairs import EnginePair, host_of, open_pair
from scripted import ScriptedSideChannel
from tests_support import PATIENT, Records, limited, until

import kvflow
from kvflow import LeaseOutcome
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.errors import (
    ChecksumMismatch,
    DeadlineExceeded,
    LeaseExpired,
    PeerNotReady,
    PeerRefused,
    PeerUnreachable,
    RequestError,
    RuntimeClosed,
    TransferFailed,
)
from kvflow.growing.spans import DirectSpans
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load.requests import Verification
from kvflow.runtime.world import World
from kvflow.testing.pair import CacheSize
from kvflow.transport.base import TransportError
from kvflow.verify import verifying
from kvflow.verify.cache_digests import DigestedCache
from kvflow.verify.digest_request import DIGEST_PARTS_MAX, DigestPart, DigestRequest, Digests
from tests.fuzz.mutants import mutant

ALWAYS = replace(PATIENT, verify_share=1.0)
KINDS = codec.requests_with([DigestRequest])


def part_of(runtime: kvflow.Runtime) -> Any:
    return host_of(runtime).optional.verify("a test")


class HeldDigests:
    """The digests of a runtime's cache. A test holds them: they are not computed before it lets them go."""

    def __init__(self, runtime: kvflow.Runtime) -> None:
        self.asked = self.cancelled = 0
        self.gate = asyncio.Event()
        shown = part_of(runtime).served_cache
        self._run = shown._copy_thread.run
        shown._copy_thread = self

    async def run(self, job: Callable[[], Any]) -> Any:
        self.asked += 1
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return await self._run(job)


async def held_load(pair: EnginePair, lease: kvflow.Lease, **options: Any) -> tuple[asyncio.Task[Any], HeldDigests]:
    """A load that waits for the producer's digests."""
    held = HeldDigests(pair.writer)
    task = pair.start(lease, [0, 1], verify=True, **options)
    await until(lambda: held.asked and pair.transport.statistics.reads and not pair.transport.statistics.open_reads)
    assert (pair.consumer_blocks.in_flight, pair.consumer_blocks.quarantined) == (2, 0), (
        "its blocks are claimed until it is over"
    )
    return task, held


# --- equal, and different


async def test_a_verified_load_says_so_and_tells_of_its_end_only_after_the_digests(pair: EnginePair) -> None:
    lease = pair.offer([3, 7])
    task, held = await held_load(pair, lease)
    assert not lease.done
    held.gate.set()
    report = await task
    pair.assert_loaded([0, 1], [3, 7])
    assert await lease is LeaseOutcome.READ
    assert report.verified
    assert report.verification is Verification.VERIFIED
    assert report.seconds["verify"] > 0
    assert report.total_s == pytest.approx(sum(report.seconds.values()))
    assert (pair.loading.verified, pair.loading.unverified, pair.serving.digests) == (1, 0, 1)


async def test_counts_of_verified_loads_go_on_in_the_next_registration(pair: EnginePair) -> None:
    await pair.load(pair.offer([3, 7]), [0, 1], verify=True)
    for runtime in (pair.reader, pair.writer):
        await runtime.unregister()
        kv_caches, cache = CacheSize().make(runtime.config.engine_id)
        await runtime.register_kv_caches(kv_caches, cache.layout)
    assert (pair.loading.succeeded, pair.loading.verified, pair.serving.digests) == (1, 1, 1)


async def test_off_asks_for_nothing_prepares_nothing_and_notices_nothing(pair: EnginePair) -> None:
    """Without verification only the transport reports errors."""
    pair.transport.faults.flip_next = 1
    report = await pair.load(pair.offer([3]))
    with pytest.raises(AssertionError):
        pair.assert_loaded([0], [3])
    assert (report.verification, report.verified) == (Verification.OFF, False)
    assert "verify" not in report.seconds
    assert pair.serving.digests == pair.loading.verified == 0
    for runtime in (pair.reader, pair.writer):
        assert "verify" not in host_of(runtime).optional._begun


async def test_a_flipped_byte_is_read_once_more(pair: EnginePair, caplog: pytest.LogCaptureFixture) -> None:
    records = Records()
    pair.transport.faults.flip_next = 1
    lease = pair.offer([3, 7])
    with pair.reader._observers.adding(records), caplog.at_level("WARNING", "kvflow"):
        report = await pair.load(lease, [0, 1], verify=True)
    pair.assert_loaded([0, 1], [3, 7])
    assert await lease is LeaseOutcome.READ
    assert (report.verification, report.verified) == (Verification.REPAIRED, True)
    assert report.bytes == 2 * 2 * pair.producer.layout.block_size_bytes, "all of it was read twice"
    assert (pair.loading.repaired, pair.loading.verified, pair.serving.digests) == (1, 0, 2)
    assert [record.verification for record in records.loads] == ["repaired"]
    assert "load req is read once more" in caplog.text
    assert f"producer (dp 0 pp 0 tp 0) at {pair.writer.address}" in caplog.text


async def test_what_differs_twice_is_a_typed_error(pair: EnginePair) -> None:
    """All blocks are free at once, and the lease stays open, since no rank has reported a read."""
    records = Records()
    pair.transport.faults.flip_next = 2
    lease = pair.offer([3, 7])
    with pair.reader._observers.adding(records):
        error = await pair.fails(ChecksumMismatch, lease, [0, 1], verify=True)
    assert not error.retryable
    assert error.quarantine is None
    assert error.memory_safe
    assert (error.request_id, error.peer) == ("req", pair.writer.address)
    assert "request 'req' from 'producer'" in str(error)
    assert re.search(
        r"layers that differ: 1 of 2, the first: layer [01], tokens 0 to 8: ours [0-9a-f]{16}, theirs ", str(error)
    )
    assert (pair.loading.mismatch, pair.loading.failed) == (1, 1)
    (record,) = records.loads
    assert (record.outcome, record.phase, record.verification) == ("ChecksumMismatch", "verify", "mismatch")
    assert (pair.consumer_blocks.free, pair.consumer_blocks.quarantined) == (16, 0)
    assert not lease.done
    report = await pair.load(lease, [0, 1], verify=True)
    assert report.verified
    assert await lease is LeaseOutcome.READ


async def test_blocks_that_land_in_each_others_places_are_found(
    pair: EnginePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The right bytes in a wrong place, as a bug of the plan would put them."""
    planned = DirectSpans.span_queues

    def swapped(spans: DirectSpans, sources: Any, tables: Any) -> Any:
        for source in sources:
            for block_map, chunks in source.chunks.items():
                source.chunks[block_map] = [some.with_local_ids(some.local_ids[::-1]) for some in chunks]
        return planned(spans, sources, tables)

    monkeypatch.setattr(DirectSpans, "span_queues", swapped)
    lease = pair.offer([3, 7])
    report = await pair.load(lease, [0, 1], verify=True)
    assert report.verification is Verification.REPAIRED, "the bug has swapped them back"
    monkeypatch.setattr(DirectSpans, "span_queues", planned)
    pair.assert_loaded([0, 1], [3, 7])


# --- blocks are digested while others are read

BLOCKS = 6


@contextlib.asynccontextmanager
async def half_read(**faults: int) -> AsyncIterator[tuple[EnginePair, kvflow.Lease, asyncio.Task[Any], HeldDigests]]:
    """A load that digests its first landed blocks, while the reads of the others are held."""
    async with open_pair(limited(PATIENT, slice_bytes_max=256, slices_in_flight_max=4)) as pair:
        pair.transport.faults.hold = True
        for name, value in faults.items():
            setattr(pair.transport.faults, name, value)
        lease = pair.offer(list(range(BLOCKS)))
        held = HeldDigests(pair.reader)
        task = pair.start(lease, list(range(BLOCKS)), verify=True)
        while not held.asked:
            await until(lambda: held.asked or pair.transport.held)
            pair.transport.perform(1)
        yield pair, lease, task, held


async def test_blocks_are_digested_while_others_are_read() -> None:
    async with half_read() as (pair, lease, task, held):
        await until(lambda: pair.transport.held)
        assert pair.consumer_blocks.in_flight == BLOCKS
        held.gate.set()
        pair.release_reads()
        assert (await task).verification is Verification.VERIFIED
        pair.assert_loaded(list(range(BLOCKS)), list(range(BLOCKS)))
        assert await lease is LeaseOutcome.READ


async def test_a_wrong_byte_in_the_first_blocks_is_found() -> None:
    async with half_read(flip_next=1) as (pair, _, task, held):
        held.gate.set()
        pair.release_reads()
        assert (await task).verification is Verification.REPAIRED
        pair.assert_loaded(list(range(BLOCKS)), list(range(BLOCKS)))


@pytest.mark.parametrize("end", ["cancelled", "revoked", "read failed"])
async def test_a_load_that_ends_while_its_first_blocks_are_digested(end: str) -> None:
    """Its blocks are free once the last read has stopped. Blocks that land after the end are not digested."""
    async with half_read() as (pair, lease, task, held):
        match end:
            case "cancelled":
                task.cancel()
            case "revoked":
                lease.revoke()
            case "read failed":
                pair.transport.faults.fail_next.append(TransportError("scripted"))
        errors = {"cancelled": asyncio.CancelledError, "revoked": LeaseExpired, "read failed": TransferFailed}
        await until(lambda: held.cancelled or end != "cancelled")
        asked = held.asked
        pair.release_reads()
        if end == "revoked":
            held.gate.set()
        with pytest.raises(errors[end]):
            await task
        assert held.asked == asked or end != "cancelled"
        assert (pair.consumer_blocks.free, pair.reader.quarantines) == (16, ())
        held.gate.set()


# --- which loads


@pytest.mark.parametrize(("verify", "verified"), [(None, True), (True, True), (False, False)])
async def test_a_load_decides_for_itself(verify: bool | None, verified: bool) -> None:
    async with open_pair(ALWAYS) as pair:
        assert (await pair.load(pair.offer([3]), verify=verify)).verified is verified


async def test_the_share_is_drawn_load_by_load() -> None:
    drawn = iter(("00000000", "3fffffff", "40000000", "ffffffff"))
    world = World(token_hex=lambda count: next(drawn) if count == 4 else "0" * 2 * count)
    async with open_pair(replace(PATIENT, verify_share=0.25), consumer=world) as pair:
        reports = [await pair.load(pair.offer([3], f"req-{at}"), [at]) for at in range(4)]
    assert [report.verified for report in reports] == [True, True, False, False]


# --- what cannot be verified


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[EnginePair, ScriptedSideChannel]]:
    """A connected pair. The reader verifies all loads, and its further questions are scripted."""
    channel = ScriptedSideChannel()
    async with open_pair(ALWAYS, consumer=World(side_channel=channel)) as pair:
        await pair.load(pair.offer([3], "first"), verify=False)
        yield pair, channel


Answers = messages.Reply | Exception

OLD = messages.Refusal(reason="180 bytes do not decode", version=codec.PROTOCOL_VERSION)
BUSY = messages.Refusal(reason="too many", version=codec.PROTOCOL_VERSION, transient=True)
SILENT = PeerUnreachable("no answer", peer="tcp://127.0.0.1:1")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (OLD, PeerRefused),
        (BUSY, PeerNotReady),
        (SILENT, PeerUnreachable),
        (Digests(values=()), kvflow.errors.ProtocolError),
        (messages.Ack(incarnation="i"), kvflow.errors.ProtocolError),
    ],
)
async def test_a_producer_that_has_no_digests(
    scripted: tuple[EnginePair, ScriptedSideChannel], answer: Answers, error: type[Exception]
) -> None:
    """A load that is verified by chance goes on unverified, and logs it; a load that has to be verified fails."""
    pair, channel = scripted
    channel.script.append(answer)
    report = await pair.load(pair.offer([3], "chance"), [1])
    assert (report.verification, report.verified) == (Verification.UNVERIFIED, False)
    assert pair.loading.unverified == 1
    channel.script.append(answer)
    lease = pair.offer([4], "must")
    failed = await pair.fails(error, lease, [2], verify=True)
    assert "must" in str(failed)
    assert failed.quarantine is None
    assert pair.loading.unverified == 2
    assert pair.consumer_blocks.free == 16
    assert (await pair.load(lease, [2], verify=True)).verified, "the peer is as good as before"


async def test_wrong_digests_of_a_peer_are_compared_anew(scripted: tuple[EnginePair, ScriptedSideChannel]) -> None:
    """Blocks that differ, and then cannot be compared, are no success."""
    pair, channel = scripted
    channel.script += [Digests(values=(1, 2)), BUSY]
    await pair.fails(
        ChecksumMismatch, pair.offer([3]), [1], match="could not be compared after the second read: .*too many"
    )
    channel.script.append(Digests(values=(1, 2)))
    assert (await pair.load(pair.offer([4], "anew"), [2])).verification is Verification.REPAIRED


async def test_a_cache_that_nobody_here_can_read_is_not_verified(
    pair: EnginePair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DigestedCache, "problem", "it is no torch tensor")
    await pair.fails(RequestError, pair.offer([3]), match="request 'req': verify: it is no torch tensor", verify=True)


# --- the producer's side


class Failing(CopyThread):
    async def run(self, job: object) -> Any:
        raise RuntimeError("out of memory")


async def test_digests_that_fail_fail_loads_that_have_to_be_verified(pair: EnginePair) -> None:
    """There they are refused, and the producer goes on."""
    lease = pair.offer([3])
    for digested, error, match in (
        (part_of(pair.writer).served_cache, PeerRefused, "no digests: out of memory"),
        (
            part_of(pair.reader).local_cache,
            TransferFailed,
            "it cannot be verified: no digests of the local cache: out of memory",
        ),
    ):
        copy_thread = digested._copy_thread
        digested._copy_thread = Failing("fails")
        await pair.fails(error, lease, match=match, verify=True)
        digested._copy_thread = copy_thread
    assert (await pair.load(lease, verify=True)).verified
    assert (pair.serving.digests, pair.serving.digests_refused) == (2, 1)


@pytest.mark.parametrize("whose", ["all", "one reader's"])
async def test_digests_under_way_are_bounded_and_others_are_answered_meanwhile(
    monkeypatch: pytest.MonkeyPatch, whose: str
) -> None:
    if whose != "all":
        monkeypatch.setattr(verifying, "REQUESTS_OF_READER_MAX", 2)
    async with open_pair(limited(PATIENT, digests_max=2) if whose == "all" else PATIENT) as pair:
        held = HeldDigests(pair.writer)
        leases = [pair.offer([at], f"req-{at}") for at in range(4)]
        tasks = [pair.start(lease, [at], verify=True) for at, lease in enumerate(leases[:2])]
        await until(lambda: held.asked == 2)
        error = await pair.fails(PeerNotReady, leases[2], [2], match="too many digests", verify=True)
        assert error.retryable
        assert not (await pair.load(leases[2], [2])).verified, "reads are in nobody's way"
        held.gate.set()
        assert all([(await task).verified for task in tasks])
        assert pair.serving.digests_refused == 1
        assert (await pair.load(leases[3], [3], verify=True)).verified, "there is room again"


def question(pair: EnginePair, lease: kvflow.Lease, **changes: Any) -> DigestRequest:
    """The right question for all of a lease, with something changed."""
    part = {"part": "", "layers": (0, 1), "head": 0, "heads": 2, "model_heads": 2, "start": 0, "stop": 4}
    part |= {name: changes.pop(name) for name in list(changes) if name in part}
    facts = {
        "reader": "consumer/0.0.0#1",
        "target": Address("producer", Rank(0, 0, 0), "tcp://127.0.0.1:1"),
        "request_id": lease.request_id,
        "lease_id": lease.ticket.first.lease_id,
        "definition": 1,
        "parts": (DigestPart(**part),),
    }
    return DigestRequest(**facts | changes)


WRONG = [
    {"definition": 2},
    {"parts": ()},
    {"parts": (DigestPart("", (0,), 0, 1, 2, 0, 4),) * (DIGEST_PARTS_MAX + 1)},
    {"part": "conv.x"},
    {"layers": ()},
    {"layers": (0, 0)},
    {"layers": (0, 7)},
    {"layers": (-1,)},
    {"head": -1},
    {"head": 1},
    {"heads": 0},
    {"heads": 3},
    {"model_heads": 0},
    {"model_heads": -2},
    {"model_heads": 1 << 62},
    {"start": -4},
    {"start": 4},
    {"stop": 0},
    {"stop": 5},
    {"stop": 1 << 62},
]


async def test_a_question_that_cannot_be_right_is_refused(pair: EnginePair) -> None:
    lease = pair.offer([3])
    answers = part_of(pair.writer)
    assert isinstance(await answers.answer(question(pair, lease)), Digests)
    for changes in WRONG:
        reply = answers.answer(question(pair, lease, **changes))
        assert isinstance(reply, messages.Refusal), changes
        assert not reply.transient, changes


async def test_only_who_has_the_ticket_gets_digests(pair: EnginePair) -> None:
    lease = pair.offer([3])
    answers = part_of(pair.writer)
    for changes in ({"lease_id": "0" * 32}, {"lease_id": ""}, {"request_id": "another"}):
        assert answers.answer(question(pair, lease, **changes)) == messages.LeaseAnswer(
            state=messages.LeaseAnswerState.ENDED
        )
    lease.revoke()
    assert answers.answer(question(pair, lease)) == messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED)
    assert pair.serving.digests_refused == 4


async def test_blocks_that_are_not_there_yet_have_no_digests(pair: EnginePair) -> None:
    class Computing:
        happened = False

        def query(self) -> bool:
            return self.happened

        def synchronize(self) -> None: ...

    event = Computing()
    lease = pair.writer.serve_blocks(kvflow.ServeRequest("req", [3], num_tokens=4, ready=event))
    answers = part_of(pair.writer)
    reply = answers.answer(question(pair, lease))
    assert isinstance(reply, messages.Refusal)
    assert reply.transient
    event.happened = True
    assert (await pair.load(lease, verify=True)).verified


async def test_tokens_that_are_there_have_digests_while_others_are_missing(pair: EnginePair) -> None:
    """A load that needs only the first tokens may have ended."""
    request = kvflow.ServeRequest("req", [3, 7, 9], num_tokens=12, computed_tokens=4)
    lease = pair.writer.serve_blocks(request)
    answers = part_of(pair.writer)
    assert isinstance(await answers.answer(question(pair, lease)), Digests)
    for stop in (5, 12):
        reply = answers.answer(question(pair, lease, stop=stop))
        assert isinstance(reply, messages.Refusal)
        assert reply.transient
    lease.advance(12)
    assert isinstance(await answers.answer(question(pair, lease, stop=12)), Digests)


# --- the end of a load that is being verified


ENDS: dict[str, tuple[type[BaseException], ...]] = {
    "cancelled": (asyncio.CancelledError,),
    "late": (DeadlineExceeded,),
    "revoked": (LeaseExpired,),
    "the reader closes": (RuntimeClosed,),
    "the producer closes": (PeerNotReady, PeerUnreachable, LeaseExpired),  # its lease is over before it is
}


@pytest.mark.parametrize("end", ENDS)
async def test_a_load_that_ends_while_it_waits_for_digests_gives_its_blocks_back_at_once(end: str) -> None:
    async with open_pair(replace(PATIENT, drain_timeout_s=0.01)) as pair:
        lease = pair.offer([3, 7])
        task, held = await held_load(pair, lease, deadline_s=0.2 if end == "late" else None)
        match end:
            case "cancelled":
                task.cancel()
            case "revoked":
                await lease.revoke()
                held.gate.set()
            case "the reader closes":
                assert not await pair.reader.drain(0.01)
            case "the producer closes":
                await pair.writer.aclose()
        with pytest.raises(ENDS[end]) as caught:
            await task
        if isinstance(error := caught.value, DeadlineExceeded):
            assert "in phase 'verify'" in str(error)
            assert (error.phase, error.quarantine) == ("verify", None)
        assert pair.consumer_blocks.free == 16
        held.gate.set()
        if end == "cancelled":
            await until(lambda: pair.serving.digests == 1)
            assert pair.loading.cancelled == 1


@pytest.mark.parametrize("end", ["cancelled", "revoked"])
async def test_the_second_read_is_posted_like_the_first(pair: EnginePair, end: str) -> None:
    """Cancelled in it, the load waits for its bytes, or quarantines its blocks (invariant I1)."""
    lease = pair.offer([3, 7])
    pair.transport.faults.flip_next = 1
    task, held = await held_load(pair, lease)
    pair.transport.faults.hold = True
    held.gate.set()
    await until(lambda: pair.transport.held)
    if end == "cancelled":
        task.cancel()
        await until(lambda: pair.loading.in_flight.reads == 1)
        assert pair.consumer_blocks.in_flight == 2
    else:
        lease.revoke()
    pair.release_reads()
    with pytest.raises(asyncio.CancelledError if end == "cancelled" else LeaseExpired):
        await task
    assert pair.consumer_blocks.free == 16
    assert pair.reader.quarantines == ()


async def test_bent_questions_are_answered(pair: EnginePair) -> None:
    """Any altered question gets an answer, and the producer goes on."""
    lease, rng = pair.offer([3]), random.Random(1)
    answers, kinds = part_of(pair.writer), set()
    for _ in range(400):
        try:
            asked = codec.decode_request(mutant(rng, question(pair, lease)), KINDS)
        except codec.WireError:
            continue
        reply = answers.answer(asked) if isinstance(asked, DigestRequest) else None
        kinds.add(type(await reply if isinstance(reply, asyncio.Future) else reply))
    assert {Digests, messages.LeaseAnswer, messages.Refusal} <= kinds
    assert (await pair.load(lease, verify=True)).verified
