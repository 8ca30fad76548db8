"""Draining: let leases and loads end by themselves, make them end when the time is up, and say what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvflow.config import Config
from kvflow.logs import logger_of
from kvflow.runtime.load.loader import Loader
from kvflow.runtime.part import Ending, Part
from kvflow.runtime.producer.serving import Serving

logger = logger_of(__name__)

_NAMED_MAX = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainReport:
    """Outcomes of what was open when draining began; `finished`: all ended by itself, within the deadline."""

    finished: bool
    leases_read: int = 0
    leases_expired: int = 0
    leases_revoked: int = 0
    loads_succeeded: int = 0
    loads_failed: int = 0
    """Loads that failed, were cancelled, or were ended by the deadline."""


class Registration(Protocol):
    """The work that a registration has begun: `assembly.RegisteredCache`, named to keep chains of imports short."""

    @property
    def serving(self) -> Serving: ...
    @property
    def loader(self) -> Loader: ...
    @property
    def parts(self) -> Sequence[Part]: ...


def busy(work: Registration) -> bool:
    """True if a lease or a load is open, or a part has work under way, or blocks are quarantined."""
    loading, parts = work.loader.statistics, any(open_of(part) for part in work.parts)
    return bool(work.serving.statistics.open_leases or loading.open_loads or loading.quarantines or parts)


def open_of(part: Part) -> int:
    """Requests that a part has under way."""
    return 0 if (now := part.statistics) is None else now.open_requests


async def drain(work: Registration, config: Config, deadline_s: float) -> DrainReport:
    """Wait until nothing is open, at most `deadline_s`; then revoke leases, end loads, and wait for that, too.

    The second wait is bounded by Limits.seal_hold_s, cancel_grace_s and drain_timeout_s. Cancelling stops the waiting.
    """
    serving, loader = work.serving, work.loader
    serving.news.turn_away(f"engine {config.engine_id!r} is draining")
    leases, loads = serving.statistics, loader.statistics
    waits = [serving.drained(), loader.drained(), *(part.drained() for part in work.parts)]
    finished = await _all_within(waits, deadline_s)
    if not finished:
        what = f"leases of {_some(serving.open_requests)}, loads of {_some(loader.open_requests)}"
        logger.warning("engine %r: open after draining for %s s, ended now: %s", config.engine_id, deadline_s, what)
    await end(work, config)
    leases_now, loads_now = serving.statistics, loader.statistics
    return DrainReport(
        finished=finished,
        leases_read=leases_now.read - leases.read,
        leases_expired=leases_now.expired - leases.expired,
        leases_revoked=leases_now.revoked - leases.revoked,
        loads_succeeded=loads_now.succeeded - loads.succeeded,
        loads_failed=loads_now.failed + loads_now.cancelled - loads.failed - loads.cancelled,
    )


async def end(work: Registration, config: Config, *, broken: bool = False) -> None:
    """Revoke leases, end loads and what parts have under way.

    In a broken runtime it may never be known when the last bytes of loads have landed.
    """
    serving, loader = work.serving, work.loader
    serving.close()
    loader.close()
    for part in work.parts:
        part.end(Ending.CLOSED)
    waits = [serving.drained()] if broken else [serving.drained(), loader.drained()]
    waits += [part.drained() for part in work.parts]
    bound_s = config.ending_s
    if not await _all_within(waits, bound_s):
        what = f"{len(loader.quarantines)} loads' bytes may still land, leases of {_some(serving.open_requests)}"
        logger.warning("engine %r: still open after another %s s: %s", config.engine_id, bound_s, what)


def _some(requests: Sequence[str]) -> str:
    """The first of some requests, for a log line."""
    more = f" and {len(requests) - _NAMED_MAX} more" if len(requests) > _NAMED_MAX else ""
    return f"{list(requests[:_NAMED_MAX])}{more}"


async def _all_within(waits: Sequence[Coroutine[None, None, None]], timeout_s: float) -> bool:
    """Wait for all of `waits`, at most `timeout_s`. True if all are over."""
    try:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*waits)
    except TimeoutError:
        return False
    return True
