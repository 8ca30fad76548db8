"""The harness: the order of turns, the keys of samples, and the contents of a report."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from bench_ranks import Rank, open_rank
from rich.console import Console

from kvflow.bench.child import BenchError, RankProcess
from tests.bench.commands import as_json, print_outcome
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved, run_scenario
from tests.bench.targets import Spread, at_least, at_most


@dataclass(frozen=True)
class Sum:
    who: str
    numbers: tuple[int, ...] = (0,)
    sum_of_all: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Adding:
    """Two ranks add numbers."""

    rounds: int = 3
    fails: bool = False

    def sets(self) -> Sequence[RankSet]:
        ranks = [RankProcess(name, open_rank) for name in ("one", "two")]
        return [RankSet(note="first", ranks=ranks, turns=self._turns), RankSet(note="second", turns=self._turns_alone)]

    def _turns(self, children: Children) -> Iterator[Turn]:
        for index, name in interleaved(("one", "two"), range(self.rounds)):
            child = children[name]
            step = partial(child.run, Rank.fail) if self.fails else partial(child.run, Rank.add, index, other=10)
            yield Turn(key=name, run=step, children=(child,), note=f"round {index}")

    def _turns_alone(self, children: Children) -> Iterator[Turn]:
        assert not children
        yield Turn(key="alone", run=lambda: "done")

    def judge(self, samples: Samples) -> Outcome:
        sums = samples.of(int)
        return Outcome(
            results={
                "sums": [Sum(name, tuple(found), sum(found)) for name, found in sums.items()],
                "alone": [Sum("alone")],
            },
            legend="a legend",
            targets=[at_least("large", 30, [(33.0, "one")]), at_most("small", 1, [])],
        )


def test_contenders_take_turns_in_an_order_that_rotates() -> None:
    assert list(interleaved("abc", range(1, 4))) == [
        *((1, name) for name in "bca"),
        *((2, name) for name in "cab"),
        *((3, name) for name in "abc"),
    ]


def test_a_scenario_runs_from_its_ranks_to_its_report() -> None:
    notes: list[str] = []
    outcome = run_scenario(Adding(), notes.append)
    found = json.loads(json.dumps(as_json(outcome)))
    assert found["sums"] == [{"who": who, "numbers": [10, 11, 12], "sum_of_all": 33} for who in ("one", "two")]
    assert [row["verdict"] for row in found["targets"]] == ["pass", "not measured"]
    assert notes[:2] == ["first", "  round 0"]
    output = io.StringIO()
    print_outcome(outcome, Console(width=100, file=output))
    for words in ("sums", "who", "sum of all", "33", "10..12", "a legend", "targets", "PASS", "NOT MEASURED"):
        assert words in output.getvalue()


@dataclass(frozen=True, slots=True, kw_only=True)
class WideRow:
    transport: str
    contender: str
    seconds_of_all_the_rounds: Spread
    ratios_to_the_first_of_all: tuple[float, ...] = (1.234, 5.678)
    descriptors: int = 1_234_567
    throughput_gb_per_s: float = 12.34
    processes: str = "producer reader"


@pytest.mark.parametrize("width", [50, 80, 200])
def test_tables_leave_words_whole(width: int) -> None:
    """Columns that do not fit beside each other are split over several tables."""
    spread = Spread(samples=9, min=1, p25=1.123, p50=2.234, p75=3.345, p99=4.456, max=5)
    rows = [
        WideRow(transport=transport, contender=contender, seconds_of_all_the_rounds=spread)
        for transport in ("shm", "tcp")
        for contender in ("raw_example", "raw_tuned", "bare_hop")
    ]
    output = io.StringIO()
    outcome = Outcome(results={"wide": rows}, legend="", targets=[])
    print_outcome(outcome, Console(width=width, file=output))
    printed = output.getvalue()
    assert max(map(len, printed.splitlines())) <= width
    words = "shm tcp raw_example bare_hop transport (1.12..3.35), 1,234,567 1.23..5.68 descriptors throughput producer"
    for word in words.split():
        assert word in printed or word == "transport", word
    assert printed.count("wide") == (1 if width == 200 else 2 if width == 80 else 6)


def test_a_step_that_fails_ends_the_run() -> None:
    with pytest.raises(BenchError, match=r"(?s)one: Traceback.*ZeroDivisionError"):
        run_scenario(Adding(fails=True), lambda note: None)
