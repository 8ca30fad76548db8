"""Each promise broken on purpose: the simulator has to find every one of them within a few seeds."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
from planted_prefixes import PREFIX_MUTATIONS

from kvflow.config import Config
from kvflow.core.plan.descriptors import Chunks, match_chunks
from kvflow.core.plan.topology import Rank
from kvflow.core.policy.lease_book import LeaseBook, LeaseEntry
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.policy.queue import Permit
from kvflow.core.policy.states import TRANSFER_TABLE, TransferEvent, TransferState, fire
from kvflow.core.protocol.proof import FAILED, SealProof, SealTable
from kvflow.errors import KVFlowError, LeaseExpired
from kvflow.runtime.incarnation import Incarnation
from kvflow.runtime.load import plan, verifying
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.gear import Poller
from kvflow.runtime.load.growing import GrowingLoads
from kvflow.runtime.load.lanes import Lane, PromptSpan
from kvflow.runtime.load.leases import LeaseIdTelling
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.news import News
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.load.surviving import Surviving, _Course
from kvflow.runtime.load.verifying import Comparison
from kvflow.runtime.memory.copy_thread import CopyThread
from kvflow.runtime.memory.digests import TokenBlocks
from kvflow.runtime.peers import peer
from kvflow.runtime.peers.peer import Connection, Peer, Source
from kvflow.runtime.producer.blocks import HeldBlocks, OfferedBlocks
from kvflow.runtime.producer.serving import Serving
from kvflow.runtime.world import World
from kvflow.testing.simulator import simulate
from kvflow.testing.simulator.settings import model_of

SEEDS_MAX = 3000

Mutation = Callable[[pytest.MonkeyPatch], None]


def do_nothing(*_: object, **__: object) -> None:
    pass


def give_back_without_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """Free early: blocks come back in the moment in which the lease ends."""
    make = LeaseBook.__init__
    monkeypatch.setattr(
        LeaseBook, "__init__", lambda self, *, lifetime_s, **_: make(self, hold_s=0.0, lifetime_s=lifetime_s)
    )


def leave_seals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease that has ended looks as if it were open."""
    monkeypatch.setattr(SealTable, "give_back", lambda self, index: self._free.append(index))


def believe_every_seal(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the freshness check."""
    monkeypatch.setattr(SealTable, "tokens_missing", lambda *_: 0)


def trust_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A seal that was fetched at the start vouches for slow reads, too."""
    monkeypatch.setattr(peer, "quick_read_max_s", lambda hold_s: 1e9)


def forget_notifications(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader does not say that it has read."""
    monkeypatch.setattr(LeaseIdTelling, "report", do_nothing)


def release_on_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of a load that ends early are given back without waiting for its reads."""

    async def stop(self: Flight, grace_s: float) -> bool:
        if self.state in (TransferState.PENDING, TransferState.READING):
            self.state = fire(TRANSFER_TABLE, self.state, TransferEvent.ABANDON)
            self._give_back()
        return True

    monkeypatch.setattr(Flight, "stop", stop)


def never_release_leased_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "release", do_nothing)


def never_release_loaded_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BlockLedger, "end_load", do_nothing)


def forget_quarantines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read that ends after its load does not make the blocks safe."""
    monkeypatch.setattr(Flight, "nudge", only_wake)


def only_wake(self: Flight) -> None:
    if self._progress is not None and not self._progress.done():
        self._progress.set_result(None)


def lose_ends_of_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = Poller._dispatch, iter(range(1 << 60))

    def dispatch(self, event) -> None:  # type: ignore[no-untyped-def]
        if next(calls) % 50 != 49:
            real(self, event)

    monkeypatch.setattr(Poller, "_dispatch", dispatch)


def never_expire(monkeypatch: pytest.MonkeyPatch) -> None:
    def expire(self: LeaseBook, now_s: float) -> Iterator[LeaseEntry]:
        self._expiring = [reminder for reminder in self._expiring if reminder[0] > now_s]
        return iter(())

    monkeypatch.setattr(LeaseBook, "expire", expire)


def keep_broken_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that has restarted is never connected to again."""
    monkeypatch.setattr(Peer, "usable", lambda self, incarnation: self.current)


def tear_down_under_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outdated connection is given back to the transport while reads use it."""

    async def idle(self: Connection) -> None:
        pass

    monkeypatch.setattr(Connection, "idle", idle)


def serve_before_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease whose blocks the device has yet to compute says that they are there."""
    real = OfferedBlocks.advance
    monkeypatch.setattr(OfferedBlocks, "advance", lambda self, held, tokens, _: real(self, held, tokens, None))


def read_past_the_watermark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load of a lease that grows reads what is still to come."""
    real = SealProof.there
    monkeypatch.setattr(SealProof, "there", lambda self, num_tokens: min(real(self, num_tokens) + 3, num_tokens))


def tell_of_more_than_has_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is what was posted: the furthest span that has landed in any lane."""

    def note_landed(self: Lane, span: PromptSpan) -> None:
        self.landed_upto = max(self.landed_upto, span.stop_token)

    monkeypatch.setattr(Lane, "note_landed", note_landed)


def advance_without_extend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens count as computed whose blocks the lease was never given."""
    monkeypatch.setattr(OfferedBlocks, "holds", lambda self, held: held.num_tokens)


def wait_for_a_forgotten_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease whose prompt is not complete does not run out: its engine is to say what becomes of it."""
    real = Serving._look

    def look(self: Serving) -> None:
        now_s = self._clock.now_s()
        for entry, offer in self._offers.items():
            if entry.is_open and not offer.complete:
                entry.expires_s = max(entry.expires_s, now_s + 1.0)
        real(self)

    monkeypatch.setattr(Serving, "_look", look)


def follow_without_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load waits for a prompt that is being computed as long as the lease is renewed, which is by itself."""
    real = GrowingLoads.follow

    def follow(self: GrowingLoads, load: Any, *others: Any) -> None:
        load.work.ends_s = math.inf
        real(self, load, *others)

    monkeypatch.setattr(GrowingLoads, "follow", follow)


def take_a_failed_lease_for_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lease whose prompt has failed looks as if all of it were there."""
    real = SealTable.tokens_missing

    def tokens_missing(self: SealTable, index: int, lease_id: str) -> int | None:
        missing = real(self, index, lease_id)
        return 0 if missing == FAILED else missing

    monkeypatch.setattr(SealTable, "tokens_missing", tokens_missing)


def leave_a_look_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load that ends does not wait for the look that is under way for it."""
    real_look, real_heard, real_stop = Flight.look, Flight._heard, Flight.stop
    looks: Counter[Flight] = Counter()
    left: set[Flight] = set()

    async def look(self: Flight, source: Source) -> None:
        await real_look(self, source)
        looks[self] += 1

    def heard(self: Flight, source: Source, permit: Permit, *others: Any) -> None:
        if looks[self]:
            looks[self] -= 1
            self._under_way += self in left
        real_heard(self, source, permit, *others)

    async def stop(self: Flight, grace_s: float) -> bool:
        self._under_way -= looks[self]
        left.add(self)
        return await real_stop(self, grace_s)

    for name, mutant in (("look", look), ("_heard", heard), ("stop", stop)):
        monkeypatch.setattr(Flight, name, mutant)


def keep_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The seal of a lease that has failed is never given back."""
    real = OfferedBlocks.give_back

    def give_back(self: OfferedBlocks, held: HeldBlocks, on_free: Callable[[], None]) -> None:
        held.failed = False
        real(self, held, on_free)

    monkeypatch.setattr(OfferedBlocks, "give_back", give_back)


def land_while_the_device_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load does not wait for the last step of who had its blocks before."""

    async def happened(self: CopyThread, event: object) -> None:
        pass

    monkeypatch.setattr(CopyThread, "happened", happened)


def keep_the_incarnation(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache that is registered again is served under the name of the one before."""
    real, names = Incarnation.__init__, dict[object, str]()

    def init(self: Incarnation, config: Config, world: World, on_notification: Callable[[bytes], None]) -> None:
        name = names.setdefault((world, config.engine_id, Rank.of(config)), world.token_hex(8))
        real(self, config, replace(world, token_hex=lambda _: name), on_notification)

    monkeypatch.setattr(Incarnation, "__init__", init)


def leave_seals_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leases end when their cache is unregistered, and their seals stay."""
    real = Serving.close

    def end(blocks: OfferedBlocks, held: HeldBlocks, *, failed: bool) -> None:
        held.closed = True
        blocks._seals._free.append(held.seal_index)

    def close(self: Serving) -> None:
        vars(self._blocks)["close"] = partial(end, self._blocks)
        real(self)

    monkeypatch.setattr(Serving, "close", close)


def read_the_wrong_end_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The offered blocks of a window are taken for those of the prompt's beginning."""
    mutate_matches(monkeypatch, lambda some, whole, _: some if whole else replace(some, remote_ids=some.remote_ids * 0))


def leave_state_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a request is not read: its slot holds that of another one."""
    mutate_matches(monkeypatch, lambda some, _, block_size: None if block_size == 1 else some)


def ignore_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    """What digests say is not listened to."""

    async def difference(self: Comparison) -> str:
        return ""

    monkeypatch.setattr(Comparison, "difference", difference)


def digest_the_wrong_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader compares blocks in another order than that of the prompt."""
    monkeypatch.setattr(verifying, "TokenBlocks", lambda ids, *others: TokenBlocks(ids[::-1], *others))


def leave_extensions_unprotected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that a lease gets later are not its own in the ledger."""
    extend = OfferedBlocks.extend

    def forgetful(self: OfferedBlocks, held: HeldBlocks, block_ids: object, what: str) -> None:
        entries = held.entries
        extend(self, held, block_ids, what)
        self._ledger.release(np.setdiff1d(held.entries, entries))
        held.entries = entries

    monkeypatch.setattr(OfferedBlocks, "extend", forgetful)


def end_without_the_payload(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load does not wait for what was promised with the end."""

    async def payload(self: News) -> bytes:
        return b""

    monkeypatch.setattr(News, "payload", payload)


def read_the_next_under_the_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """A load goes to its next source while bytes of the one before may land."""
    real = _Course._leave

    async def leave(self: _Course, error: KVFlowError | None) -> None:
        if self._work.flight is not None:
            vars(self._work.flight)["settled"] = at_once
        await real(self, error)

    async def at_once() -> None:
        pass

    monkeypatch.setattr(_Course, "_leave", leave)


def take_bytes_for_good_that_nobody_vouches_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source whose lease has ended while it was read counts, since all of its bytes have landed."""
    real = Surviving.__init__

    def init(self: Surviving, *others: Any) -> None:
        real(self, *others)
        whole = self.whole

        async def carry(load: Load, work: Work) -> LoadReport:
            try:
                return await whole(load, work)
            except LeaseExpired:
                if work.flight is None:
                    raise
                return work.report(load.request_id)

        self.whole = carry

    monkeypatch.setattr(Surviving, "__init__", init)


def give_each_source_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time of a load begins anew when it leaves a source."""
    real = _Course._leave

    async def leave(self: _Course, error: KVFlowError | None) -> None:
        self._work.ends_s += 2.0
        await real(self, error)

    monkeypatch.setattr(_Course, "_leave", leave)


def mutate_matches(monkeypatch: pytest.MonkeyPatch, mutate: Callable[[Chunks, bool, int], Chunks | None]) -> None:
    def match(*args: Any, whole: bool, remote_block_size: int, **kwargs: Any) -> tuple[Chunks, ...]:
        found = match_chunks(*args, whole=whole, remote_block_size=remote_block_size, **kwargs)
        changed = (mutate(some, whole, remote_block_size) for some in found)
        return tuple(some for some in changed if some is not None)

    monkeypatch.setattr(plan, "match_chunks", match)


MUTATIONS: dict[str, tuple[Mutation, str, int]] = {
    # What is broken, the invariants that say so, and a seed that finds it.
    "give_back_without_hold": (give_back_without_hold, "I2 I3", 0),
    "leave_seals": (leave_seals, "I2 I3", 1),
    "believe_every_seal": (believe_every_seal, "I2 I3", 0),
    "trust_for_too_long": (trust_for_too_long, "I2 I3", 3),
    "forget_notifications": (forget_notifications, "I4", 0),
    "release_on_cancel": (release_on_cancel, "I1 I5", 0),
    "never_release_leased_blocks": (never_release_leased_blocks, "I5 I9", 0),
    "never_release_loaded_blocks": (never_release_loaded_blocks, "I5", 0),
    "forget_quarantines": (forget_quarantines, "I5 I7", 2),
    "lose_ends_of_reads": (lose_ends_of_reads, "I4 I7", 0),
    "never_expire": (never_expire, "I7", 1),
    "keep_broken_connections": (keep_broken_connections, "I7", 36),
    "tear_down_under_reads": (tear_down_under_reads, "I7", 3),
    "serve_before_computed": (serve_before_computed, "I2", 9),
    "read_past_the_watermark": (read_past_the_watermark, "I2", 9),
    "tell_of_more_than_has_landed": (tell_of_more_than_has_landed, "I2", 0),
    "advance_without_extend": (advance_without_extend, "I8", 31),
    "wait_for_a_forgotten_fail": (wait_for_a_forgotten_fail, "I7", 41),
    "follow_without_a_deadline": (follow_without_a_deadline, "I7", 25),
    "take_a_failed_lease_for_open": (take_a_failed_lease_for_open, "I2 I3", 9),
    "leave_a_look_behind": (leave_a_look_behind, "I5 I7", 23),
    "keep_what_has_failed": (keep_what_has_failed, "I5", 9),
    "land_while_the_device_writes": (land_while_the_device_writes, "I1 I2", 9),
    "keep_the_incarnation": (keep_the_incarnation, "I2", 2255),
    "leave_seals_of_before": (leave_seals_of_before, "I2 I3", 207),
    "read_the_wrong_end_of_windows": (read_the_wrong_end_of_windows, "I2", 3),
    "leave_state_behind": (leave_state_behind, "I2", 6),
    "ignore_mismatches": (ignore_mismatches, "I2", 31),
    "leave_extensions_unprotected": (leave_extensions_unprotected, "I3", 9),
    "end_without_the_payload": (end_without_the_payload, "I2", 9),
    "digest_the_wrong_blocks": (digest_the_wrong_blocks, "I2", 26),
    "read_the_next_under_the_last": (read_the_next_under_the_last, "I1 I5 I7", 16),
    "take_bytes_for_good_that_nobody_vouches_for": (take_bytes_for_good_that_nobody_vouches_for, "I2 I3", 21),
    "give_each_source_a_deadline": (give_each_source_a_deadline, "I7", 20),
    **PREFIX_MUTATIONS,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_promise_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The seed that is known to find it is tried first."""
    _, _, known = MUTATIONS[name]
    find(name, (known, *range(SEEDS_MAX)), monkeypatch)


@pytest.mark.thorough
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_broken_promise_is_found_by_another_seed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thorough: see `test_a_broken_promise_is_found` of this file; no promise hangs on one seed."""
    _, _, known = MUTATIONS[name]
    find(name, (seed for seed in range(SEEDS_MAX) if seed != known), monkeypatch)


# Some can only be found where engines sleep, verify, share prefixes, or let prompts flow: a model's attribute.
ONLY_WHERE = {
    "keep_the_incarnation": "sleeps",
    "leave_seals_of_before": "sleeps",
    "ignore_mismatches": "verifies",
    "advance_without_extend": "device",
    "wait_for_a_forgotten_fail": "device",
    "follow_without_a_deadline": "device",
    "read_the_next_under_the_last": "survives",
    "take_bytes_for_good_that_nobody_vouches_for": "survives",
    "give_each_source_a_deadline": "survives",
    **dict.fromkeys(PREFIX_MUTATIONS, "shares"),
}


def find(name: str, seeds: Iterable[int], monkeypatch: pytest.MonkeyPatch) -> None:
    mutate, expected, _ = MUTATIONS[name]
    mutate(monkeypatch)
    for seed in seeds:
        if name in ONLY_WHERE and not getattr(model_of(seed), ONLY_WHERE[name]):
            continue
        violation = simulate(seed).violation
        if violation is not None:
            print(f"{name}: seed {seed}: {violation}")
            assert violation.invariant in expected.split(), violation
            return
    pytest.fail(f"{name} was not found in {SEEDS_MAX} seeds")
