"""Facts on their way from the process of an experiment to the one that started it: lines of JSON in a file.

Each is written when it is known, so one that ends at its limit, or in a crash, has told what it had found by then.
"""

from __future__ import annotations

import json
from pathlib import Path

from kvflow.bench.gpu.judging import Fact


class Facts:
    """What one experiment has found so far."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, name: str, value: Fact) -> None:
        """Write it down; a later value of a name takes the place of an earlier one."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: value}) + "\n")


def read_facts(path: Path) -> dict[str, Fact]:
    """All of them, in the order in which they were found; a line that was cut off by a kill is left out."""
    found: dict[str, Fact] = {}
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            found.update(json.loads(line))
        except ValueError:
            continue
    return found
