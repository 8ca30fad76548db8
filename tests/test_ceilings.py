"""How much of the house one meets on a warm `load_blocks`: numbers that may only go down.

Counted on the in-process transport, in virtual time so that a slow host does not make a read a slow one, in kvflow's
own files, from the call to its report: files entered, functions entered, and types of ours among what is passed and
returned. Lower a ceiling when you have lowered its number.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from pairs import virtual_pair
from tests_support import in_virtual_time

import kvflow
from kvflow.runtime.peers.peer import Source
from kvflow.testing import InprocPair

PACKAGE = Path(kvflow.__file__).parent

# What a load may meet.
CEILINGS = {"files": 14, "functions": 90, "types": 40}
CONSTRUCTOR_MAX = 6
CHAIN_MAX = 7
REACH_MAX = 12


class Trace:
    """What is entered between `start` and `stop`."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.functions: set[str] = set()
        self.types: set[str] = set()

    def start(self) -> None:
        sys.setprofile(self._note)

    def stop(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, returned: Any) -> None:
        code = frame.f_code
        file = Path(code.co_filename)
        if PACKAGE not in file.parents or "testing" in file.parts:
            return
        if event == "return":
            self._meet(returned)
        elif event == "call":
            self.files.add(str(file))
            self.functions.add(f"{file} {code.co_qualname}")
            for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
                self._meet(frame.f_locals.get(name))

    def _meet(self, value: object) -> None:
        name = type(value).__module__
        if name.startswith("kvflow.") and not name.startswith("kvflow.testing."):
            self.types.add(f"{type(value).__module__}.{type(value).__qualname__}")


async def load(pair: InprocPair, name: str, trace: Trace | None = None) -> None:
    lease = pair.offer([3, 4], name)
    wanted = pair.wanted(lease, [0, 1])
    if trace is not None:
        trace.start()
    try:
        await pair.consumer.runtime.load_blocks(wanted)
    finally:
        if trace is not None:
            trace.stop()
    await lease


@in_virtual_time
async def test_what_a_warm_load_meets() -> None:
    trace = Trace()
    async with virtual_pair() as pair:
        for index in range(3):
            await load(pair, f"warm {index}")
        await load(pair, "traced", trace)
    found = {"files": len(trace.files), "functions": len(trace.functions), "types": len(trace.types)}
    print(f"a warm load meets {found}; ceilings {CEILINGS}")
    assert {name: count for name, count in found.items() if count > CEILINGS[name]} == {}
    assert min(found.values()) > 5, "the trace saw nothing"


async def test_what_reaching_connected_ranks_meets() -> None:
    """The short way: nothing is waited for, and little is asked."""
    trace, found = Trace(), list[Source]()
    async with virtual_pair() as pair:
        await load(pair, "warm")
        cache, lease = pair.consumer.runtime._supervisor.cache, pair.offer([3], "traced")
        assert cache is not None
        ticket = cache.reach.parse_ticket(lease.ticket)
        with pytest.raises(StopIteration) as reached:  # the end of a coroutine that waits for nothing
            trace.start()
            try:
                cache.reach.reach(ticket, found.append).send(None)
            finally:
                trace.stop()
        assert reached.value.value == found
        assert [source.lease for source in found] == list(ticket.ranks)
        lease.revoke()
    print(f"reaching a connected rank enters {len(trace.functions)} functions; ceiling {REACH_MAX}")
    assert len(trace.functions) <= REACH_MAX


def test_constructors_take_few_parameters() -> None:
    """Options of public classes, and the fields of dataclasses, apart."""
    counted: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                counted[f"{path.name}:{node.lineno}"] = len(node.args.args) + len(node.args.kwonlyargs) - 1
    longest = max(counted, key=lambda name: counted[name])
    print(f"the longest constructor is {longest} with {counted[longest]} parameters; ceiling {CONSTRUCTOR_MAX}")
    assert counted[longest] <= CONSTRUCTOR_MAX


def test_import_chains_within_the_runtime_are_short() -> None:
    imports: dict[str, set[str]] = {}
    for path in (PACKAGE / "runtime").rglob("*.py"):
        names = set()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvflow.runtime."):
                names.add(str(node.module))
        imports[".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)] = names

    def chain(name: str) -> list[str]:
        return [name, *max((chain(below) for below in imports.get(name, ())), key=len, default=[])]

    longest = max((chain(name) for name in imports), key=len)
    shown = " > ".join(name.removeprefix("kvflow.runtime.") for name in longest)
    print(f"the longest chain of imports is {shown}, {len(longest)} modules; ceiling {CHAIN_MAX}")
    assert len(longest) <= CHAIN_MAX
