"""A device that computes later: a CUDA stream, or on a CPU a thread that stands for a stream.

Work is launched, and an event tells when it is done; `ServeRequest.ready` and `LoadRequest.after` take such an event.
With the thread the experiments can be tried anywhere; it proves nothing about CUDA.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from kvflow.core.policy.events import DeviceEvent

_SLEEP_CYCLES = 100_000_000
_BUSY_AHEAD = 3
_BUSY_MATMULS = 10
_STEP_MATMULS = 4
_BUSY_SIDE = 8192
_HOST_SIDE = 256


class Device(Protocol):
    """Runs launched work in order, and does not make the caller wait."""

    def launch(self, work: Callable[[], None], delay_s: float = 0.0) -> DeviceEvent:
        """Do `work` after a pause of `delay_s`, after all earlier work. Return the event of its end."""

    def busy(self) -> contextlib.AbstractContextManager[None]:
        """Inside the block the device's default stream always has some milliseconds of matrix products to do."""

    def make_step(self) -> Callable[[], None]:
        """One step of an engine, of some milliseconds: it is launched at once and waited for."""

    def wait(self) -> None:
        """Until everything is done."""

    def close(self) -> None: ...


def open_device(kind: str, *, own_stream: bool = False) -> Device:
    """`own_stream`: work is launched on a non-blocking stream in place of the default one; only CUDA has them."""
    if kind.startswith("standin"):
        return StandInDevice(kind)
    return HostDevice() if kind == "cpu" else CudaDevice(kind, own_stream)


class StandInDevice:
    """The stand-in accelerator of `tests/accelerator`, which computes later, too, and can map memory."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._stream = torch.Stream(kind)
        torch.accelerator.synchronize(kind)

    def launch(self, work: Callable[[], None], delay_s: float = 0.0) -> DeviceEvent:
        event = torch.Event(self._kind)
        with self._stream:
            work()
            event.record(self._stream)
        return event

    def busy(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def make_step(self) -> Callable[[], None]:
        return _host_step()

    def wait(self) -> None:
        torch.accelerator.synchronize(self._kind)

    def close(self) -> None:
        self.wait()


class CudaDevice:
    """A CUDA device, "cuda" or "cuda:1", which becomes the current one of the thread."""

    def __init__(self, kind: str, own_stream: bool) -> None:
        self._cuda: Any = torch.cuda
        self._cuda.set_device(torch.device(kind).index or 0)
        self._stream = self._cuda.Stream() if own_stream else self._cuda.default_stream()
        # Of the second of two sleeps: in the first the clock leaves its idle rate.
        first, last = (self._cuda.Event(enable_timing=True) for _ in range(2))
        self._cuda._sleep(_SLEEP_CYCLES)
        first.record()
        self._cuda._sleep(_SLEEP_CYCLES)
        last.record()
        last.synchronize()
        self._cycles_per_s = _SLEEP_CYCLES / (float(first.elapsed_time(last)) / 1e3)

    def launch(self, work: Callable[[], None], delay_s: float = 0.0) -> DeviceEvent:
        event: DeviceEvent = self._cuda.Event()
        with self._cuda.stream(self._stream):
            if delay_s:
                self._cuda._sleep(int(delay_s * self._cycles_per_s))
            work()
            event.record(self._stream)  # type: ignore[attr-defined]
        return event

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        matrix = torch.randn(_BUSY_SIDE, _BUSY_SIDE, device="cuda", dtype=torch.bfloat16)
        events: queue.Queue[Any] = queue.Queue()

        def step() -> None:
            for _ in range(_BUSY_MATMULS):
                torch.mm(matrix, matrix)
            event = self._cuda.Event(blocking=True)
            event.record()
            events.put(event)
            if events.qsize() >= _BUSY_AHEAD:
                events.get().synchronize()

        with _again_and_again(step):
            yield
        self._cuda.synchronize()

    def make_step(self) -> Callable[[], None]:
        """A CUDA graph, as engines replay one for each decode step."""
        matrix = torch.randn(_BUSY_SIDE, _BUSY_SIDE, device="cuda", dtype=torch.bfloat16)
        target = torch.empty_like(matrix)
        stream, graph = self._cuda.Stream(), self._cuda.CUDAGraph()
        with self._cuda.stream(stream):  # the first product makes handles, which a capture may not
            torch.mm(matrix, matrix, out=target)
        stream.synchronize()
        with self._cuda.graph(graph, stream=stream):
            for _ in range(_STEP_MATMULS):
                torch.mm(matrix, matrix, out=target)

        def step() -> None:
            with self._cuda.stream(stream):
                graph.replay()
            stream.synchronize()

        return step

    def wait(self) -> None:
        self._cuda.synchronize()

    def close(self) -> None:
        self.wait()


class HostEvent(threading.Event):
    """A CUDA event for the thread that stands for a stream."""

    query = threading.Event.is_set

    def synchronize(self) -> None:
        self.wait()


class HostDevice:
    """A thread that does one thing after the other."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvflow-bench-device", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def launch(self, work: Callable[[], None], delay_s: float = 0.0) -> DeviceEvent:
        event = HostEvent()

        def run() -> None:
            time.sleep(delay_s)
            work()
            event.set()

        self._work.put(run)
        return event

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        matrix = torch.randn(_HOST_SIDE, _HOST_SIDE)
        with _again_and_again(lambda: torch.mm(matrix, matrix)):
            yield

    def make_step(self) -> Callable[[], None]:
        return _host_step()

    def wait(self) -> None:
        self.launch(lambda: None).synchronize()

    def close(self) -> None:
        self._work.put(None)
        self._thread.join()


def _host_step() -> Callable[[], None]:
    matrix = torch.randn(_HOST_SIDE, _HOST_SIDE)

    def step() -> None:
        torch.mm(matrix, matrix)

    return step


@contextlib.contextmanager
def _again_and_again(step: Callable[[], object]) -> Iterator[None]:
    """Repeat `step` on a thread inside the block. An error of `step` is raised at the block's end."""
    over, errors = threading.Event(), list[BaseException]()

    def run() -> None:
        try:
            while not over.is_set():
                step()
        except BaseException as error:  # noqa: BLE001 - raised below
            errors.append(error)

    thread = threading.Thread(target=run, name="kvflow-bench-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    if errors:
        raise errors[0]
