"""Check of NIXL's backends: each moves some bytes.

All backends run in one child process. If a backend crashes that process, the finding says so, and the other backends
run in a new process. A backend for memory hands blocks over between two runtimes in the child. The backend for files
saves and restores blocks with `kvflow.storage`. Every byte is compared.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import Mapping, Sequence

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import QUIET_ENVIRONMENT, BenchError, ChildCaller, RankProcess, open_caller, open_children
from kvflow.bench.engine import EngineConsumer, config_of, open_producer, open_runtime
from kvflow.bench.loads import scattered_loads
from kvflow.config import STORE_BACKEND
from kvflow.doctor.findings import Finding, ok, warn
from kvflow.errors import KVFlowError

_SHAPE = CacheShape(layers=8, blocks=128)
_WAIT_S = 30.0
_FAILURE_MARK = "!"
"""First character of the result text of a backend that does not work."""


def check_backends(plugins: Sequence[str]) -> Finding:
    """Move some bytes with each NIXL backend in `plugins`, and return one finding about all backends."""
    found: dict[str, str] = {}
    left = list(plugins)
    while left:
        try:
            with open_children([RankProcess("backends", open_caller)], QUIET_ENVIRONMENT) as children:
                children["backends"].run(ChildCaller.call, _discard_output)
                while left:
                    found[left[0]] = children["backends"].run(ChildCaller.call, _try_backend, left[0])
                    left.pop(0)
        except BenchError as error:
            found[left.pop(0)] = _FAILURE_MARK + error.reason
    return judge_backends(found)


def judge_backends(found: Mapping[str, str]) -> Finding:
    """Return one finding about all backends.

    `found`: a text for each backend, by name. If the backend works, the text says what kind of bytes it moves and how
    fast. Else the text is `_FAILURE_MARK` and the reason.
    """
    moving = [f"{name} moves {what}" for name, what in found.items() if not what.startswith(_FAILURE_MARK)]
    others = [name for name, what in found.items() if what.startswith(_FAILURE_MARK)]
    text = "; ".join([*moving, f"not working: {', '.join(others)}"] if others else moving)
    if STORE_BACKEND in others or STORE_BACKEND not in found:
        why = found.get(STORE_BACKEND, _FAILURE_MARK + "there is no such plugin").removeprefix(_FAILURE_MARK)
        return warn("backends", text, f"only kvflow.storage needs {STORE_BACKEND}, which does not work: {why}")
    return ok("backends", text)


async def _try_backend(name: str) -> str:
    """Move some bytes with the backend `name`, in this process. Return the result text for `judge_backends`."""
    try:
        async with asyncio.timeout(_WAIT_S):
            return await (_save_and_restore() if name == STORE_BACKEND else _hand_over(name))
    except (KVFlowError, OSError, ImportError) as error:
        return f"{_FAILURE_MARK}{type(error).__name__}: {error}"


def _discard_output() -> None:
    """Discard all output of this process: some plugins print a greeting, which would break the output of --json."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(nowhere, stream)


async def _save_and_restore() -> str:
    from kvflow.storage import RestoreRequest, SaveRequest, Storage

    blocks, cache = list(range(_SHAPE.blocks)), BenchCache(_SHAPE)
    cache.fill()
    with tempfile.TemporaryDirectory(prefix="kvflow-doctor-") as folder:
        storage, tokens = Storage(folder), len(blocks) * _SHAPE.block_size
        async with open_runtime(config_of("doctor"), cache, [storage]):
            saved = await storage.save(SaveRequest("doctor", "key", blocks, tokens))
            cache.poison(blocks)
            restored = await storage.restore(RestoreRequest("doctor", "key", blocks, tokens))
    cache.check(blocks, blocks)
    write, read = (_SHAPE.size_bytes / sum(report.seconds.values()) / 1e9 for report in (saved, restored))
    return f"files ({write:.1f} GB/s to the disk, {read:.1f} GB/s back)"


async def _hand_over(name: str) -> str:
    cache = BenchCache(_SHAPE)
    async with (
        open_producer(config_of("doctor-writer", name), _SHAPE) as producer,
        open_runtime(config_of("doctor-reader", name), cache) as runtime,
    ):
        consumer = EngineConsumer(runtime, cache)
        for turn in range(2):  # the first load connects
            loads = scattered_loads(f"doctor {turn}", _SHAPE.blocks, [_SHAPE.blocks])
            (load,) = await consumer.load(loads, await producer.offer(loads))
        await producer.end_leases()
    return f"memory between engines ({load.size_bytes / load.seconds / 1e9:.1f} GB/s within one process)"
