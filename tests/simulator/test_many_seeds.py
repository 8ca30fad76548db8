"""`python3 dev.py simulate`: its output. A broken promise fails it and can be replayed."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from kvflow.core.protocol.proof import SealTable
from tests.simulator.__main__ import app
from tests.simulator.many_seeds import _rate

runner = CliRunner()


def test_seeds_that_keep_all_promises() -> None:
    done = runner.invoke(app, ["--seeds", "5", "--start", "100"])
    assert done.exit_code == 0, done.output
    assert "5 seeds in" in done.output
    assert "steps and" in done.output
    assert "0 of 5 seeds broke a promise" in done.output


@pytest.mark.parametrize(
    ("per_s", "said"), [(0.04, "one in 25 s"), (0.999, "one in 1 s"), (12.34, "12.3 a second"), (0, "0 a second")]
)
def test_a_speed_of_less_than_one_a_second_is_said_by_how_long_one_takes(per_s: float, said: str) -> None:
    assert _rate(per_s) == said


def test_one_seed_is_one() -> None:
    done = runner.invoke(app, ["--seeds", "1", "--start", "100"])
    assert "0 of 1 seed broke a promise" in done.output
    assert "1 seed in" in done.output


@pytest.mark.thorough
def test_several_processes_share_the_seeds() -> None:
    """Thorough: see `test_seeds_that_keep_all_promises` of this file."""
    done = runner.invoke(app, ["--seeds", "60", "--jobs", "2"])
    assert done.exit_code == 0, done.output
    assert "0 of 60 seeds broke a promise" in done.output


def test_a_broken_promise_says_how_to_replay_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SealTable, "tokens_missing", lambda *_: 0)
    done = runner.invoke(app, ["--seeds", "50", "--failures", "1"])
    assert done.exit_code == 1
    assert "I2 is broken" in done.output
    start = done.output.split("replay: python3 dev.py simulate --seeds 1 --start ")[1].split()[0]
    replayed = runner.invoke(app, ["--seeds", "1", "--start", start])
    assert replayed.exit_code == 1
    assert done.output.split("s, step")[1].split("\n")[0] in replayed.output
