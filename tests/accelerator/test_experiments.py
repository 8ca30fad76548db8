"""The code of the experiments on GPUs (tests/gpu), on the stand-in: engines in processes of their own that map memory.

No number counts here, only what must hold on every device: no wrong load, and memory that is mapped and free again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.accelerator.standin import StandIn
from tests.bench.test_gpu import run_experiments

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]


def run(folder: Path, *names: str) -> dict[str, dict[str, Any]]:
    """Run experiments, each of which must pass, and return what they have found."""
    code, lines, said = run_experiments(folder, "--device", "standin", "--only", ",".join(names), "tests/gpu")
    assert (code, [line["ending"] for line in lines]) == (0, ["passed"] * len(names)), said
    return {line["experiment"]: line["found"] for line in lines}


def test_mapped_memory_is_free_when_its_producer_was_killed(standin: StandIn, tmp_path: Path) -> None:
    facts = run(tmp_path, "E15")["E15"]
    assert (facts["first: mapped peers"], facts["forgotten"]) == (1, True), facts


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["E3", "E6", "E7", "E8", "E13", "E14"])
def test_the_other_experiments(standin: StandIn, tmp_path: Path, name: str) -> None:
    """Thorough: see `test_mapped_memory_is_free_when_its_producer_was_killed` of this file."""
    run(tmp_path, name)
