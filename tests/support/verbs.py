"""Commands ("verbs") to an engine in another process, as lines of JSON over a stream. Several may run at once.

`{"call": 3, "verb": "load", "arguments": {...}}` is answered by `{"call": 3, "value": ...}` or by
`{"call": 3, "error": {...}}`, in the order in which the verbs end.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

LINE_BYTES_MAX = 1 << 26


class EngineError(Exception):
    """A verb failed in the engine. `kind` is the name of the error's type there."""

    def __init__(self, verb: str, described: dict[str, Any]) -> None:
        super().__init__(f"{verb}: {described['kind']}: {described['text']}")
        self.kind: str = described["kind"]
        self.phase: str | None = described["phase"]
        self.quarantined: list[int] = described["quarantined"]


def line(call: int, **said: Any) -> bytes:
    return json.dumps({"call": call, **said}).encode() + b"\n"


async def serve(
    verbs: object,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    start: Callable[[Coroutine[Any, Any, None]], object],
) -> None:
    """Call the `do_` methods of `verbs` by the commands from `reader`, until "quit" or the end of the stream.

    `start` starts each call in a task.
    """
    while (said := await reader.readline()) and (command := json.loads(said))["verb"] != "quit":
        start(_answer(writer, verbs, **command))


async def _answer(writer: asyncio.StreamWriter, verbs: object, call: int, verb: str, arguments: dict[str, Any]) -> None:
    try:
        said = {"value": await getattr(verbs, f"do_{verb}")(**arguments)}
    except (Exception, asyncio.CancelledError) as error:  # noqa: BLE001 - sent to the caller
        said = {"error": described(error)}
    if not writer.is_closing():
        writer.write(line(call, **said))


def described(error: BaseException) -> dict[str, Any]:
    quarantine = getattr(error, "quarantine", None)
    return {
        "kind": type(error).__name__,
        "text": str(error),
        "phase": getattr(error, "phase", None),
        "quarantined": list(quarantine.block_ids) if quarantine else [],
    }


class Client:
    """The calling end, on an event loop, over a Unix socket. Calls raise ConnectionError once the process has ended."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0

    async def connect(self, path: Path) -> Client:
        """Connect to the process. Raises ConnectionRefusedError if the process does not listen yet."""
        reader, self._writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def call(self, verb: str, **arguments: Any) -> Any:
        self._calls += 1
        call, answered = self._calls, asyncio.get_running_loop().create_future()
        if self._reading.done():
            raise ConnectionError(f"{verb}: the process is gone")
        self._answers[call] = answered
        self._writer.write(line(call, verb=verb, arguments=arguments))
        said = await answered
        if "error" in said:
            raise EngineError(verb, said["error"])
        return said["value"]

    async def close(self) -> None:
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while said := await reader.readline():
                found = json.loads(said)
                answered = self._answers.pop(found["call"])
                if not answered.done():
                    answered.set_result(found)
        except ConnectionError:
            pass
        finally:
            for answered in self._answers.values():
                if not answered.done():
                    answered.set_exception(ConnectionError("the process is gone"))
