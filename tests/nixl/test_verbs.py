"""Processes with NIXL agents on a host that has the system's libibverbs, as every host with RDMA has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from kvflow.doctor.findings import Status
from kvflow.doctor.nixl_transfer import check_nixl, judge_plugins

ROOT = Path(__file__).parents[2]
# Without libefa UCX does not load the system's libibverbs beside the wheel's.
NEEDED = ("libibverbs.so.1", "libefa.so.1")

HAND_OVER = """
import asyncio, kvflow, torch

async def main():
    caches = {name: {"layer.0": torch.rand(2, 16, 8, 16, 64)} for name in ("prefill", "decode")}
    config = {name: kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0") for name in caches}
    async with kvflow.Runtime(config["prefill"]) as prefill, kvflow.Runtime(config["decode"]) as decode:
        for runtime, cache in ((prefill, caches["prefill"]), (decode, caches["decode"])):
            await runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
        ticket = prefill.serve_blocks(kvflow.ServeRequest("r", [3, 7], 32)).ticket.to_params()
        report = await decode.load_blocks(kvflow.LoadRequest("r", ticket, [0, 1]))
        print(report.tokens)

asyncio.run(main())
"""


def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"NIXL_LOG_LEVEL": "WARN", "UCX_LOG_LEVEL": "error"} | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


@pytest.fixture(scope="module")
def verbs() -> None:
    """Skip where the libraries are not installed (or in LD_LIBRARY_PATH)."""
    for name in NEEDED:
        if run(f"import ctypes; ctypes.CDLL({name!r})").returncode != 0:
            pytest.skip(f"{name} is not here: apt-get install libibverbs1 ibverbs-providers")


@pytest.mark.nixl
def test_a_process_that_has_handed_over_ends_well(verbs: None) -> None:
    """Libraries of the system and of NIXL's wheel have ended processes at their exit (nixl 1.5.1, Debian 12)."""
    done = run(HAND_OVER)
    assert (done.returncode, done.stdout.split()) == (0, ["32"]), done.stderr


@pytest.mark.nixl
def test_the_doctor_starts_an_agent_and_waits_for_the_end_of_its_process(verbs: None) -> None:
    finding, plugins = check_nixl()
    assert finding.status is Status.OK, finding
    assert "libibverbs.so.1 is loaded first" in finding.found
    assert "UCX" in plugins


@pytest.mark.nixl
def test_the_systems_library_is_loaded_before_nixl(tmp_path: Path) -> None:
    """On any host: a library of that name, which is another one, is found and loaded before the bindings."""
    packages = Path(sysconfig.get_paths()["platlib"])
    harmless = next(path for path in packages.glob("nixl_cu*.libs/libaio*.so*"))
    shutil.copy(harmless, tmp_path / "libibverbs.so.1")
    code = """
from kvflow.transport.nixl import native

native.importlib.import_module = lambda name: print("libibverbs.so.1" in open("/proc/self/maps").read(), name)
native.import_bindings()
"""
    done = run(code, LD_LIBRARY_PATH=str(tmp_path))
    assert done.stdout.split() == ["True", "nixl._bindings"], done.stderr


def test_a_process_that_ends_by_a_signal_is_a_finding() -> None:
    crashed = judge_plugins("1.5.1", ("POSIX", "UCX"), verbs=True, exit_code=-11)
    assert (crashed.status, "ends by signal 11" in crashed.found) == (Status.FAIL, True)
    assert "troubleshooting" in crashed.fix
    assert judge_plugins("1.5.1", ("UCX",), exit_code=0).status is Status.OK
