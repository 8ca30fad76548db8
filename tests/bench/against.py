"""The bench `against`: small loads with the kvflow of this checkout and of another one, in turns.

Each turn is a process of its own (`small_loads.py`), so that no object of one is in the other's memory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated

from kvflow.bench.child import BenchError
from kvflow.bench.loads import SettingsError
from tests.bench.scenario import Children, Outcome, RankSet, Samples, Turn, interleaved
from tests.bench.targets import Spread

_ROOT = Path(__file__).parents[2]
_ROWS = {
    "alone_s": "loop CPU of a load, one after the other",
    "burst_s": "loop CPU of a load, all at once",
    "wall_s": "all at once, until the last has ended",
}
_LEGEND = "One-block loads in one process, over the transport inproc. The ratio is of each round, here to there."


@dataclass(frozen=True, slots=True, kw_only=True)
class AgainstRow:
    """One cost: medians of the rounds, and the ratio round by round."""

    cost: str
    here_us: float
    there_us: float
    ratio: Spread = field(metadata={"of": "here to there"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Against:
    """Compare the CPU of small loads with that of another checkout of kvflow, in turns."""

    checkout: Annotated[str, "Folder of the other checkout (git worktree add FOLDER COMMIT)."] = ""
    rounds: Annotated[int, "Processes of each checkout."] = 8
    loads: Annotated[int, "Loads one after the other, in each process."] = 4000
    burst: Annotated[int, "Loads at once, in each process."] = 2000

    def sets(self) -> Sequence[RankSet]:
        other = Path(self.checkout).resolve()
        if not self.checkout or not (other / "kvflow" / "__init__.py").is_file():
            raise SettingsError(f"--checkout: expected a folder with kvflow in it, got {self.checkout!r}")
        return [RankSet(note=f"{self.rounds} rounds", turns=partial(self._turns, other))]

    def _turns(self, other: Path, _: Children) -> Iterator[Turn]:
        for _index, checkout in interleaved((_ROOT, other), range(self.rounds)):
            yield Turn(key="here" if checkout is _ROOT else "there", run=partial(self._measure, checkout))

    def _measure(self, checkout: Path) -> dict[str, float]:
        program = [sys.executable, "-P", str(Path(__file__).with_name("small_loads.py"))]
        environment = os.environ | {"PYTHONPATH": str(checkout)}
        done = subprocess.run(
            [*program, str(self.loads), str(self.burst)], env=environment, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            raise BenchError(f"against: the loads of {checkout} failed: {done.stderr[-2000:]}")
        costs = json.loads(done.stdout)
        ran = Path(costs.pop("kvflow"))
        if checkout not in ran.parents:
            raise BenchError(f"against: expected kvflow of {checkout}, ran {ran}")
        return dict(costs)

    def judge(self, samples: Samples) -> Outcome:
        sides = samples.of(dict)
        rows = []
        for cost, name in _ROWS.items():
            here, there = ([turn[cost] for turn in sides[side]] for side in ("here", "there"))
            ratios = [ours / theirs for ours, theirs in zip(here, there, strict=True)]
            medians = [1e6 * Spread.of(values).p50 for values in (here, there)]
            rows.append(AgainstRow(cost=name, here_us=medians[0], there_us=medians[1], ratio=Spread.of(ratios)))
        return Outcome(results={"against": rows}, legend=_LEGEND, targets=[])
