"""How much of the house one meets on a warm `load_blocks`: numbers that may only go down.

Counted in kvflow's own files, from the call to its report: on the in-process transport in virtual time, so that a slow
host does not make a read a slow one, and over NIXL with the agents' threads. Lower a ceiling when you have lowered its
number. Decision 0032 has what they were and what was aimed at.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
from pairs import virtual_pair
from tests_support import in_virtual_time, small_cache

import kvflow
from kvflow.core.protocol import codec
from kvflow.core.protocol.notifications import ReadDone
from kvflow.runtime.peers.peer import Source
from kvflow.testing import InprocPair

PACKAGE = Path(kvflow.__file__).parent

# What a load may enter. "calls": of our functions, "all calls": of any Python function.
CEILINGS = {"files": 17, "functions": 73, "calls": 82, "all calls": 156}
NIXL_CEILINGS = {"calls": 140}  # functions depend on what the threads find when they look
# One call of them tells the transport to look for the reader's word sooner: see `Transport.expect_notifications`.
SERVE_CEILINGS = {"files": 15, "functions": 29, "calls": 30, "all calls": 67}
END_CEILINGS = {"files": 10, "functions": 25, "calls": 28, "all calls": 97}
RELEASE_CEILINGS = {"files": 21, "functions": 60, "calls": 68, "all calls": 166}
REACH_MAX = 7
_LOADS = 20


class Trace:
    """Calls that are entered between `start` and `stop`, on this thread, and with `threads` on agents' threads, too."""

    def __init__(self, *, threads: bool = False) -> None:
        self._threads = threads
        self._own: dict[CodeType, bool] = {}
        self._begun = False
        self._forget()
        if threads:
            threading.setprofile(self._note_elsewhere)  # of threads that begin from now on

    def _forget(self) -> None:
        self.files: set[str] = set()
        self.functions: Counter[CodeType] = Counter()
        self.all_calls = 0

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Forget earlier calls, and start."""
        self._forget()
        self._begun = True
        sys.setprofile(self._note)
        try:
            yield
        finally:
            sys.setprofile(None)
            self._begun = False

    @property
    def found(self) -> dict[str, int]:
        return {
            "files": len(self.files),
            "functions": len(self.functions),
            "calls": sum(self.functions.values()),
            "all calls": self.all_calls,
        }

    def assert_below(self, what: str, ceilings: dict[str, int]) -> None:
        print(f"{what} meets {self.found}; ceilings {ceilings}")
        assert min(self.found.values()) > 5, "the trace saw nothing"
        assert over(self.found, ceilings) == {}

    def _note_elsewhere(self, frame: FrameType, event: str, returned: Any) -> None:
        if self._begun and threading.current_thread().name.startswith("kvflow-agent"):
            self._note(frame, event, returned)

    def _note(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        self.all_calls += event == "call"
        if code not in self._own:
            file = Path(code.co_filename)
            self._own[code] = PACKAGE in file.parents and "testing" not in file.parts
        if not self._own[code]:
            return
        if event == "call":
            self.files.add(code.co_filename)
            self.functions[code] += 1


def over(found: dict[str, int], ceilings: dict[str, int]) -> dict[str, int]:
    """The numbers that are too high."""
    return {name: count for name, count in found.items() if count > ceilings.get(name, count)}


async def load(pair: InprocPair, name: str, trace: Trace | None = None) -> None:
    lease = pair.offer([3, 4], name)
    wanted = pair.wanted(lease, [0, 1])
    with trace.on() if trace else contextlib.nullcontext():
        await pair.consumer.runtime.load_blocks(wanted)
    await lease


@in_virtual_time
async def test_what_a_warm_load_meets() -> None:
    trace = Trace()
    async with virtual_pair() as pair:
        for index in range(3):
            await load(pair, f"warm {index}")
        await load(pair, "traced", trace)
    trace.assert_below("a warm load", CEILINGS)


@in_virtual_time
async def test_what_opening_a_lease_its_end_and_a_release_meet() -> None:
    """The end is from a reader's word that it has read to the blocks that are the engine's again.

    A release is a ticket given back unread to a connected producer: from the call to the blocks that are free again.
    """
    trace = Trace()
    async with virtual_pair() as pair:
        await load(pair, "warm")
        with trace.on():
            lease = pair.offer([3, 4], "traced")
        trace.assert_below("opening a lease", SERVE_CEILINGS)
        word = ReadDone((lease.ticket.first.lease_id,), reader="reader", numerator=1, denominator=1)
        serving = pair.producer.runtime._supervisor.registered.serving  # type: ignore[union-attr]
        with trace.on():
            serving.on_notification(codec.encode(word))
            assert await lease == "read"
        trace.assert_below("the end of a lease", END_CEILINGS)
        lease = pair.offer([3, 4], "traced")
        with trace.on():
            assert await pair.consumer.runtime.release_blocks(lease.ticket)
            assert await lease == "read"
        trace.assert_below("a release", RELEASE_CEILINGS)


@pytest.mark.nixl
async def test_what_a_warm_load_meets_over_nixl() -> None:
    """With the work of the agents' threads: the least of a few runs, since a thread may poll too early."""
    trace, least = Trace(threads=True), dict[str, int]()
    configs = [kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0") for name in ("prefill", "decode")]
    async with kvflow.Runtime(configs[0]) as prefill, kvflow.Runtime(configs[1]) as decode:
        for runtime in (prefill, decode):
            await runtime.register_kv_caches(*small_cache(num_blocks=64, block_size=16))
        for number in range(_LOADS):
            lease = prefill.serve_blocks(kvflow.ServeRequest(f"req {number}", block_ids=[3, 4], num_tokens=32))
            request = kvflow.LoadRequest(lease.request_id, ticket=lease.ticket.to_params(), block_ids=[0, 1])
            with trace.on():
                await decode.load_blocks(request)
            await lease
            assert trace.found["functions"] > CEILINGS["functions"], "the trace did not see the threads"
            least = {name: min(count, least.get(name, count)) for name, count in trace.found.items()}
    threading.setprofile(None)
    print(f"a warm load over NIXL meets {least}; ceilings {NIXL_CEILINGS}")
    assert over(least, NIXL_CEILINGS) == {}


async def test_what_reaching_connected_ranks_meets() -> None:
    """The short way: nothing is waited for, and little is asked."""
    trace, found = Trace(), list[Source]()
    async with virtual_pair() as pair:
        await load(pair, "warm")
        incarnation, lease = pair.consumer.runtime._supervisor.incarnation, pair.offer([3], "traced")
        assert incarnation is not None
        resolver = incarnation.host.resolver
        ticket = resolver.read_ticket(lease.ticket)
        with trace.on():
            reached = resolver.resolve_nowait(ticket, found.append)
        assert reached == found
        assert [source.lease for source in found] == list(ticket.ranks)
        lease.revoke()
    print(f"reaching a connected rank enters {len(trace.functions)} functions; ceiling {REACH_MAX}")
    assert len(trace.functions) <= REACH_MAX
