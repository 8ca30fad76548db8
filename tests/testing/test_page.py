"""The tests of docs/testing.md find each bug of its table, planted into the page's own engine."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from doc_blocks import PAGES, blocks_of
from tests_support import each

from kvflow.testing import InprocCluster, run_virtual

BLOCKS = blocks_of("docs/testing.md", PAGES["docs/testing.md"].read_text())
PAGE = "".join(block.text for block in BLOCKS if block.mark == "file: test_engine.py")
HAND_OVER = "test_a_hand_over_is_watched"
CANCELLED = "test_a_decode_that_is_cancelled_anywhere"

FREES_LEASED = "        await lease\n        self.give_back(block_ids)\n"
SETTLES = "        load.cancel()  # no effect on a load that has ended\n        await load.settled()\n"
FREES = "        await load.settled()\n        self.give_back(block_ids)\n"
LOADS = """\
        try:
            await load
        finally:
            await asyncio.shield(self.after(load, block_ids))
"""
WRITES = "        self.kv_caches['layers.0'][:, block_ids] = 0.0\n"

BUGS = {
    "writes to offered blocks": (
        HAND_OVER,
        FREES_LEASED,
        WRITES + FREES_LEASED,
        "0 of request .* was overwritten before",
    ),
    "frees offered blocks": (
        HAND_OVER,
        FREES_LEASED,
        "        self.give_back(block_ids)\n        await lease\n",
        r"was freed at .*\(prefill\) while it is leased",
    ),
    "frees blocks under a load": (
        HAND_OVER,
        LOADS,
        "        await asyncio.sleep(0)\n        self.give_back(block_ids)\n        await load\n",
        r"was freed at .*\(decode\) while it is being loaded",
    ),
    "frees a block twice": (HAND_OVER, FREES, FREES + "        self.give_back(block_ids)\n", "it was freed before"),
    "never frees a block": (
        HAND_OVER,
        FREES_LEASED,
        "        await lease\n",
        r"\(prefill\) and never freed, as 1 other",
    ),
    "loses a block": (
        HAND_OVER,
        "self.free += block_ids\n",
        "self.free += block_ids[1:]\n",
        "is free 0 times, taken at no",
    ),
    "gives a block to two requests": (
        HAND_OVER,
        "[self.free.pop() for _ in range(count)]",
        "self.free[-1 : -count - 1 : -1]",
        "is free 2 times",
    ),
    "loads into the wrong blocks": (
        HAND_OVER,
        "ticket=ticket, block_ids=block_ids",
        "ticket=ticket, block_ids=block_ids[::-1]",
        "is not token 0 of the prompt",
    ),
    "frees before it is settled": (CANCELLED, SETTLES, "", r"was freed at .*\(after\) while it is quarantined"),
    "cancels, and frees before it is settled": (
        CANCELLED,
        SETTLES,
        "        load.cancel()\n",
        r"was freed at .*\(after\) while it is quarantined",
    ),
    "frees after a success only": (
        CANCELLED,
        LOADS,
        "        await load\n        await self.after(load, block_ids)\n",
        r"\(decode\) and never freed, as 1 other",
    ),
    "neither awaits nor cancels": (
        CANCELLED,
        LOADS + "\n    async def after(self, load, block_ids):\n" + SETTLES,
        LOADS.replace("await load\n", "await load.settled()\n")
        + "\n    async def after(self, load, block_ids):\n        await load.settled()\n",
        "went on to its end though nobody waits for it",
    ),
}


def run(name: str, text: str) -> None:
    """Run one test of the page with the engine in `text`, in virtual time."""
    names: dict[str, Any] = {}
    exec(compile(text, "test_engine.py", "exec"), names)
    test: Callable[..., Any] = names[name]
    given = test(InprocCluster()) if inspect.signature(test).parameters else test()
    if inspect.iscoroutine(given):
        run_virtual(given)


@each("name", [HAND_OVER, CANCELLED])
def test_an_engine_without_a_bug_passes(name: str) -> None:
    run(name, PAGE)


@each("bug", BUGS)
def test_a_bug_is_found(bug: str) -> None:
    name, right, wrong, message = BUGS[bug]
    assert PAGE.count(right) == 1
    with pytest.raises(AssertionError, match=message):
        run(name, PAGE.replace(right, wrong))
