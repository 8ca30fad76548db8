"""What is compared after every step, when all is quiet, and after closing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvflow.runtime.runtime import Runtime
from kvflow.runtime.supervisor import RuntimeStatistics
from kvflow.testing.books import assert_closed, assert_conserved, assert_quiet

if TYPE_CHECKING:
    from kvflow.testing.simulator.engine import Engine
    from kvflow.testing.simulator.simulation import Simulation
    from kvflow.testing.simulator.work import Load, Offer, Rank


class Checks:
    """Compares kvflow's books with those that the engines keep themselves."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def step(self) -> None:
        """After every callback. A ledger is looked at when it has changed."""
        for engine in self._simulation.engines:
            for rank in engine.ranks:
                now = rank.uses.tobytes()
                if now != rank.uses_seen:
                    rank.uses_seen = now
                    self._compare(engine, rank)

    def conserved(self, engine: Engine) -> None:
        """At any moment: what users' own tests can check."""
        for rank in engine.ranks:
            leases = [offer.leases[rank.index] for offer in engine.offers if rank.holds_lease(offer)]
            try:
                assert_conserved(rank.runtime, leases)
            except AssertionError as error:
                self._simulation.fail("I5", f"{engine}: {error}")

    def quiet(self) -> None:
        """Nothing is under way: all books are empty, and every offer and load has ended once."""
        for engine in self._simulation.engines:
            if any(engine.owners) or engine.offers or engine.loads:
                self._simulation.fail("I5", f"{engine}: the engine itself is not quiet: {engine.owners}")
            for rank in engine.ranks:
                self._compare(engine, rank)
                self._demand(engine, assert_quiet, rank.runtime)
                self._compare_outcomes(engine, rank)

    def closed(self, engine: Engine, runtime: Runtime) -> None:
        self._demand(engine, assert_closed, runtime)

    def _compare(self, engine: Engine, rank: Rank) -> None:
        """The ledger of a rank and the owners that its engine knows."""
        for block, use in enumerate(rank.uses.tolist()):
            owner = engine.owners[block]
            if use == 0:
                if owner in engine.offers and rank.holds_lease(owner):
                    self._fail(engine, "I3", block, "free, but its lease is open", owner)
            elif use > 0 and owner not in engine.offers:
                self._fail(engine, "I5", block, f"leased {use} times", owner)
            elif use < 0 and owner not in engine.loads:
                self._fail(engine, "I5", block, "being loaded or quarantined", owner)

    def _compare_outcomes(self, engine: Engine, rank: Rank) -> None:
        """Invariant I4, as far as counters tell."""
        statistics = rank.runtime.statistics()
        serving, loading = statistics.serving, statistics.loading
        assert serving is not None
        assert loading is not None
        ended = serving.read + serving.expired + serving.revoked
        if (ended, loading.succeeded) != (rank.served, rank.loaded):
            self._simulation.fail(
                "I4",
                f"{engine}: {rank.served} leases were made and {ended} have ended; "
                f"{rank.loaded} loads returned a report and {loading.succeeded} were counted",
            )

    def _demand(self, engine: Engine, check: Callable[[RuntimeStatistics], None], runtime: Runtime) -> None:
        try:
            check(runtime.statistics())
        except AssertionError as error:
            self._simulation.fail("I5", f"{engine}: {error}")

    def _fail(self, engine: Engine, invariant: str, block: int, use: str, owner: Offer | Load | None) -> None:
        whose = "nobody's" if owner is None else str(owner)
        self._simulation.fail(invariant, f"{engine}: block {block} is {use}; to the engine it is {whose}")
