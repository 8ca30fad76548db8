"""A producer, a consumer and a second consumer that is killed now and then, over one transport, and their faults."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from tests.endurance.plans import SHORT_TTL_S
from tests.support.verbs import Client

logger = logging.getLogger(__name__)


START_S, WAIT_S = 300.0, 300.0
_HOMES = ("plain", "staged", "windowed")
_LEASES_READ = 500
_SIGNALS = ("stop", "kill")
_GONE = ["LeaseExpired", "PeerNotReady", "PeerUnreachable", "TransferFailed", "PrefillFailed"]
_NOT_OFFERED = ["CacheUnregistered", "RuntimeDraining", "RuntimeClosed", "UsageError"]
_ANY = [*_GONE, *_NOT_OFFERED, "DeadlineExceeded", "ProtocolError", "not released", "BlocksBusy"]
FAULTS: Mapping[str, tuple[int, str, list[str]]] = {
    "revoke": (4, "producer", ["LeaseExpired", "not released"]),
    "producer unregister": (2, "producer", [*_GONE, *_NOT_OFFERED, "not released"]),
    "producer reopen": (2, "producer", [*_GONE, *_NOT_OFFERED, "not released"]),
    "forget": (4, "consumer", []),
    "consumer unregister": (2, "consumer", _NOT_OFFERED),
    "consumer reopen": (2, "consumer", _NOT_OFFERED),
    "cut": (3, "", ["PeerUnreachable", "not released"]),
    "stop": (3, "", []),
    "stop side": (3, "", []),
    "kill side": (3, "", []),
}
"""For each fault: its weight, the home that it concerns, and how loads of that home may end meanwhile."""


class Process:
    """An engine in a process of its own, and the way to it."""

    def __init__(self, folder: Path, name: str, role: str, environment: Mapping[str, str]) -> None:
        self.path = folder / name
        self._role = role
        self._environment = {**os.environ, "UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "ERROR", **environment}

    async def start(self, **options: Any) -> None:
        self.path.unlink(missing_ok=True)
        command = [sys.executable, "-m", "tests.endurance.engine", str(self.path), self._role, json.dumps(options)]
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=self._environment)
        until_s = time.monotonic() + START_S
        while True:
            try:
                self._client = await Client().connect(self.path)
            except (FileNotFoundError, ConnectionRefusedError):  # a socket has its name before it listens
                if self._process.returncode is not None or time.monotonic() > until_s:
                    code = self._process.returncode
                    raise ConnectionError(f"{self.path.name} does not start, exit code {code}") from None
                await asyncio.sleep(0.05)
            else:
                return

    async def call(self, verb: str, **arguments: Any) -> Any:
        try:
            async with asyncio.timeout(WAIT_S):
                return await self._client.call(verb, **arguments)
        except TimeoutError:
            raise AssertionError(f"{self.path.name}: {verb} has not ended within {WAIT_S} s") from None
        except ConnectionError:
            code = await self._process.wait()
            raise AssertionError(f"{self.path.name} has died, exit code {code}") from None

    async def stop(self, pause_s: float) -> None:
        self._process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(pause_s)
        self._process.send_signal(signal.SIGCONT)

    async def kill(self, *, quiet: bool) -> None:
        """`quiet`: while no read of it is under way."""
        if quiet:
            freezing = asyncio.create_task(self._client.call("freeze"))
            while not _stands_still(self._process.pid):
                await asyncio.sleep(0.01)
            freezing.cancel()
        self._process.kill()
        await self._process.wait()
        await self._client.close()

    async def close(self) -> str:
        """Close the process in order. Return its errors, or an empty text."""
        await self._client.close()
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(WAIT_S):
                said, _ = await self._process.communicate()
        except TimeoutError:
            self._process.kill()
            return f"{self.path.name} does not close"
        return "" if b"closed in order" in said else f"{self.path.name} has not closed in order: {said!r}"


@dataclass(slots=True)
class Found:
    """Result of a fleet's run."""

    violations: list[str] = field(default_factory=list)
    samples: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    faults: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FAULTS, 0))
    leases: list[dict[str, Any]] = field(default_factory=list)
    loads: int = 0
    outcomes: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Fleet:
    """Runs for so long, and finds out. Without `side` there is no second consumer, and no process is stopped."""

    def __init__(self, producer: Any, consumer: Any, side: Any, *, seed: int, leases: int, quiet: bool) -> None:
        self._producer = producer
        self._consumer = consumer
        self._side = side
        self._random = Random(f"faults {seed}")
        self._leases = leases
        self._quiet = quiet
        self._keys = itertools.count()
        self._lives = itertools.count(1)
        self._begun_s = time.monotonic()
        self.found = Found(samples={"producer": [], "consumer": []})
        self.side_options: dict[str, Any] = {}

    async def run(self, seconds: float, loads: int, *, every_s: float, fault_s: float) -> Found:
        """Run for `seconds`, and until `loads` loads have ended. A violation may stop the run early."""
        try:
            await self._run(seconds, loads, every_s, fault_s)
        except Exception as error:  # noqa: BLE001 - whatever it is: it is told
            self.found.violations.append(f"the run has stopped: {type(error).__name__}: {error}")
        self.found.seconds = time.monotonic() - self._begun_s
        return self.found

    async def _run(self, seconds: float, loads: int, every_s: float, fault_s: float) -> None:
        if self._side is not None:
            await self._start_side()
        await self._go()
        phases = [seconds * share for share in (0.0, 0.5, 0.9)]
        while self._passed_s < seconds or self.found.loads < loads:
            if phases and self._passed_s >= phases[0]:
                phases.pop(0)
                await self._many_leases()
            until_s = self._passed_s + every_s
            while self._passed_s < until_s:
                await asyncio.sleep(fault_s * self._random.random())
                await self._fault()
            await self._sample()
        self.found.outcomes["leases"] = await self._producer.call("outcomes")

    @property
    def _passed_s(self) -> float:
        return time.monotonic() - self._begun_s

    async def _go(self) -> None:
        await self._consumer.call("go")
        if self._side is not None:
            await self._side.call("go")

    async def _start_side(self) -> None:
        await self._side.start(**self.side_options, first=next(self._lives) << 40)
        await self._side.call("trouble", key=0, where="", kinds=_ANY)  # it may be stopped, whatever it does

    async def _sample(self) -> None:
        """Wait until nothing is under way, sample the books and the resources, and go on."""
        for engine in (self._side, self._consumer, self._producer):
            if engine is not None:
                found = await engine.call("settle")
                self.found.violations += [f"{self._passed_s:.0f} s: {one}" for one in found]
        told = await self._consumer.call("outcomes")
        self.found.outcomes.update(told)
        self.found.loads = sum(told["outcomes"].values()) - told["outcomes"].get("restored", 0)
        for name, engine in (("producer", self._producer), ("consumer", self._consumer)):
            taken = await engine.call("sample")
            self.found.samples[name].append({"seconds": self._passed_s, "loads": self.found.loads, **taken})
        logger.info("%.0f s: %d loads, %d violations", self._passed_s, self.found.loads, len(self.found.violations))
        await self._go()

    async def _many_leases(self) -> None:
        """So many leases open at once: some are read, a third runs out, the rest is revoked."""
        count = self._leases
        read = min(_LEASES_READ, count // 4)
        first = (next(self._keys) + 1) << 50
        opened = await self._producer.call("open_leases", first=first, count=count, read=read)
        ended = await self._consumer.call("read_leases", tickets=opened["tickets"])
        outcomes = await self._producer.call("end_leases", read=[number for number, _ in opened["tickets"]])
        self.found.leases.append({"open": opened["open"], "loads": ended, "outcomes": outcomes})
        wanted, expired = len(opened["tickets"]), -(-count // 3)
        books = {"read": wanted, "expired": expired, "revoked": count - wanted - expired}
        if opened["open"] < count or ended != {"loaded": wanted} or outcomes != books:
            self.found.violations.append(f"{count} leases at once: {self.found.leases[-1]}")

    async def _fault(self) -> None:
        """One, drawn; it is over when this returns."""
        left = {name: often for name, (often, *_) in FAULTS.items() if self._side or name.split()[0] not in _SIGNALS}
        name = self._random.choices(list(left), list(left.values()))[0]
        self.found.faults[name] += 1
        logger.debug("%.0f s: %s", self._passed_s, name)
        _, side, kinds = FAULTS[name]
        home, key = self._random.choice(_HOMES), next(self._keys)
        await self._consumer.call("trouble", key=key, where=side and f"{side} {home}", kinds=kinds)
        match name.split():
            case ["stop"]:
                await self._consumer.stop(0.3 * self._random.random())
            case ["stop", _]:
                await self._side.stop(SHORT_TTL_S * self._random.random())
            case ["kill", _]:
                await self._side.kill(quiet=self._quiet)
                await self._start_side()
                await self._go()
            case ["cut"]:
                await self._consumer.call("cut", ports=await self._producer.call("ports"))
            case _:
                engine = self._producer if side == "producer" else self._consumer
                await engine.call("upset", home=home, how=name.split()[-1])
        await asyncio.sleep(0.3)  # back-off is over
        await self._consumer.call("over", key=key)


def _stands_still(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
