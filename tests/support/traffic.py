"""Clients that send requests to real servers, while a test kills one of the servers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Self

NOTICED_WITHIN_S, ANSWERED_WITHIN_S, SETTLED_WITHIN_S = 30.0, 60.0, 120.0
_PAUSE = threading.Event()

Answer = tuple[int, list[int]]
"""HTTP status and tokens of an answer."""


@dataclass(frozen=True)
class Asked:
    """A request, its answer, and its times."""

    prompt: list[int]
    began_s: float
    ended_s: float
    status: int
    tokens: list[int]


class Traffic:
    """Clients that send requests, one after another each, during a `with` block."""

    def __init__(self, ask: Callable[[list[int]], Answer], prompts: Iterator[list[int]], clients: int = 4) -> None:
        self._ask, self._prompts, self._clients, self._over = ask, prompts, clients, False
        self._lock = threading.Lock()
        self.asked: list[Asked] = []

    def __enter__(self) -> Self:
        self._pool = ThreadPoolExecutor(self._clients)
        self._running = [self._pool.submit(self._go) for _ in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        self._over = True
        self._pool.shutdown()
        for one in self._running:
            one.result()

    def _go(self) -> None:
        while not self._over:
            with self._lock:
                prompt = next(self._prompts)
            began_s = time.monotonic()
            status, tokens = self._ask(prompt)
            self.asked.append(Asked(prompt, began_s, time.monotonic(), status, tokens))

    def until_answered(self, count: int, since_s: float = 0.0) -> None:
        """Wait until the last `count` of the requests that began after `since_s` were all answered with 200."""
        deadline_s = time.monotonic() + SETTLED_WITHIN_S
        while True:
            later = [one.status == 200 for one in self.asked.copy() if one.began_s > since_s]
            if len(later) >= count and all(later[-count:]):
                return
            for one in self._running:
                if one.done():
                    one.result()
            assert time.monotonic() < deadline_s, f"requests fail for good: {later}"
            _PAUSE.wait(0.1)

    def check(self, what: str, killed_s: float, expected: Callable[[list[int]], list[int]]) -> None:
        """Assert that all answers are right, and that failures are HTTP 5xx and end soon after the kill."""
        assert any(one.began_s < killed_s < one.ended_s for one in self.asked), "nothing was asked at that time"
        failed = [one for one in self.asked if one.status != 200]
        statuses = sorted({one.status for one in failed})
        last_s = max((one.ended_s - killed_s for one in failed), default=0.0)
        slowest_s = max(one.ended_s - one.began_s for one in self.asked)
        print(
            f"{what} killed: {len(self.asked)} asked, {len(failed)} failed with {statuses}, the last {last_s:.1f} s "
            f"after the kill; the slowest request took {slowest_s:.1f} s"
        )
        assert all(500 <= status < 600 for status in statuses)
        assert all(one.ended_s > killed_s for one in failed), "requests failed before anything was killed"
        assert last_s < NOTICED_WITHIN_S
        assert slowest_s < ANSWERED_WITHIN_S
        for one in self.asked:
            if one.status == 200:
                assert one.tokens == expected(one.prompt)
