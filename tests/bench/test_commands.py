"""The output of `dev.py bench`: tables that fit, with contenders side by side."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.bench.commands import print_outcome
from tests.bench.scenario import Outcome
from tests.bench.transfer.ranks import Contender
from tests.bench.transfer.results import Speed

DATA = json.loads((Path(__file__).parents[2] / "docs" / "data" / "transfer.json").read_text())


def printed(width: int, **changes: Any) -> str:
    rows = [Speed(**{**row, "pair_medians_s": tuple(row["pair_medians_s"]), **changes}) for row in DATA["speed"]]
    console = Console(file=io.StringIO(), width=width)
    print_outcome(Outcome(results={"speed": rows}, legend="", targets=[]), console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


LONG = {"median_s": 12.3456, "p99_s": 123.456, "pair_medians_s": (12.345, 123.456)}


@pytest.mark.parametrize(
    ("width", "changes"), [(72, {}), (80, {}), (80, LONG), (100, {}), (100, LONG), (160, {}), (160, LONG)]
)
def test_contenders_stand_in_one_table_however_narrow_it_is(width: int, changes: dict[str, Any]) -> None:
    tables = printed(width, **changes).split("speed")[1:]
    assert tables
    for table in tables:
        assert len({name for name in Contender if name in table}) == len(Contender), table
    assert "…" not in printed(width, **changes), "nothing is cut"
