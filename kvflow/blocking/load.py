"""Loads on the loop, and blocks in which bytes may still land, as other threads hold them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from kvflow import checks
from kvflow.blocking.host import LoopHost
from kvflow.blocking.pending import Pending
from kvflow.config import Config
from kvflow.errors import KVFlowError, Quarantine, RuntimeClosed
from kvflow.runtime import runtime as asynchronous
from kvflow.runtime.load.load import Load as AsyncLoad
from kvflow.runtime.load.load import refused_load, request_name
from kvflow.runtime.load.requests import LoadReport, LoadRequest, Progress


class Load(Pending[LoadReport]):
    """A load on the loop: see `kvflow.Load`. Also the `quarantine` of the error that it ended with.

    `result` raises what `kvflow.Runtime.load_blocks` raises. Cancelled, it is `done` within Config.cancel_grace_s. Its
    blocks may be reused when `safe` says so, or `settled` has returned.
    """

    def __init__(self, host: LoopHost, request: LoadRequest) -> None:
        super().__init__(host.loop)
        self.request_id = request_name(request)
        self._host = host
        self._request = request
        self._load: AsyncLoad | None = None
        try:
            host.begin(self, self._carry_out)
        except KVFlowError as error:  # it is raised by `result`
            self._load = refused_load(request, error)
            self._fail(error)

    def __repr__(self) -> str:
        return f"<blocking {self._load!r}>" if self._load else f"<blocking Load {self.request_id} not begun>"

    @property
    def block_ids(self) -> tuple[int, ...]:
        """The local blocks that it fills; none before it has begun."""
        return self._load.block_ids if self._load else ()

    @property
    def block_tables(self) -> tuple[tuple[int, ...], ...]:
        """The local blocks, by group of layers."""
        return self._load.block_tables if self._load else ()

    @property
    def safe(self) -> bool:
        """True if it has ended and no byte can land in its blocks any more."""
        return self.done and (self._load is None or self._load.safe)

    def __iter__(self) -> Iterator[Progress]:
        """Progress of the load, as of `kvflow.Load`: whenever more tokens have landed, until it has ended.

        Raises what `result` raises; TimeoutError if the loop's thread is stuck, for longer than the load may take and
        the runtime's `call_timeout_s`. Each step waits for the loop; other threads may wait for the same load.
        """
        tokens = -1
        while (progress := self._step(tokens)) is not None:
            tokens = progress.tokens
            yield progress
        report = self.result()
        if report.tokens > tokens:
            yield Progress(report.tokens, report.tokens)

    def _step(self, tokens: int) -> Progress | None:
        async def progressed(_: asynchronous.Runtime) -> Progress | None:
            if self._load is None:
                return None
            self._load.follow()
            return await self._load.progressed(tokens)

        try:
            return self._host.call(progressed, loading_s(self._host.config, self._request) + self._host.call_timeout_s)
        except RuntimeClosed:  # the loop has ended: `result` says how the load has
            return None

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until it has ended and no byte can land in its blocks any more, however it ended.

        Args:
            timeout_s: how long, as for `result`.

        Raises:
            TimeoutError: `timeout_s` has passed.
            RuntimeBroken: that can never be known.
            UsageError: as for `result`, unless it is `safe`.
        """
        if not self.safe:
            self._host.settle(self, self._settle, timeout_s)

    async def _carry_out(self, runtime: asynchronous.Runtime) -> LoadReport:
        self._load = runtime.start_load(self._request)
        try:
            return await self._load
        except KVFlowError as error:
            if error.quarantine is not None:
                error.quarantine = self
            raise

    async def _settle(self, _: asynchronous.Runtime) -> None:
        if self._task is not None:
            await asyncio.wait([self._task])
        if self._load is not None:
            await self._load.settled()


class QuarantinedBlocks:
    """Blocks of a restore in which bytes may still land: the `quarantine` of the error that it ended with."""

    def __init__(self, held: Quarantine, host: LoopHost) -> None:
        self.request_id, self.block_ids = held.request_id, held.block_ids
        self._held = held
        self._host = host

    @property
    def safe(self) -> bool:
        """True if no byte can land any more."""
        return self._held.safe

    def settled(self, timeout_s: float | None = None) -> None:
        """Wait until no byte can land any more.

        TimeoutError after `timeout_s`. RuntimeBroken if that can never be known.
        """
        if not self.safe:
            self._host.settle(self, self._settle, timeout_s)

    async def _settle(self, _: asynchronous.Runtime) -> None:
        await self._held.settled()


def loading_s(config: Config, request: LoadRequest) -> float:
    """Seconds that a request may take, with the grace of a cancel."""
    asked_s = checks.answer(lambda: request.deadline_s)
    deadline_s = config.load_deadline_s if asked_s is None else checks.seconds(asked_s, "deadline_s")
    return deadline_s + config.cancel_grace_s
