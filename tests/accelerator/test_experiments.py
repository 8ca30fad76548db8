"""The code of the experiments on GPUs (tests/gpu), on the stand-in: engines in processes of their own that map memory.

No number counts here, only what must hold on every device: no wrong load, and memory that is mapped and free again.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.accelerator.standin import StandIn
from tests.bench.test_gpu import run_experiments

pytestmark = pytest.mark.nixl


@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_experiments_that_need_engines_only(standin: StandIn, tmp_path: Path) -> None:
    """Those of NIXL alone do not reach the stand-in; the code of the others is tried on a CPU.

    Thorough: see `test_memory_of_a_process_that_was_killed_is_an_error_and_free` of `accelerator/test_processes.py`.
    """
    names = ["E6", "E13", "E14", "E15"]
    code, lines, said = run_experiments(tmp_path, "--device", "standin", "--only", ",".join(names), "tests/gpu")
    endings = {line["experiment"]: line["ending"] for line in lines}
    assert (code, endings) == (0, dict.fromkeys(names, "passed")), said
