"""`dev.py gpu`: the options and results of its experiments, tried with real processes, small and on a CPU."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, call, patch

import pytest
import torch
from tests_support import each

from tests.gpu.conftest import RESULTS, TABLE, Found, without
from tests.gpu.device import open_device
from tests.support.engine import EngineSetup, open_engine
from tests.support.pools import Pool, PoolShape, scattered_ids

ROOT = Path(__file__).parents[2]


@each(
    ("expected", "value", "holds"),
    [
        ({"least": 2}, 2, True),
        ({"least": 2}, 1.9, False),
        ({"most": 2}, 2.1, False),
        ({"least": 1, "most": 2}, 1.5, True),
        ({"least": 1}, "none", False),
        ({"has": "cuda_ipc"}, "cuda_ipc/cuda (zero-copy)", True),
        ({"has": "cuda_ipc"}, "tcp/lo (software emulation)", False),
        ({"has": "cuda_ipc"}, None, False),
        ({"equals": 0}, 0, True),
        ({"equals": False}, True, False),
        ({}, "whatever", True),
    ],
)
def test_what_was_found_is_held_against_what_was_expected(expected: dict[str, Any], value: Any, holds: bool) -> None:
    found = Found("E1", "", "cuda", 60.0)
    found.add("x", value, **expected)
    assert found.facts == {"x": value}
    assert (found.unexpected == []) == holds
    on_cpu = Found("E1", "", "cpu", 60.0)
    on_cpu.add("x", value, **expected)
    assert on_cpu.unexpected == [], "on a CPU only what must always hold is judged"
    on_cpu.add("x", value, **expected, always=True)
    assert on_cpu.unexpected == found.unexpected


EXPERIMENTS = """
import os, signal
import pytest

experiment = pytest.mark.experiment

@experiment("E1", 60)
def test_finds(found):
    found.add("speed", 5.0, least=4, always=True)
    found.add("left", found.left_s() < found.limit_s)

@experiment("E2", 60)
def test_finds_otherwise(found):
    found.add("speed", 1.0, least=4, always=True)

@experiment("E3", 60)
def test_fails(found):
    found.add("before", True)
    raise RuntimeError("as it was told to")

@experiment("E4", 60, only_cuda=True)
def test_needs_a_device(found):
    pass

@experiment("E5", 0.01)
def test_hangs(found):
    signal.pause()
"""


def run_experiments(folder: Path, *options: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run experiments as dev.py does. Return the exit code, the lines of results, and the output."""
    command = [sys.executable, "-m", "pytest", "-c", "tests/gpu/pytest.ini", "--device", "cpu", "--out", str(folder)]
    done = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True, check=False)
    results = folder / RESULTS
    lines = [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []
    return done.returncode, lines, done.stdout + done.stderr


def test_each_experiment_leaves_a_line_however_it_ends(tmp_path: Path) -> None:
    tests = tmp_path / "test_some.py"
    tests.write_text(EXPERIMENTS)
    code, lines, _ = run_experiments(tmp_path / "out", "-p", "tests.gpu.conftest", str(tests))
    assert code == 1
    assert [(line["experiment"], line["ending"]) for line in lines] == [
        ("E1", "passed"), ("E2", "failed"), ("E3", "failed"), ("E4", "skipped"), ("E5", "failed"),
    ]  # fmt: skip
    assert lines[0]["found"] == {"speed": 5.0, "left": True}
    assert lines[0]["expected"] == {"speed": ">= 4", "left": ""}
    assert lines[1]["why"] == "speed: 1.0, expected >= 4"
    assert (lines[2]["found"], lines[2]["why"]) == ({"before": True}, "as it was told to")
    assert "needs a CUDA device" in lines[3]["why"]
    assert lines[4]["why"] == "over its limit of 0 s"
    assert "as it was told to" in (tmp_path / "out" / TABLE).read_text()
    code, lines, _ = run_experiments(tmp_path / "short", "-p", "tests.gpu.conftest", "--total-s", "0.5", str(tests))
    assert (code, {line["ending"] for line in lines}) == (0, {"skipped"})
    assert "of the whole time" in lines[0]["why"]


@pytest.mark.thorough
def test_experiments_are_chosen_by_name_and_say_so_without_a_device(tmp_path: Path) -> None:
    """Thorough: see `test_each_experiment_leaves_a_line_however_it_ends` of this file."""
    code, _, said = run_experiments(tmp_path, "tests/gpu", "--collect-only", "--only", "e2, E0")
    assert (code, said.count("test_the_machine"), said.count("test_the_cost_of_a_piece")) == (0, 1, 1), said
    assert "test_the_way_of_reads" not in said
    code, _, said = run_experiments(tmp_path, "tests/gpu", "--collect-only", "--only", "E99")
    assert (code, "no experiment E99" in said) == (4, True), said
    if not torch.cuda.is_available():
        assert "needs a CUDA device" in without("cuda", only_cuda=False)
    assert (without("cpu", only_cuda=False), without("cpu", only_cuda=True)) == ("", "needs a CUDA device")


def test_dev_py_runs_nothing_where_there_is_no_device(tmp_path: Path) -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a device, so dev.py would use it")
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    on_cpu = ["gpu", "--device", "cpu", "--wheels", "."]
    for options, code, word in ((["gpu"], 0, "no NVIDIA device"), (on_cpu, 1, "no wheels")):
        dev = [sys.executable, str(ROOT / "dev.py"), *options]
        done = subprocess.run(dev, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, word in done.stdout + done.stderr) == (code, True), done.stderr


@pytest.mark.thorough
def test_dev_py_finds_what_it_needs_in_a_folder_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index and no virtual environment: a wheel made here is seen beside what this Python has.

    Thorough: see `test_dev_py_runs_nothing_where_there_is_no_device` of this file.
    """
    with zipfile.ZipFile(tmp_path / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "import msgspec\nprint('carried', bool(msgspec.__version__))")
        about = "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\nRequires-Dist: nothing-has-it\n"
        wheel.writestr("carried-1.0.dist-info/METADATA", about)
        tag = "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        wheel.writestr("carried-1.0.dist-info/WHEEL", tag)
        wheel.writestr("carried-1.0.dist-info/RECORD", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    dev = importlib.import_module("dev")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    python = dev.with_wheels(tmp_path)
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'build' / 'gpu-site'}:{tmp_path}"
    done = subprocess.run([str(python), "-m", "carried"], capture_output=True, text=True, check=True)
    assert done.stdout == "carried True\n"


# --- what experiments are made of


@each("across_layers", [False, True])
def test_a_pool_counts_blocks_that_hold_something_else(across_layers: bool) -> None:
    shape = PoolShape(layers=3, blocks=8, kv_heads=2, head_size=4, across_layers=across_layers)
    pool = Pool(shape, "cpu", 1.0)
    assert pool.layout().num_blocks == 8
    assert (pool.count_other(range(8), 1.0), pool.count_other([0, 5], 2.0)) == (0, 2)
    pool.filling([1, 5], 2.0)()
    assert (pool.count_other(range(8), 1.0), pool.count_other([1, 5], 2.0)) == (2, 0)
    next(iter(pool.tensors.values()))[5, 0, 0, 0, 0] = 7
    assert pool.count_other([1, 5], 2.0) == 1


def test_blocks_are_scattered_and_all_different() -> None:
    for blocks in (1, 2, 3, 32, 64, 100, 512):
        assert sorted(scattered_ids(3, blocks, blocks)) == list(range(blocks))


def test_work_of_the_device_that_stands_for_a_stream_is_late_and_in_order() -> None:
    device, done = open_device("cpu"), list[int]()
    gate = threading.Event()
    device.launch(gate.wait)
    first = device.launch(lambda: done.append(1))
    second = device.launch(lambda: done.append(2))
    assert (first.query(), second.query(), done) == (False, False, [])
    gate.set()
    second.synchronize()
    assert (first.query(), done) == (True, [1, 2])
    device.close()


@each("own_stream", [False, True])
def test_work_of_a_cuda_device_is_launched_behind_its_pause_and_before_its_event(own_stream: bool) -> None:
    """Checks the order of the calls to torch.cuda, which proves nothing about CUDA."""
    cuda = MagicMock()
    cuda.Event.return_value.elapsed_time.return_value = 50.0
    with patch.object(torch, "cuda", cuda):
        device = open_device("cuda:1", own_stream=own_stream)
        assert cuda.mock_calls[0] == call.set_device(1)
        cuda.reset_mock()
        event = device.launch(cuda.work, 0.1)
    stream = cuda.Stream.return_value if own_stream else cuda.default_stream.return_value
    assert event is cuda.Event.return_value
    assert cuda.mock_calls == [
        call.Event(),
        call.stream(stream),
        call.stream().__enter__(),
        call._sleep(200_000_000),
        call.work(),
        call.Event().record(stream),
        call.stream().__exit__(None, None, None),
    ]


async def test_an_engine_fills_blocks_behind_what_its_device_was_told_before() -> None:
    """Otherwise the work of one turn may write to blocks that the next turn has filled and offered."""
    ids = [1, 2, 3]
    async with open_engine(EngineSetup(engine_id="engine", config={"transport": "inproc"})) as engine:
        await engine.do_compute_and_offer("late", ids, value=7.0, delay_s=0.05)
        await engine.do_fill(ids, value=9.0)
        engine._device.wait()
        assert await engine.do_count_other(ids, value=9.0) == 0


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(900)
def test_experiments_can_be_tried_on_a_cpu(tmp_path: Path) -> None:
    """So that their code is not dead. The helpers of all experiments are the same.

    Thorough: see `test_each_experiment_leaves_a_line_however_it_ends` of this file.
    """
    names = [f"E{number}" for number in (*range(10), 11)]
    _, lines, said = run_experiments(tmp_path, "tests/gpu", "--only", ",".join(names))
    found = {line["experiment"]: (line["device"], line["ending"], len(line["found"]) > 1) for line in lines}
    assert found == dict.fromkeys(names, ("cpu", "passed", True)), said
