"""A program that runs an engine of the next protocol version, for `test_versions.py` with engines of this version.

The program prints a ticket, reads a ticket of this version, and prints the errors of two loads by it: with the ticket
unchanged, and with its version changed, so that the question reaches the other engine's listener.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

from kvflow import Config, LoadRequest, ServeRequest
from kvflow.core.protocol import codec, ticket
from kvflow.errors import KVFlowError
from kvflow.testing import InprocNetwork, InprocTransport, assert_quiet
from kvflow.testing.pair import Engine, open_engine

NEXT = codec.PROTOCOL_VERSION + 1


def changed(params: dict[str, Any], version: int) -> dict[str, Any]:
    """Return the ticket with another protocol version."""
    return {**params, "kvflow": {**params["kvflow"], "version": version}}


async def refused(engine: Engine[InprocTransport], params: dict[str, Any]) -> list[str]:
    """Return the class and message of the error of a load that must fail. Assert that the engine is idle afterwards."""
    try:
        await engine.runtime.load_blocks(LoadRequest("req", params, block_ids=[0]))
    except KVFlowError as error:
        assert_quiet(engine.runtime.statistics())
        return [type(error).__name__, str(error)]
    raise AssertionError("a load between two versions has succeeded")


async def main() -> None:
    network = InprocNetwork()
    config = Config(engine_id="any", transport="inproc")
    async with open_engine("next", config, lambda _, name: InprocTransport(name, network)) as engine:
        lease = engine.runtime.serve_blocks(ServeRequest("req", block_ids=[3], num_tokens=4))
        print(json.dumps(lease.ticket.to_params()), flush=True)
        ours = json.loads(await asyncio.to_thread(sys.stdin.readline))
        lease.revoke()
        await lease
        results = [await refused(engine, params) for params in (ours, changed(ours, NEXT))]
        print(json.dumps(results), flush=True)


if __name__ == "__main__":
    codec.PROTOCOL_VERSION = ticket.PROTOCOL_VERSION = NEXT
    asyncio.run(main())
