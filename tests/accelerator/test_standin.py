"""The stand-in behaves as a device: late, apart, out of the host's reach. Its build survives what happens to builds."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator import standin as building
from tests.accelerator.sides import HERE, THERE
from tests.accelerator.standin import COUNT, KIND, NotBuilt, Refused, StandIn, built
from tests.support.tests_support import WAIT_S


def in_another_process(code: str, **options: Any) -> subprocess.Popen[bytes]:
    lines = "import ctypes, torch; from pathlib import Path; from tests.accelerator.standin import built, load\n"
    return subprocess.Popen([sys.executable, "-c", lines + code], cwd=Path(__file__).parents[2], **options)


def test_torch_takes_it_for_its_accelerator(standin: StandIn) -> None:
    assert torch.accelerator.current_accelerator() == torch.device(KIND)
    assert torch.accelerator.device_count() == COUNT
    assert torch.empty(9, pin_memory=True).is_pinned()
    assert not torch.empty(9).is_pinned()


def test_copies_views_and_indexing(standin: StandIn) -> None:
    host = torch.arange(40.0).view(8, 5)
    there = host.to(THERE)
    assert torch.equal(there.cpu(), host)
    assert torch.equal(there.view(torch.uint8).cpu(), host.view(torch.uint8))
    alias = torch.empty(0, dtype=torch.uint8, device=THERE).set_(there.untyped_storage(), 20, (2, 20), (20, 1))
    assert torch.equal(alias.cpu(), host[1:3].view(torch.uint8))
    index = torch.tensor([3, 1], device=THERE)
    found = torch.empty(2, 5, device=THERE)
    torch.index_select(there, 0, index, out=found)
    there[index] = found * 2
    assert torch.equal(there[index].cpu(), host[[3, 1]] * 2)
    assert torch.equal(there.to(HERE).cpu(), there.cpu())


def test_host_code_that_touches_its_memory_dies(standin: StandIn) -> None:
    process = in_another_process(
        "load(); ctypes.string_at(torch.zeros(8, device='standin:1').data_ptr(), 4)", stderr=subprocess.DEVNULL
    )
    assert process.wait(WAIT_S) == -signal.SIGSEGV


def test_what_is_held_is_late_and_only_events_order_streams(standin: StandIn) -> None:
    there, back = torch.zeros(8, device=THERE), torch.zeros(8)
    stream, filled = torch.Stream(THERE), torch.Event(THERE)
    torch.accelerator.synchronize(THERE)
    with standin.held():
        with stream:
            there.fill_(7)
            filled.record(stream)
        current = torch.accelerator.current_stream(THERE)
        assert current != stream
        current.wait_event(filled)
        back.copy_(there, non_blocking=True)
        assert not filled.query()
        assert standin.queued()
        assert not back.any(), "the host sees no bytes yet"
    current.synchronize()
    assert filled.query()
    assert (back == 7).all()
    torch.accelerator.synchronize(THERE)  # the other stream may still be removing its last event
    assert standin.queued() == 0


def test_a_blocking_call_is_done_while_devices_are_held(standin: StandIn) -> None:
    with standin.held():
        there = torch.ones(4, device=THERE)
        there.mul_(3)
        assert there.cpu().tolist() == [3.0] * 4
        there.mul_(3)
        assert standin.queued()


def test_a_failure_is_raised_by_the_next_wait_for_its_stream_and_by_no_other(standin: StandIn) -> None:
    rows = torch.zeros(2, 5, device=THERE)
    other = torch.Stream(THERE)
    torch.accelerator.synchronize(THERE)
    rows.index_copy_(0, torch.tensor([99], device=THERE), rows[:1].clone())
    other.synchronize()
    with pytest.raises(RuntimeError, match="index 99 is out of bounds"):
        torch.accelerator.synchronize(THERE)
    torch.accelerator.synchronize(THERE)
    standin.fail_copies()
    torch.zeros(8).copy_(rows.view(-1)[:8], non_blocking=True)
    with pytest.raises(RuntimeError, match="a copy is to fail"):
        torch.accelerator.synchronize(THERE)


def test_kernels_can_be_missing(standin: StandIn) -> None:
    floats = torch.zeros(4, 4, device=THERE)
    for what, work in (
        (Refused.COMPLEX, lambda: floats.view(torch.complex64).neg_()),
        (Refused.INT64, lambda: floats.view(torch.int64).neg_()),
        (Refused.INDEXING, lambda: torch.index_select(floats, 0, torch.tensor([1], dtype=torch.int32).to(THERE))),
        (Refused.PINNED, lambda: torch.empty(8, pin_memory=True)),
    ):
        work()
        standin.refuse(what)
        with pytest.raises(RuntimeError, match="standin: no"):
            work()
        standin.refuse(Refused.NOTHING)


# --- its build


def test_a_build_that_was_killed_leaves_no_lock_and_no_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed in the compiler, which goes on for ever; the next build takes the lock and finishes."""
    compiler = tmp_path / "compiler"
    started = tmp_path / "started"
    os.mkfifo(started)
    compiler.write_text(f"#!/bin/sh\necho begun > {started}\nexec sleep 60\n")
    compiler.chmod(0o755)
    folder = tmp_path / "built"
    child = in_another_process(f"built(Path({str(folder)!r}))", env={**os.environ, "CXX": str(compiler)})
    with started.open() as said:
        assert said.readline() == "begun\n"
    child.kill()
    assert child.wait(WAIT_S) == -signal.SIGKILL
    assert not list(folder.glob("*.so"))
    quick = tmp_path / "quick"
    quick.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\ncp /dev/null "$2"\n')
    quick.chmod(0o755)
    monkeypatch.setenv("CXX", str(quick))
    library = built(folder, wait_s=60)
    assert library.parent == folder
    monkeypatch.setattr(building.shutil, "which", lambda _: None)
    assert built(folder) == library, "it is built once"


def test_without_a_compiler_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(NotBuilt, match="there is no C\\+\\+ compiler"):
        built(tmp_path)


def test_a_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho 'no such header' >&2\nexit 1\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NotBuilt, match="the compiler failed: no such header"):
        built(tmp_path / "built")


def test_a_build_that_does_not_end_is_waited_for_in_vain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "built"
    folder.mkdir()
    with (
        building._locked(folder / "lock", 0.0),
        pytest.raises(NotBuilt, match=r"another build has not ended within 0.0 s"),
    ):
        built(folder, wait_s=0.0)
