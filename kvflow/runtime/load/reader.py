"""The seam of readers: one is chosen for each load, once, from its sources and its request."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Plan


class Reader(Protocol):
    """Way of a load's bytes into its blocks: straight, through buffers, as they are computed, or with a comparison."""

    def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> Awaitable[bool]:
        """Read all blocks of a plan.

        Args:
            flight: what the load has claimed; it posts the reads.
            load: the load, with its request.
            work: state of the load.
            plan: ranks and chunks to read.

        Returns:
            True if the leases have covered the whole read; see `Flight.fly`.
        """
        ...
