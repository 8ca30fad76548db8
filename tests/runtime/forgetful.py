"""A program that opens a runtime and forgets to close it, in one of several ways; a child process of `test_ownership`.

Says in JSON what is left when it has done so. That it ends by itself is for its parent to see.
"""

from __future__ import annotations

import asyncio
import gc
import json
import sys
import threading

import psutil
from tests_support import small_cache

from kvflow import Config, LoadRequest, Runtime, ServeRequest, blocking

OFFER = ServeRequest("req", block_ids=[3], num_tokens=4)
kept: list[object] = []


async def opened(transport: str, name: str = "forgotten", **size: int) -> Runtime:
    runtime = Runtime(Config(engine_id=name, listen="tcp://127.0.0.1:0", transport=transport))
    await runtime.__aenter__()
    await runtime.register_kv_caches(*small_cache(**size))
    return runtime


async def offering(transport: str) -> Runtime:
    runtime = await opened(transport)
    runtime.serve_blocks(OFFER)
    return runtime


async def load_hangs(transport: str) -> Runtime:
    """A load that waits for a peer which never answers, so that a question is under way."""
    runtime = await offering(transport)
    mute = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    lease = runtime.serve_blocks(ServeRequest("other", block_ids=[1], num_tokens=4))
    params = lease.ticket.to_params() | {"remote_engine_id": "mute", "remote_port": mute.sockets[0].getsockname()[1]}
    kept.append(runtime.start_load(LoadRequest("other", params, [0])))
    while not any(peer.state == "connecting" for peer in runtime.statistics().peers):
        await asyncio.sleep(0)
    return runtime


def reading(transport: str) -> None:
    """The loop ends in the middle of a read, which cannot be taken back."""

    async def main() -> None:
        size = {"num_blocks": 1 << 14, "layers": 8, "block_size": 16}
        producer, consumer = [await opened(transport, name, **size) for name in ("producer", "consumer")]
        blocks = range(1 << 14)
        lease = producer.serve_blocks(ServeRequest("req", block_ids=blocks, num_tokens=16 << 14))
        kept.append(consumer.start_load(LoadRequest("req", lease.ticket, blocks)))
        while not consumer.statistics().transport.open_reads:
            await asyncio.sleep(0)

    asyncio.run(main())
    kept.clear()


def in_run(transport: str) -> None:
    """`asyncio.run` cancels all tasks and closes the loop; the handle goes with its coroutine."""

    async def main() -> None:
        await offering(transport)

    asyncio.run(main())


def kept_after_run(transport: str) -> None:
    kept.append(asyncio.run(offering(transport)))


def asking(transport: str) -> None:
    kept.append(asyncio.run(load_hangs(transport)))
    kept.clear()


def loop_closed(transport: str) -> None:
    """The loop is closed under pending tasks."""
    loop = asyncio.new_event_loop()
    runtime = loop.run_until_complete(offering(transport))
    loop.close()
    del runtime


def loop_left(transport: str) -> None:
    """Nobody closes anything."""
    loop = asyncio.new_event_loop()
    kept.extend((loop, loop.run_until_complete(offering(transport))))


def own_thread(transport: str) -> None:
    """A blocking runtime that is dropped."""
    runtime = blocking.Runtime(Config(engine_id="forgotten", listen="tcp://127.0.0.1:0", transport=transport))
    runtime.open()
    runtime.register_kv_caches(*small_cache())
    runtime.serve_blocks(OFFER)


def main(way: str, transport: str) -> None:
    globals()[way](transport)
    gc.collect()
    if way != "loop_left":
        for thread in threading.enumerate():
            if thread.name.startswith("kvflow"):
                thread.join(30.0)
    listening = [one for one in psutil.Process().net_connections() if one.status == psutil.CONN_LISTEN]
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("kvflow")]
    print(json.dumps({"threads": left, "listening": len(listening)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
