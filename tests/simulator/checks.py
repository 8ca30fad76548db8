"""Compares kvflow's books with the engines' own: after each step, when nothing is open, and after closing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ParamSpec

from kvflow.testing.accounting import assert_conserved, assert_quiet

if TYPE_CHECKING:
    from tests.simulator.engine import SimEngine
    from tests.simulator.work import SimRank

P = ParamSpec("P")


def check_changed(changed: dict[SimRank, SimEngine]) -> None:
    """Compare the ledgers of `changed` ranks with their engines, and clear `changed`. Called after each step."""
    if changed:
        for rank, engine in changed.items():
            if rank in engine.ranks:
                _compare_owners(engine, rank)
        changed.clear()


def check_conserved(engine: SimEngine) -> None:
    """Run the check that users' own tests can run at any moment, on all ranks."""
    for rank in engine.ranks:
        leases = [offer.leases[rank.index] for offer in engine.offers if rank.holds_lease(offer)]
        demand(engine, assert_conserved, rank.runtime, leases + engine.prefix_cache.leases(rank))


def check_quiet(engine: SimEngine) -> None:
    """Check that nothing is open: all books are empty, and every offer and load has ended exactly once."""
    if any(engine.owners) or engine.offers or engine.loads:
        engine.fail("I5", f"the engine itself is not quiet: {engine.owners}")
    for rank in engine.ranks:
        _compare_owners(engine, rank)
        demand(engine, assert_quiet, rank.runtime.statistics())
        if seals := rank.runtime._supervisor.seals.used:
            engine.fail("I5", f"{seals} seals are taken, though no lease is open")
        _compare_outcomes(engine, rank)


def demand(engine: SimEngine, check: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call `check`. Report an AssertionError as a broken invariant I5."""
    try:
        check(*args, **kwargs)
    except AssertionError as error:
        engine.fail("I5", str(error))


def _compare_owners(engine: SimEngine, rank: SimRank) -> None:
    """Compare the ledger of a rank with its engine's record of owners."""
    for block, use in enumerate(rank.uses.tolist()):
        owner = engine.owners[block]
        if use == 0 and owner in engine.offers and rank.has_leased(owner, block):
            invariant, what = "I3", "free, but its lease is open"
        elif use > 0 and owner not in engine.offers and not engine.prefix_cache.pinned(rank, block):
            invariant, what = "I5", f"leased {use} times"
        elif use < 0 and owner not in engine.loads:
            invariant, what = "I5", "being loaded or quarantined"
        else:
            continue
        engine.fail(invariant, f"block {block} is {what}; the engine has it for {owner or 'nobody'}")


def _compare_outcomes(engine: SimEngine, rank: SimRank) -> None:
    """Compare the counters of a rank with its engine's leases and loads (invariant I4)."""
    statistics = rank.runtime.statistics()
    serving, loading = statistics.serving, statistics.loading
    assert serving is not None
    assert loading is not None
    ended = serving.read + serving.expired + serving.revoked + serving.failed
    if ended != rank.served or not rank.loaded <= loading.succeeded <= rank.loaded + rank.unsure:
        engine.fail(
            "I4",
            f"{rank.served} leases were made and {ended} have ended; "
            f"{rank.loaded} loads returned a report and {loading.succeeded} were counted",
        )
