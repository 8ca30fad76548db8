"""Options and results of the experiments: limits, a line of JSON for each, and a table at the end.

An expected value follows from the sources of UCX, NIXL and CUDA. So an unexpected value means that something is slower,
or wrong, or was read wrongly: the experiment fails, and a person decides. On a CPU only values that must hold anywhere
are judged, such as the count of loads with wrong bytes. Whatever may crash runs in a child process.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import pytest

Fact: TypeAlias = str | int | float | bool | None
RESULTS, TABLE = "results.jsonl", "table.txt"
EXPECTED: dict[str, tuple[str, Callable[[Any, Any], bool]]] = {
    "least": (">=", lambda value, bound: isinstance(value, int | float) and value >= bound),
    "most": ("<=", lambda value, bound: isinstance(value, int | float) and value <= bound),
    "has": ("has", lambda value, word: isinstance(value, str) and word in value),
    "equals": ("=", lambda value, wanted: bool(value == wanted)),
}
CPU_TIMES = 10
"""How much longer a trial on a CPU may take, which is no matter of limits."""
_LEAST_S, _RESERVE_S = 10.0, 3.0


@dataclass
class Found:
    """One experiment: its device, its time limit, and its results so far."""

    name: str
    title: str
    device: str
    limit_s: float
    facts: dict[str, Fact] = field(default_factory=dict)
    expected: dict[str, str] = field(default_factory=dict)
    unexpected: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    @property
    def on_cuda(self) -> bool:
        return self.device == "cuda"

    def size(self, on_cuda: Any, on_cpu: Any) -> Any:
        """Return the size for this device: small on a CPU, to try the code."""
        return on_cuda if self.on_cuda else on_cpu

    def left_s(self) -> float:
        """Return the seconds that are left of the limit, less the time for an orderly end."""
        return self.limit_s - _RESERVE_S - (time.monotonic() - self.started_s)

    def add(self, fact: str, value: Fact, *, always: bool = False, **expected: Any) -> None:
        """Record a fact beside its expected value, as in `EXPECTED`. `always`: expect it on a CPU, too."""
        bounds = {word: bound for word, bound in expected.items() if bound is not None}
        self.facts[fact] = value
        self.expected[fact] = " and ".join(f"{EXPECTED[word][0]} {bound}" for word, bound in bounds.items())
        if (self.on_cuda or always) and not all(EXPECTED[word][1](value, bound) for word, bound in bounds.items()):
            self.unexpected.append(f"{fact}: {value}, expected {self.expected[fact]}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("experiments")
    group.addoption("--only", default="", metavar="E2,...", help="these experiments; all if left out")
    group.addoption("--out", type=Path, default=default_out(), help="a folder for results; $OUT or build/gpu")
    group.addoption("--device", choices=("cuda", "cpu", "standin"), default="cuda", help="others: small, trials")
    group.addoption("--total-s", type=float, default=570.0, help="how long all may take together")


def default_out() -> Path:
    return Path(os.environ.get("OUT") or Path(__file__).parents[2] / "build" / "gpu")


def pytest_configure(config: pytest.Config) -> None:
    times = 1 if config.getoption("--device", "cuda") == "cuda" else CPU_TIMES
    config.stash[UNTIL_S] = time.monotonic() + times * config.getoption("--total-s", 570.0)
    config.stash[RECORDS] = []


UNTIL_S = pytest.StashKey[float]()
RECORDS = pytest.StashKey[list[dict[str, Any]]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = {item: mark.args[0] for item in items for mark in item.iter_markers("experiment")}
    chosen = {name.strip().upper() for name in config.getoption("--only", "").split(",") if name.strip()}
    if unknown := chosen - set(names.values()):
        raise pytest.UsageError(f"--only: no experiment {', '.join(sorted(unknown))}; there are {[*names.values()]}")
    left_out = [item for item, name in names.items() if chosen and name not in chosen]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


@pytest.fixture(scope="session", autouse=True)
def children(request: pytest.FixtureRequest) -> Iterator[None]:
    """Children of a trial are forked from a process that has imported torch; where a device is measured, none is."""
    from kvflow.bench import child
    from tests.support.engine_process import forked_processes  # it imports torch

    cuda = request.config.getoption("--device", "cuda") == "cuda"
    with contextlib.nullcontext() if cuda else forked_processes(child):
        yield


@pytest.fixture
def found(request: pytest.FixtureRequest) -> Found:
    """Skips, and says why, where the experiment cannot run."""
    device = request.config.getoption("--device", "cuda")
    mark = request.node.get_closest_marker("experiment")
    name, limit_s = mark.args
    if reason := without(device, only_cuda=mark.kwargs.get("only_cuda", False)):
        pytest.skip(reason)
    if (left_s := request.config.stash[UNTIL_S] - time.monotonic()) < _LEAST_S:
        pytest.skip(f"{max(left_s, 0):.0f} s left of the whole time")
    limit_s *= 1 if device == "cuda" else CPU_TIMES
    title = (request.node.function.__doc__ or "").partition("\n")[0]
    return Found(name, title, device, min(limit_s, left_s))


def without(device: str, *, only_cuda: bool) -> str:
    """Return the reason why an experiment cannot run, or an empty text."""
    import torch

    if device != "cuda":
        return "needs a CUDA device" if only_cuda else ""
    if torch.version.cuda is None:
        return f"needs a CUDA device: torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"needs a CUDA device: torch {torch.__version__} sees none"


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    found = pyfuncitem.funcargs.get("found")
    if not isinstance(found, Found):
        return (yield)
    with limited(found.limit_s):
        result = yield
    if found.unexpected:
        pytest.fail("\n".join(found.unexpected), pytrace=False)
    return result


@contextlib.contextmanager
def limited(limit_s: float) -> Iterator[None]:
    """Interrupt waits inside the block when the time is over. Child processes end with their parents."""

    def over(*_: object) -> None:
        pytest.fail(f"over its limit of {limit_s:.0f} s")

    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A line is written as soon as an experiment has ended, however it has."""
    report = yield
    mark = item.get_closest_marker("experiment")
    if mark is None or not (report.when == "call" or (report.when == "setup" and report.outcome != "passed")):
        return report
    found = getattr(item, "funcargs", {}).get("found")
    why = str(call.excinfo.value) if call.excinfo else ""
    record = {"experiment": mark.args[0], "ending": report.outcome, "why": why, "seconds": report.duration}
    if isinstance(found, Found):
        record |= {"title": found.title, "device": found.device, "found": found.facts, "expected": found.expected}
    item.config.stash[RECORDS].append(record)
    if (out := item.config.getoption("--out", None)) is not None:
        out.mkdir(parents=True, exist_ok=True)
        with (out / RESULTS).open("w" if len(item.config.stash[RECORDS]) == 1 else "a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Every fact beside its expectation, and how each experiment has ended."""
    records, out = config.stash[RECORDS], config.getoption("--out", None)
    if out is None or not records:
        return
    rows = [("", "fact", "found", "expected")]
    for one in records:
        rows.append((one["experiment"], one["ending"], f"{one['seconds']:.0f} s", one["why"].partition("\n")[0][:80]))
        for fact, value in one.get("found", {}).items():
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            rows.append(("", fact, shown, one["expected"][fact]))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    (out / TABLE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    terminalreporter.write("\n".join(["", *lines, f"every number: {out / RESULTS}", ""]))
