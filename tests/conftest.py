"""What all tests share: the fast suite and the thorough one, and what may run beside what.

By default the fast suite runs. `--thorough` runs everything, `--thorough-only` what the fast suite leaves out: tests
marked thorough, and those with a larger budget (`budgets.examples`). A test that is named in full always runs.
"""

from __future__ import annotations

import gc
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from budgets import budget
from hypothesis import HealthCheck, settings
from log_lines import written
from xdist.scheduler import LoadScopeScheduling

__all__ = ["written"]

HERE = Path(__file__).parent
collect_ignore = ["ray", "sglang", "vllm"]  # each has an environment and a pytest.ini of its own

PROCESSES = ("accelerator", "nixl", "bench", "gpu", "examples", "doctor", "cli")
"""Tests that start processes. Tests of one file run one after the other, and share their processes."""

LONG = ("test_parts.py", "simulator")
"""Tests in this process that take longest: they begin first, so that no core is idle at the end."""

LOOPS = ("asyncio", "uvloop")
VARIANTS = (*LOOPS, "shm", "tcp", "UCX", "UCX,POSIX")
"""Of a test that exists once per event loop, transport or set of NIXL's backends, the fast suite runs one, drawn by the
test's name. The thorough one runs the others, too, and the other loop where `LOOPS_MATTER`."""

LOOPS_MATTER = {
    f"runtime/test_{name}.py" for name in ("lifecycle", "side_channel", "connections", "ownership", "safety", "fuzz")
}
"""Where event loops differ, or may: opening and closing, breaking, cancelling, sockets."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="run everything, with full budgets")
    parser.addoption("--thorough-only", action="store_true", help="run only what the fast suite leaves out")


@pytest.fixture(scope="module")
def forked_children() -> Iterator[None]:
    """The children of benches and of the doctor are forked, from a process that has imported torch."""
    from kvflow.bench import child
    from tests.support.engine_process import forked_processes

    with forked_processes(child):
        yield


def pytest_configure(config: pytest.Config) -> None:
    # Threads of torch spin while they wait for each other. With some processes on each core, comparing the blocks of a
    # small cache took ten times the CPU. Workers and the processes that tests start inherit this.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if config.getoption("--thorough") or config.getoption("--thorough-only"):
        os.environ["KVFLOW_THOROUGH"] = "1"  # read where a budget is declared, by this process and by xdist's
    # On a machine that does other things too, an example may be slow without being wrong.
    health = [HealthCheck.too_slow]
    examples = budget(32, 75)
    settings.register_profile("kvflow", max_examples=examples, deadline=None, suppress_health_check=health)
    settings.load_profile("kvflow")


class _ByFile(LoadScopeScheduling):
    """Which worker runs what: tests that start processes go to one worker file by file, others wherever there is room.

    Not by marks of xdist_group, which xdist writes into test ids where pytest 9.2 does not look.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if Path(file).relative_to(HERE.name).parts[0] in PROCESSES else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadScopeScheduling:
    return _ByFile(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
            item.add_marker(pytest.mark.budget)
    places = {item: item.path.relative_to(HERE).parts[0] for item in items}
    items.sort(key=lambda item: (places[item] not in PROCESSES, places[item] not in LONG))
    _mark_variants(items)
    if any("::" in argument for argument in config.args):
        return
    thorough, only = config.getoption("--thorough"), config.getoption("--thorough-only")
    chosen = {item: not item.get_closest_marker("other_loop") and (thorough or _runs(item, only)) for item in items}
    config.hook.pytest_deselected(items=[item for item in items if not chosen[item]])
    items[:] = [item for item in items if chosen[item]]


def pytest_collection_finish() -> None:
    """What exists now stays. Collections of garbage that looked at it took most of the time of some tests."""
    gc.freeze()


def _runs(item: pytest.Item, thorough_only: bool) -> bool:
    thorough = item.get_closest_marker("thorough") is not None
    return thorough or item.get_closest_marker("budget") is not None if thorough_only else not thorough


def _mark_variants(items: list[pytest.Item]) -> None:
    cells: defaultdict[tuple[str, ...], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function):
            parameters = item.callspec.id.split("-") if hasattr(item, "callspec") else []
            if set(parameters) & set(VARIANTS):
                cell = (item.nodeid.split("[")[0], *(part for part in parameters if part not in VARIANTS))
                cells[cell].append(item)
    for cell, variants in cells.items():
        kept = variants[crc32(":".join(cell).encode()) % len(variants)]
        for item in variants:
            same = _loop_of(item) == _loop_of(kept) or item.path.relative_to(HERE).as_posix() in LOOPS_MATTER
            if item is not kept:
                item.add_marker(pytest.mark.thorough if same else pytest.mark.other_loop)


def _loop_of(item: pytest.Function) -> set[str]:
    return set(item.callspec.id.split("-")) & set(LOOPS)
