"""`dev.py gpu`: what runs the experiments, with real processes, and the experiments themselves, small and on a CPU."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests_support import each

from kvflow.bench.gpu import command, machine, runner
from kvflow.bench.gpu.catalogue import EXPERIMENTS, chosen
from kvflow.bench.gpu.command import main
from kvflow.bench.gpu.device import open_device
from kvflow.bench.gpu.facts import Facts, read_facts
from kvflow.bench.gpu.judging import Expected, Fact, Verdict, judge, table_lines
from kvflow.bench.gpu.one import function
from kvflow.bench.gpu.pool import Pool, PoolShape, scattered_ids
from kvflow.bench.gpu.runner import LOG, RESULTS, TABLE, Ending, Experiment, run_all
from kvflow.bench.ucx import ReadPath, read_path

ROOT = Path(__file__).parents[2]
AS_EXPECTED, OTHERWISE = Verdict.AS_EXPECTED, Verdict.OTHERWISE


# --- judging


@each(
    ("expected", "found", "verdict"),
    [
        (Expected(fact="x", least=2), 2, AS_EXPECTED),
        (Expected(fact="x", least=2), 1.9, OTHERWISE),
        (Expected(fact="x", most=2), 2.1, OTHERWISE),
        (Expected(fact="x", least=1, most=2), 1.5, AS_EXPECTED),
        (Expected(fact="x", least=1), "none", OTHERWISE),
        (Expected(fact="x", has="cuda_ipc"), "cuda_ipc/cuda (zero-copy)", AS_EXPECTED),
        (Expected(fact="x", has="cuda_ipc"), "tcp/lo (software emulation)", OTHERWISE),
        (Expected(fact="x", has="cuda_ipc"), None, OTHERWISE),
        (Expected(fact="x", equals=0), 0, AS_EXPECTED),
        (Expected(fact="x", equals=False), True, OTHERWISE),
    ],
)
def test_what_was_found_is_held_against_what_was_expected(expected: Expected, found: Fact, verdict: Verdict) -> None:
    (row,) = judge([expected], {"x": found}, "cuda")
    assert (row.fact, row.found, row.verdict) == ("x", found, verdict)
    assert judge([expected], {}, "cuda")[0].verdict is Verdict.MISSING


def test_on_a_cpu_only_what_must_always_hold_is_judged() -> None:
    fast, right = Expected(fact="GB/s", least=200), Expected(fact="wrong", equals=0, always=True)
    rows = judge([fast, right], {"GB/s": 1.0, "wrong": 1}, "cpu")
    assert [row.verdict for row in rows] == [Verdict.NOT_JUDGED, OTHERWISE]
    assert [row.expected for row in rows] == [">= 200", "= 0"]


def test_tables_are_as_wide_as_their_cells() -> None:
    assert list(table_lines(("a", "b"), [("x\ny", 1.23456), (None, "long")])) == ["a    b", "x y  1.235", "     long"]


# --- running


def experiment(run: str, **others: Any) -> Experiment:
    given = {"limit_s": 60.0, **others}
    return Experiment(name=run.upper(), title=f"it {run}", settles="", run=f"gpu_experiments:{run}", **given)


@pytest.fixture
def _experiments_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")


@pytest.mark.usefixtures("_experiments_importable")
def test_each_experiment_leaves_a_line_however_it_ends(tmp_path: Path) -> None:
    expected = [Expected(fact="speed", least=4, always=True), Expected(fact="never", equals=1, always=True)]
    experiments = [experiment("finds", expected=expected), experiment("fails"), experiment("crashes")]
    notes: list[str] = []
    records = run_all([*experiments, experiment("finds", only_cuda=True)], "cpu", tmp_path, 600.0, notes.append)
    assert [record.ending for record in records] == [Ending.DONE, Ending.FAILED, Ending.FAILED, Ending.SKIPPED]
    assert records[0].found == {"device": "cpu", "speed": 5.0, "left": True}
    assert [row.verdict for row in records[0].judged] == [AS_EXPECTED, Verdict.MISSING]
    assert [record.wrong for record in records] == [True, True, True, False]
    assert records[1].found == {"before": True}
    assert records[1].why == "exit code 1: RuntimeError: as it was told to"
    assert records[2].why == "exit code -11: nothing was said"
    assert records[3].why == "needs a CUDA device"
    lines = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines()]
    assert [line["experiment"] for line in lines] == ["FINDS", "FAILS", "CRASHES", "FINDS"]
    assert lines[0]["judged"][0] == {"fact": "speed", "expected": ">= 4", "found": 5.0, "verdict": "as expected"}
    assert "as it was told to" in (tmp_path / LOG).read_text()
    assert "not found" in (tmp_path / TABLE).read_text()
    assert len(notes) == 4


@pytest.mark.usefixtures("_experiments_importable")
def test_one_that_is_over_its_limit_is_killed_with_what_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs = tmp_path / "hangs"
    os.mkfifo(hangs)
    monkeypatch.setenv("HANGS", str(hangs))
    wait = runner._wait

    def limit_is_over_once_it_hangs(pid: int, limit_s: float) -> bool:
        assert limit_s == 60.0
        assert hangs.read_text() == "now"
        return wait(pid, 0.0)

    monkeypatch.setattr(runner, "_wait", limit_is_over_once_it_hangs)
    (record,) = run_all([experiment("hangs")], "cpu", tmp_path / "out", 600.0, lambda _: None)
    assert (record.ending, record.why, record.wrong) == (Ending.LIMIT, "killed after 60 s", True)
    child = Path(f"/proc/{record.found['child']}/stat")
    while child.exists() and child.read_text().rpartition(")")[2].split()[0] != "Z":
        pass


def test_what_the_whole_time_is_too_short_for_is_skipped_and_said(tmp_path: Path) -> None:
    (record,) = run_all([experiment("finds")], "cpu", tmp_path, 5.0, lambda _: None)
    assert (record.ending, record.why.partition(" ")[2]) == (Ending.SKIPPED, "s left of the whole time")
    assert record.judged == []


def test_facts_outlive_a_line_that_was_cut_off(tmp_path: Path) -> None:
    facts = Facts(tmp_path / "facts")
    facts.add("one", 1)
    with (tmp_path / "facts").open("a") as file:
        file.write('{"two": ')
    assert read_facts(tmp_path / "facts") == {"one": 1}
    assert read_facts(tmp_path / "none") == {}


# --- the command


def test_experiments_are_chosen_by_name_and_exist() -> None:
    assert [one.name for one in chosen("e2, E0")] == ["E0", "E2"]
    assert chosen("") == list(EXPERIMENTS)
    assert {one.name for one in EXPERIMENTS} == {f"E{number}" for number in range(13)}
    assert all(callable(function(one.run)) for one in EXPERIMENTS)
    with pytest.raises(ValueError, match="no experiment E99; there are E0"):
        chosen("E99")


def test_without_a_device_it_says_so_and_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "without_cuda", lambda: "torch 9.9 sees no CUDA device")
    assert main(["--out", str(tmp_path / "out")]) == 0
    assert "nothing was run: torch 9.9 sees no CUDA device" in capsys.readouterr().out
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "nixl" else object())
    assert main(["--device", "cpu"]) == 0
    assert "nixl not installed" in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def test_results_go_to_out_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", "/results")
    assert command.default_out() == Path("/results")
    monkeypatch.delenv("OUT")
    assert command.default_out() == Path("build/gpu")


def test_dev_py_runs_nothing_where_there_is_no_device(tmp_path: Path) -> None:
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path)}
    dev = [sys.executable, str(ROOT / "dev.py"), "gpu"]
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this machine has a device, so dev.py would use it")
    done = subprocess.run(dev, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, "no NVIDIA device" in done.stdout) == (0, True), done.stderr
    done = subprocess.run(
        [*dev, "--device", "cpu", "--wheels", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, "there are no wheels" in done.stderr) == (1, True), done.stderr


def test_dev_py_finds_what_it_needs_in_a_folder_of_wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No index and no virtual environment: a wheel made here is seen beside what this Python has."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "carried-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "import torch\nprint('carried', bool(torch.__version__))")
        info = "carried-1.0.dist-info"
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\nRequires-Dist: nothing-has-it\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.syspath_prepend(str(ROOT))
    dev = importlib.import_module("dev")
    monkeypatch.setattr(dev, "ROOT", tmp_path)
    python = dev.with_wheels(wheels)
    assert os.environ["PYTHONPATH"] == f"{tmp_path / 'build' / 'gpu-site'}:{tmp_path}"
    done = subprocess.run([str(python), "-m", "carried"], capture_output=True, text=True, check=True)
    assert done.stdout == "carried True\n"
    assert dev.without_option("--wheels", ["--only", "E0", "--wheels", "w"]) == ("w", ["--only", "E0"])
    assert dev.without_option("--wheels", ["--wheels=w", "-x"]) == ("w", ["-x"])
    assert dev.without_option("--wheels", ["-x"]) == ("", ["-x"])


def test_pytests_last_line_is_counted() -> None:
    assert machine.counts("...\n== 1 failed, 12 passed, 3 skipped in 4.2s ==\n") == {
        "failed": 1, "passed": 12, "skipped": 3,
    }  # fmt: skip
    assert machine.counts("no tests ran") == {}


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


class Cuda:
    """What `CudaDevice` uses of torch.cuda, written down in its order. It proves nothing of CUDA."""

    def __init__(self) -> None:
        self.told: list[object] = []
        self.current = "default"

    def set_device(self, number: int) -> None:
        self.told.append(f"device {number}")

    def default_stream(self) -> str:
        return "default"

    def Stream(self) -> str:  # noqa: N802
        return "own"

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    def _sleep(self, cycles: int) -> None:
        self.told.append(f"sleep of {cycles} on {self.current}")

    def Event(self, **_: bool) -> Cuda:  # noqa: N802
        return self

    def record(self, stream: str = "current") -> None:
        self.told.append(f"record on {stream}")

    def synchronize(self) -> None:
        self.told.append("synchronize")

    def elapsed_time(self, _: object) -> float:
        return 50.0


@each(("own_stream", "name"), [(False, "default"), (True, "own")])
def test_work_of_a_cuda_device_is_launched_behind_its_pause_and_before_its_event(own_stream: bool, name: str) -> None:
    cuda = Cuda()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "cuda", cuda)
        device = open_device("cuda:1", own_stream=own_stream)
        assert cuda.told[0] == "device 1"
        cuda.told.clear()
        assert device.launch(lambda: cuda.told.append(f"work on {cuda.current}"), 0.1) is cuda
    assert cuda.told == [f"sleep of 200000000 on {name}", f"work on {name}", f"record on {name}"]


def test_ways_of_gpu_memory_are_read_with_sizes_as_ucx_shortens_them() -> None:
    operation = "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[0]"
    rows = ["| reader intra-node cfg#2 |", f"| {operation} |", "| 0 | no data fetch | |"]
    rows += ["| 1..32767 | software emulation | tcp/lo |", "| 32K..inf | zero-copy | cuda_ipc/cuda |"]
    log = "".join(f"[1795264635.911658] [vm:25199:0]   {row}\n" for row in rows)
    assert read_path(log, 32 << 10) == ReadPath("zero-copy", "cuda_ipc/cuda")
    assert read_path(log, 16 << 10) == ReadPath("software emulation", "tcp/lo")


TRIED = ("E6",)
"""The fast suite tries one; what experiments are made of is the same in all."""


@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", TRIED)
def test_experiments_can_be_tried_on_a_cpu(name: str, tmp_path: Path) -> None:
    assert_tried(name, tmp_path)


@pytest.mark.nixl
@pytest.mark.timeout(600)
@pytest.mark.thorough
@pytest.mark.parametrize("name", [one.name for one in EXPERIMENTS if not one.only_cuda and one.name not in TRIED])
def test_all_experiments_can_be_tried_on_a_cpu(name: str, tmp_path: Path) -> None:
    """Thorough: see `test_experiments_can_be_tried_on_a_cpu` of this file."""
    assert_tried(name, tmp_path)


def assert_tried(name: str, out: Path) -> None:
    """It ends well, and everything that must hold anywhere has held. Its bound is what keeps it from hanging."""
    (given,) = chosen(name)
    (record,) = run_all([replace(given, limit_s=500.0)], "cpu", out, 550.0, lambda _: None)
    assert record.ending is Ending.DONE, (record.why, (out / LOG).read_text())
    assert not record.wrong, record.judged
