"""Small helpers for several test modules."""

from __future__ import annotations

import asyncio
import copy
import functools
import inspect
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import replace
from typing import Any, ParamSpec, TypeVar

import msgspec
import torch

from kvflow import CacheLayout, Config, Limits, Runtime, RuntimeState, Ticket
from kvflow.core.policy.states import LeaseState
from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.ticket import with_changes
from kvflow.runtime.records import LeaseRecord, LoadRecord
from kvflow.testing import run_virtual

Parameters = ParamSpec("Parameters")
StructT = TypeVar("StructT", bound=msgspec.Struct)

WAIT_S = 120.0
"""Maximum time for which a test waits. It is long for slow hosts; only a failing test waits for all of it."""

PATIENT = Config(
    engine_id="any",
    lease_ttl_s=10 * WAIT_S,
    load_deadline_s=WAIT_S,
    handshake_timeout_s=WAIT_S,
    cancel_grace_s=WAIT_S,
    drain_timeout_s=1.0,
    limits=Limits(lease_wait_s=WAIT_S, goodbye_timeout_s=WAIT_S, transport_close_timeout_s=WAIT_S),
)
"""A config with bounds at least as long as a test's waits. A test of a bound sets this bound itself."""


def limited(config: Config, **limits: Any) -> Config:
    """Return `config` with these limits replaced."""
    return replace(config, limits=replace(config.limits, **limits))


async def until(condition: Callable[[], object]) -> None:
    """Yield to other tasks until `condition()` is true. Raise TimeoutError after `WAIT_S`.

    The time is the machine's: virtual time does not pass meanwhile.
    """
    ends_s = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > ends_s:
            raise TimeoutError(f"not within {WAIT_S} s")
        await asyncio.sleep(0)


def lose_errors() -> None:
    """Drop errors that no task retrieves, on the running loop: for tests with mistakes that lose errors.

    asyncio would log each with its traceback when the garbage is collected, in the middle of a later test.
    """
    asyncio.get_running_loop().set_exception_handler(lambda _, __: None)


async def turns(count: int) -> None:
    """Yield to other tasks `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


def each(names: str | Sequence[str], values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each of `values`, as a single test, where `pytest.mark.parametrize` would make hundreds.

    The failure names every value that failed. Fixtures are made once for all values. Not for coroutine functions.
    """
    cases = list(values)
    words = [names] if isinstance(names, str) else list(names)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        def run(**fixtures: Any) -> None:
            failed: dict[str, Exception] = {}
            for case in cases:
                try:
                    test(**fixtures, **(dict(zip(words, case, strict=True)) if len(words) > 1 else {words[0]: case}))
                except Exception as error:  # noqa: BLE001 - reported below
                    failed[ascii(case)[:200]] = error
            if failed:
                told = [f"{case}: {type(error).__name__}: {error}" for case, error in failed.items()]
                raise AssertionError("\n".join(told)) from next(iter(failed.values()))

        assert cases, "no case"
        assert not inspect.iscoroutinefunction(test), "it would never run"
        functools.update_wrapper(run, test)
        left = [known for name, known in inspect.signature(test).parameters.items() if name not in words]
        run.__signature__ = inspect.Signature(left)  # type: ignore[attr-defined]
        del run.__dict__["__wrapped__"]
        return run

    return decorate


def in_virtual_time(test: Callable[Parameters, Coroutine[Any, Any, None]]) -> Callable[Parameters, None]:
    """Run a coroutine test in virtual time, where time passes only when no callback is ready.

    So anything that a bound should end has always begun before the bound passes.
    """

    @functools.wraps(test)
    def run(*arguments: Parameters.args, **options: Parameters.kwargs) -> None:
        run_virtual(test(*arguments, **options))

    return run


class Records:
    """An observer that keeps all records."""

    def __init__(self) -> None:
        self.loads: list[LoadRecord] = []
        self.leases: list[LeaseRecord] = []

    def load_ended(self, record: LoadRecord) -> None:
        self.loads.append(record)

    def lease_ended(self, record: LeaseRecord) -> None:
        self.leases.append(record)


def small_cache(
    *, num_blocks: int = 8, layers: int = 2, block_size: int = 4, device: str = "cpu", fill: float = 0.0
) -> tuple[dict[str, torch.Tensor], CacheLayout]:
    """Return a cache of a few kilobytes, with K and V on the first axis and order HND, and its layout."""
    shape = (2, num_blocks, 2, block_size, 8)
    kv_caches = {f"layers.{index}": torch.full(shape, fill, device=device) for index in range(layers)}
    return kv_caches, CacheLayout.infer(kv_caches, order="HND", block_size=block_size)


async def leases_ended(runtime: Runtime) -> None:
    """Wait until all leases have ended and their blocks are free. Fail if a lease ended only by expiry."""
    incarnation = runtime._supervisor.incarnation
    if incarnation is None or runtime.state is RuntimeState.CLOSED:
        return
    leases = [offer.entry for offer in incarnation.serving._open_leases.values()]
    open_now = [lease for lease in leases if lease.state is LeaseState.OFFERED]  # a notification may be on its way
    async with asyncio.timeout(WAIT_S):
        await incarnation.serving.drained()
    left_open = [lease for lease in open_now if lease.state is LeaseState.EXPIRED]
    assert not left_open, f"nothing ended them but their time: {left_open}"


async def pass_deadlines(runtime: Runtime) -> None:
    """Make the deadlines of all loads under way pass now, once the test has brought the loads to the right state."""
    assert runtime._supervisor.incarnation is not None
    loader, now_s = runtime._supervisor.incarnation.loader, asyncio.get_running_loop().time()
    for load in loader._loads:
        load.deadline_at_s = now_s
    loader._set_deadline_timer(now_s)


TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
TICKET = Ticket(
    engine_id="prefill-0",
    request_id="req-1",
    block_ids=(3,),
    num_tokens=4,
    ttl_s=30.0,
    tp_size=1,
    pp_size=1,
    dp_rank=0,
    block_size=4,
    kv_heads=2,
    model_kv_heads=0,
    fixed_ports=False,
    ranks=(
        RankLease(
            pp_rank=0,
            tp_rank=0,
            lease_id="0123456789abcdef" * 2,
            seal_index=1,
            incarnation="8f14e45fceea167a",
            host="10.0.0.7",
            port=5601,
            block_ids=(5,),
        ),
    ),
    traceparent=TRACEPARENT,
    prompt_digest="0123456789abcdef" * 2,
)
"""A valid ticket with every optional field set."""


def any_ticket(engine_id: str = "prefill", **changes: Any) -> Ticket:
    """Return a ticket of an engine with one rank and no blocks, with `changes` to the ticket or its rank."""
    rank = msgspec.structs.replace(TICKET.first, block_ids=None)
    nothing = {"block_ids": (), "num_tokens": 0, "prompt_digest": "", "ranks": (rank,)}
    return altered(with_changes(TICKET, engine_id=engine_id, **nothing), **changes)


def altered(ticket: Ticket, **changes: Any) -> Ticket:
    """Return `ticket` with `changes` to its fields, or to those of its first rank."""
    of_rank = {name: changes.pop(name) for name in list(changes) if name in RankLease.__struct_fields__}
    first = RankLease(**{**msgspec.structs.asdict(ticket.first), **of_rank})
    return with_changes(ticket, ranks=(first, *ticket.ranks[1:]), **changes)


def unchecked(struct: StructT, **changes: Any) -> StructT:
    """Return a copy of a struct with `changes` that are not checked, as a forged message may have."""
    forged = copy.copy(struct)
    for name, value in changes.items():
        msgspec.structs.force_setattr(forged, name, value)
    return forged
