"""The steps of an engine: a thread that takes one after the other and notes how long each has taken."""

from __future__ import annotations

import threading
import time

from kvflow.bench.gpu.device import Device


class Steps:
    """Runs from its making to `end`."""

    def __init__(self, device: Device) -> None:
        self._step = device.make_step()
        self._seconds: list[float] = []
        self._over = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="kvflow-bench-steps", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over:
            start_s = time.perf_counter()
            self._step()
            with self._changed:
                self._seconds.append(time.perf_counter() - start_s)
                self._changed.notify_all()

    def next(self, count: int) -> list[float]:
        """The seconds of the next so many steps; waits for them."""
        with self._changed:
            start = len(self._seconds)
            self._changed.wait_for(lambda: len(self._seconds) >= start + count or not self._thread.is_alive())
            return self._seconds[start : start + count]

    def end(self) -> None:
        self._over = True
        self._thread.join()
