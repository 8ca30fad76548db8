"""The runtimes of one engine, each with its cache, by their names in plans; and the operations on them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import psutil

from kvflow import Config, Limits, Runtime
from kvflow.runtime.part import Part
from kvflow.runtime.runtime import RuntimeStatistics
from kvflow.stock import StockPeers, Terms
from kvflow.storage import Storage
from kvflow.testing import assert_closed, assert_quiet
from tests.endurance.caches import Cache
from tests.support.stock_engines import HASH, NAMES

STOCK_LEASE_S = 10.0
_STOCK = StockPeers(
    hashes=(HASH,),
    terms=Terms(lease_s=STOCK_LEASE_S, router_s=1.0),
    serve_version="0.32.0",
    attn_backend_name="CPU_ATTN",
    region_names=NAMES,
)
_LIMITS = Limits(peer_backoff_first_s=0.05, peer_backoff_max_s=0.2)
_WAIT_S = 60.0


class Event:
    """Something of a device that happens after a while; `first` is done right before."""

    def __init__(self, delay_s: float, first: Callable[[], None]) -> None:
        self._first = first
        self._happened = asyncio.Event()
        self._timer = asyncio.get_running_loop().call_later(delay_s, self._happen)

    def query(self) -> bool:
        return self._happened.is_set()

    def synchronize(self) -> None:
        raise AssertionError("nobody blocks")

    async def over(self) -> None:
        await self._happened.wait()

    def cancel(self) -> None:
        self._timer.cancel()

    def _happen(self) -> None:
        self._first()
        self._happened.set()


@dataclass(slots=True)
class Home:
    """One runtime and its cache; another runtime follows where it is reopened."""

    cache: Cache
    config: Config
    runtime: Runtime
    storage: Storage

    async def open(self) -> None:
        await self.runtime.__aenter__()
        await self.register()

    async def register(self) -> None:
        kv_caches, layout = self.cache.registered
        await self.runtime.register_kv_caches(kv_caches, layout)  # type: ignore[arg-type]


def _new_runtime(config: Config, storage: Storage) -> Runtime:
    parts: list[Part] = [storage] if storage.folder != "unused" else []
    return Runtime(config, parts=[*parts, _STOCK] if config.model == "/m" else parts)


class Homes:
    """All runtimes of an engine."""

    def __init__(self, engine_id: str, caches: Mapping[str, Cache], store_dir: str | None) -> None:
        self.errors: list[str] = []
        self._homes: dict[str, Home] = {}
        for name, cache in caches.items():
            config = Config(
                engine_id=f"{engine_id}-{name}",
                listen="tcp://127.0.0.1:0",
                model="/m" if name == "stock" else "m",
                staging="always" if name == "staged" else "auto",
                host_buffer_bytes_max=8 << 20,
                drain_timeout_s=0.5,
                cancel_grace_s=0.5,
                handshake_timeout_s=10.0,
                limits=_LIMITS,
            )
            if name == "stock":
                config = replace(config, num_kv_heads=4)
            storage = Storage(store_dir if name == "plain" and store_dir else "unused", bytes_max=4 << 20)
            self._homes[name] = Home(cache, config, _new_runtime(config, storage), storage)

    def __getitem__(self, name: str) -> Home:
        return self._homes[name]

    async def open(self) -> None:
        for home in self._homes.values():
            await home.open()

    async def close(self) -> None:
        for name, home in self._homes.items():
            await home.runtime.aclose()
            self._note(name, _wrong(assert_closed, home))

    async def upset(self, name: str, how: str) -> None:
        """Do something to a runtime; it works again when this returns."""
        home = self._homes[name]
        match how:
            case "unregister":
                await home.runtime.unregister()
                await home.register()
            case "reopen":
                await home.runtime.drain(0.1)
                await home.runtime.aclose()
                self._note(name, _wrong(assert_closed, home))
                home.runtime = _new_runtime(home.config, home.storage)
                await home.open()
            case _:
                raise ValueError(how)

    async def settle(self) -> None:
        """Wait until nothing is under way, then look at the books and at every block."""
        for name, home in self._homes.items():
            until_s = time.monotonic() + _WAIT_S
            while (wrong := _wrong(assert_quiet, home)) and time.monotonic() < until_s:
                await asyncio.sleep(0.02)
            self._note(name, wrong)
            home.cache.check_all_free()
            self.errors += home.cache.errors
            home.cache.errors.clear()

    @property
    def open_reads(self) -> int:
        return sum(home.runtime.statistics().transport.open_reads for home in self._homes.values())

    def cut_side_channels(self, ports: list[int]) -> int:
        """Cut this process's connections to these ports, as a network does; how many."""
        cut = 0
        for one in psutil.Process().net_connections("tcp"):
            if one.raddr and one.raddr.port in ports and one.fd >= 0:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(one.fd)) as copy:
                    if copy.getpeername()[1] in ports:
                        copy.shutdown(socket.SHUT_RDWR)
                        cut += 1
        return cut

    def _note(self, name: str, wrong: str) -> None:
        if wrong:
            self.errors.append(f"{name}: {wrong}")


def _wrong(check: Callable[[RuntimeStatistics], None], home: Home) -> str:
    """Return the text of a failed check of a runtime's books, or an empty text."""
    try:
        check(home.runtime.statistics())
    except AssertionError as error:
        return str(error) or "an assertion fails"
    return ""
