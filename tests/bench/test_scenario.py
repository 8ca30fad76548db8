"""The harness: who takes turns, whose samples come together, and what a report is made of."""

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
from kvflow.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved, run_scenario
from kvflow.bench.targets import at_least, at_most
from kvflow.cli.bench import as_json, print_outcome


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


def test_a_step_that_fails_ends_the_run() -> None:
    with pytest.raises(BenchError, match=r"(?s)one: Traceback.*ZeroDivisionError"):
        run_scenario(Adding(fails=True), lambda note: None)
