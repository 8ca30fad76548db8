"""Breaks each promise on purpose. The simulator has to find each broken promise within a few seeds."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from kvflow.config import Config
from kvflow.core.plan.descriptors import Chunks
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.lease_book import LeaseBook, LeaseEntry
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import Permit
from kvflow.core.policy.states import TRANSFER_TABLE, TransferState, fire
from kvflow.core.protocol.proof import FAILED, SealProof, SealTable
from kvflow.errors import KVFlowError, LeaseExpired
from kvflow.failover.several_tickets import Attempts
from kvflow.growing.growing_loads import GrowingLoads
from kvflow.growing.lease_questions import LeaseQuestions
from kvflow.growing.spans import PromptSpan, SpanQueue
from kvflow.runtime.copy_thread import CopyThread
from kvflow.runtime.load import plan, steps
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.flight_resources import Poller
from kvflow.runtime.load.leases import LeaseIdNotifier
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers import peer, ticket_resolver
from kvflow.runtime.peers.peer import Connection, Peer, Source
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.registration import Registration
from kvflow.runtime.world import World
from kvflow.verify import verifying
from kvflow.verify.cache_digests import DigestSpec
from tests.simulator import simulate
from tests.simulator.planted_prefixes import PREFIX_MUTATIONS
from tests.simulator.settings import model_of, pauses, retrains

SEEDS_MAX = 3000
_OF_SEEDS = {"pauses": pauses, "retrains": retrains}


@dataclass(frozen=True, slots=True)
class Mutation:
    """A broken promise.

    `plant` breaks it, one of `invariants` has to report it, and each of the two `seeds` is known to find it. If
    `only_where` is given, only seeds with that attribute of `Model` can find it; "pauses": only seeds in which machines
    are paused; "retrains": only seeds in which engines get new weights.
    """

    plant: Callable[[pytest.MonkeyPatch], None]
    invariants: str
    seeds: tuple[int, ...]
    only_where: str = ""


MUTATIONS = {name: Mutation(*given, only_where="shares") for name, given in PREFIX_MUTATIONS.items()}


def mutation(invariants: str, *seeds: int, only_where: str = "") -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that registers a function, which breaks a promise by a MonkeyPatch, as a `Mutation`."""

    def note(plant: Callable[..., Any]) -> None:
        MUTATIONS[plant.__name__] = Mutation(plant, invariants, seeds, only_where)

    return note


def instead_of(
    owner: Any, name: str, invariants: str, *seeds: int, only_where: str = ""
) -> Callable[[Callable[..., Any]], None]:
    """Return a decorator that registers a mutant of `owner.name`, called with the real function as first argument."""

    def note(mutant: Callable[..., Any]) -> None:
        real = getattr(owner, name)

        def called(*given: Any, **named: Any) -> Any:
            return mutant(real, *given, **named)

        MUTATIONS[mutant.__name__] = Mutation(
            lambda monkeypatch: monkeypatch.setattr(owner, name, called), invariants, seeds, only_where
        )

    return note


@mutation("I2 I3", 0, 4)
def give_back_without_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks are freed too early, when their lease ends, although readers count on the hold, as for a single read."""
    real = LeaseBook.__init__
    at_once = lambda self, *, lifetime_s, **_: real(self, hold_s=0.0, lifetime_s=lifetime_s)  # noqa: E731
    monkeypatch.setattr(LeaseBook, "__init__", at_once)
    monkeypatch.setattr(SealProof, "note_read_posted", lambda _: None)


@instead_of(SealTable, "free_slot", "I2 I3 I9", 1, 3)
def leave_seals(_: Any, self: SealTable, index: int) -> None:
    """A lease that has ended looks open."""
    self._free.append(index)


@instead_of(SealTable, "tokens_missing", "I2 I3 I9", 0, 1)
def believe_every_seal(*_: Any) -> int:
    """Skip the freshness check."""
    return 0


@mutation("I2 I3", 3, 24)
def trust_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal that was fetched at the start is also taken as proof for slow reads, and for several."""
    monkeypatch.setattr(peer, "quick_read_max_s", lambda _: 1e9)
    monkeypatch.setattr(SealProof, "note_read_posted", lambda _: None)


@instead_of(SealProof, "note_read_posted", "I2 I3", 134, 247, only_where="pauses")
def trust_a_clock_that_stands_still(*_: Any) -> None:
    """A seal that was fetched with the first of several reads is taken as proof, if they were quick by one clock."""


@instead_of(LeaseIdNotifier, "report_read", "I4", 0, 1)
def forget_notifications(*_: Any, **__: Any) -> None:
    """A reader does not report that it has read."""


@instead_of(Flight, "stop", "I1 I5", 0, 2)
async def release_on_cancel(_: Any, self: Flight, grace_s: float) -> bool:
    """Blocks of a load that ends early are freed without waiting for the load's reads."""
    if self.state in (TransferState.PENDING, TransferState.READING):
        self.state = fire(TRANSFER_TABLE, self.state, "abandon")
        self._give_back()
    return True


@instead_of(BlockLedger, "release", "I5 I9", 0, 1)
def never_release_leased_blocks(*_: Any) -> None:
    pass


@instead_of(BlockLedger, "end_load", "I5", 0, 1)
def never_release_loaded_blocks(*_: Any) -> None:
    pass


@instead_of(Flight, "nudge", "I5 I7", 2, 0)
def forget_quarantines(_: Any, self: Flight) -> None:
    """A read that ends after its load does not make the blocks safe."""
    if self._progress is not None and not self._progress.done():
        self._progress.set_result(None)


@mutation("I4 I7", 0, 1)
def lose_ends_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Poller._dispatch, itertools.count()

    def dispatch(self: Poller, event: Any) -> None:
        if next(calls) % 50 != 49:
            real(self, event)

    monkeypatch.setattr(Poller, "_dispatch", dispatch)


@instead_of(LeaseBook, "expire", "I7", 1, 0)
def never_expire(_: Any, self: LeaseBook, now_s: float) -> Iterator[LeaseEntry]:
    self._expiring = [reminder for reminder in self._expiring if reminder[0] > now_s]
    return iter(())


@instead_of(Peer, "usable_connection", "I7", 16, 22)
def keep_broken_connections(_: Any, self: Peer, incarnation: str) -> Connection | None:
    """A peer that has restarted is never connected again."""
    return self.connection


@instead_of(Connection, "wait_idle", "I7", 16, 17)
async def tear_down_under_reads(*_: Any) -> None:
    """An outdated connection is given back to the transport while reads use it."""


@instead_of(OfferedBlocks, "advance", "I2", 9, 13)
def serve_before_computed(real: Any, self: OfferedBlocks, held: HeldBlocks, tokens: int, _: Any) -> Any:
    """A lease offers blocks that the device has yet to compute."""
    return real(self, held, tokens, None)


@instead_of(SealProof, "readable_tokens", "I2", 9, 0)
def read_past_the_watermark(real: Any, self: SealProof, num_tokens: int) -> int:
    """A load from a growing lease reads tokens that are not computed yet."""
    return min(real(self, num_tokens) + 3, num_tokens)


@instead_of(SpanQueue, "note_landed", "I2", 0, 9)
def tell_of_more_than_has_landed(_: Any, self: SpanQueue, span: PromptSpan) -> None:
    """Progress counts up to the furthest span that has landed of any queue, although earlier spans have not."""
    self.landed_upto = max(self.landed_upto, span.stop_token)


@instead_of(OfferedBlocks, "tokens_with_blocks", "I8", 31, 9, only_where="device")
def advance_without_extend(_: Any, self: OfferedBlocks, held: HeldBlocks) -> int:
    """Tokens count as computed although the lease never got their blocks."""
    return held.num_tokens


@instead_of(Serving, "_on_alarm", "I7", 41, 9, only_where="device")
def wait_for_a_forgotten_fail(real: Any, self: Serving) -> None:
    """A lease with an incomplete prompt does not expire, although its engine may have forgotten it."""
    now_s = self._clock.now_s()
    for entry, offer in self._open_leases.items():
        if entry.is_open and not offer.complete:
            entry.expires_s = max(entry.expires_s, now_s + 1.0)
    real(self)


@instead_of(GrowingLoads, "ask_about_leases", "I7", 25, 9, only_where="device")
def follow_without_a_deadline(real: Any, self: GrowingLoads, load: Any, *others: Any) -> None:
    """A load waits for a prompt that is being computed as long as the lease is renewed, and renews it itself."""
    load.deadline_at_s = math.inf
    real(self, load, *others)


@instead_of(SealTable, "tokens_missing", "I2 I3", 9, 29)
def take_a_failed_lease_for_open(real: Any, self: SealTable, index: int, lease_id: str) -> int | None:
    """A lease with a failed prompt looks complete."""
    missing = real(self, index, lease_id)
    return 0 if missing == FAILED else missing


@mutation("I5 I7", 5, 6)
def leave_a_look_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that ends does not wait for its read of the seal that is under way."""
    real_look, real_ended, real_stop = Flight.post_seal_read, Flight._read_ended, Flight.stop
    looks: Counter[Flight] = Counter()
    left: set[Flight] = set()

    async def post_seal_read(self: Flight, source: Source) -> None:
        await real_look(self, source)
        looks[self] += 1

    def read_ended(self: Flight, source: Source, permit: Permit, *others: Any) -> None:
        if looks[self]:
            looks[self] -= 1
            self._under_way += self in left
        real_ended(self, source, permit, *others)

    async def stop(self: Flight, grace_s: float) -> bool:
        self._under_way -= looks[self]
        left.add(self)
        return await real_stop(self, grace_s)

    for name, mutant in (("post_seal_read", post_seal_read), ("_read_ended", read_ended), ("stop", stop)):
        monkeypatch.setattr(Flight, name, mutant)


@instead_of(OfferedBlocks, "give_back", "I5", 9, 13)
def keep_what_has_failed(real: Any, self: OfferedBlocks, held: HeldBlocks, on_free: Callable[[], None]) -> None:
    """The seal of a lease that has failed is never given back."""
    held.failed = False
    real(self, held, on_free)


@instead_of(CopyThread, "wait_for_event", "I1 I2", 9, 13)
async def land_while_the_device_writes(*_: Any) -> None:
    """A load does not wait for the last device work of its blocks' former owner."""


@mutation("I2 I9", 1329, 444, only_where="sleeps")
def keep_the_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is registered again is served under the name of the previous registration."""
    real, names = Registration.__init__, dict[object, str]()

    def init(self: Registration, config: Config, world: World, *rest: Any) -> None:
        name = names.setdefault((world, config.engine_id, Rank.of(config)), world.token_hex(8))
        real(self, config, replace(world, token_hex=lambda _: name), *rest)

    monkeypatch.setattr(Registration, "__init__", init)


@instead_of(Serving, "close", "I2 I3 I9", 188, 764, only_where="sleeps")
def leave_seals_of_before(real: Any, self: Serving) -> None:
    """Leases end when their cache is unregistered, but their seals stay."""

    def end(held: HeldBlocks, *, failed: bool) -> None:
        held.closed = True
        self._blocks._seals._free.append(held.seal_index)

    vars(self._blocks)["close"] = end
    real(self)


@instead_of(plan, "match_chunks", "I2", 3, 6)
def read_the_wrong_end_of_windows(real: Any, *given: Any, whole: bool, **named: Any) -> tuple[Chunks, ...]:
    """The offered blocks of a window are taken for blocks of the prompt's beginning."""
    found = real(*given, whole=whole, **named)
    return tuple(some if whole else replace(some, remote_ids=some.remote_ids * 0) for some in found)


@instead_of(steps, "check_blocks_fit", "I2", 1000, 0)
def count_cached_blocks_from_the_end(*_: Any) -> None:
    """Local blocks are filled with the end of the offer, whatever place the request names."""


@instead_of(plan, "match_chunks", "I2", 6, 14)
def leave_state_behind(real: Any, *given: Any, remote_block_size: int, **named: Any) -> tuple[Chunks, ...]:
    """The state of a request is not read: its slot holds the state of another request."""
    found: tuple[Chunks, ...] = real(*given, remote_block_size=remote_block_size, **named)
    return () if remote_block_size == 1 else found


@instead_of(verifying, "_difference", "I2", 2, 34, only_where="verifies")
def ignore_mismatches(*_: Any) -> str:
    """Digests that differ are ignored."""
    return ""


@instead_of(verifying, "digest_spec_of", "I2", 26, 12)
def digest_the_wrong_blocks(real: Any, local: Any, part: Any, block_ids: Any) -> DigestSpec:
    """The reader compares blocks in another order than the prompt has."""
    return real(local, part, block_ids[::-1])  # type: ignore[no-any-return]


@instead_of(OfferedBlocks, "extend", "I3", 9, 13)
def leave_extensions_unprotected(
    real: Any, self: OfferedBlocks, request_id: str, held: HeldBlocks, block_ids: object
) -> None:
    """Blocks that are added to a lease later are not leased in the ledger."""
    entries = held.entries
    real(self, request_id, held, block_ids)
    self._ledger.release(np.setdiff1d(held.entries, entries))
    held.entries = entries


@instead_of(LeaseQuestions, "payload", "I2", 9, 13)
async def end_without_the_payload(*_: Any) -> bytes:
    """A load does not wait for the payload that was promised with the end."""
    return b""


@instead_of(Attempts, "_perform_attempt", "I2 I3", 16, 48, only_where="survives")
async def take_bytes_for_good_that_nobody_vouches_for(real: Any, self: Attempts) -> LoadReport:
    """A source counts as read although its lease ended during the read, since all bytes have landed."""
    try:
        return await real(self)  # type: ignore[no-any-return]
    except LeaseExpired:
        if self._load.flight is None:
            raise
        return self._load.report()


@instead_of(Attempts, "_prepare_next", "I7", 16, 21, only_where="survives")
async def give_each_source_a_deadline(real: Any, self: Attempts, error: KVFlowError) -> None:
    """The deadline of a load moves back each time the load leaves a source."""
    self._load.deadline_at_s += 2.0
    await real(self, error)


@mutation("I2 I9", 577, 576, only_where="retrains")
def take_blocks_of_any_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody compares the weights of an offer with the reader's."""
    monkeypatch.setattr(ticket_resolver, "check_weights", lambda *_: None)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed that is known to find it is tried first."""
    find(name, (MUTATIONS[name].seeds[0], *range(SEEDS_MAX)), monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_promise_is_found_by_another_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No promise hangs on one seed, and no seed that finds a broken promise breaks one by itself.

    Thorough: see `test_a_broken_promise_is_found` of this file.
    """
    first, second = MUTATIONS[name].seeds
    found = find(name, (second, *(seed for seed in range(SEEDS_MAX) if seed != first)), monkeypatch)
    monkeypatch.undo()
    violation = simulate(found).violation
    assert violation is None, violation


def find(name: str, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> int:
    """Return the first of `seeds` that finds a broken promise. Known seeds that no longer do cost a search."""
    planted = MUTATIONS[name]
    planted.plant(monkeypatch)
    for seed in seeds:
        where = planted.only_where
        if where and not (_OF_SEEDS[where](seed) if where in _OF_SEEDS else getattr(model_of(seed), where)):
            continue
        violation = simulate(seed).violation
        if violation is not None:
            print(f"{name}: seed {seed}: {violation}")
            assert violation.invariant in planted.invariants.split(), violation
            return seed
    pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
