"""Verbs over a Unix socket, several at once: `{"call": 3, "verb": ..., "arguments": ...}`, answered in any order."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

LINE_BYTES_MAX = 1 << 26


class Refused(Exception):
    """The verb has raised; `kind` is the name of the error's type."""

    def __init__(self, verb: str, kind: str, text: str) -> None:
        super().__init__(f"{verb}: {kind}: {text}")
        self.kind = kind


class Server:
    """Answers with the `do_` methods of an object, until it is closed."""

    def __init__(self, verbs: object) -> None:
        self._verbs = verbs
        self._calls: set[asyncio.Task[None]] = set()

    async def listen(self, path: Path) -> None:
        self._server = await asyncio.start_unix_server(self._serve, path, limit=LINE_BYTES_MAX)

    def close(self) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                task = asyncio.create_task(self._answer(writer, **json.loads(line)))
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
        except ConnectionError:
            pass  # a process that was killed
        finally:
            writer.close()

    async def _answer(self, writer: asyncio.StreamWriter, call: int, verb: str, arguments: dict[str, Any]) -> None:
        try:
            answer = {"value": await getattr(self._verbs, f"do_{verb}")(**arguments)}
        except Exception as error:  # noqa: BLE001 - who asked judges it
            answer = {"error": [type(error).__name__, str(error)]}
        if not writer.is_closing():
            writer.write(json.dumps({"call": call, **answer}).encode() + b"\n")


class Client:
    """The other end. ConnectionError once the process is gone."""

    def __init__(self) -> None:
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._calls = 0

    async def connect(self, path: Path) -> Client:
        """ConnectionRefusedError while the process is about to listen."""
        reader, self._writer = await asyncio.open_unix_connection(path, limit=LINE_BYTES_MAX)
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def call(self, verb: str, **arguments: Any) -> Any:
        self._calls += 1
        call, answered = self._calls, asyncio.get_running_loop().create_future()
        if self._reading.done():
            raise ConnectionError(f"{verb}: the process is gone")
        self._answers[call] = answered
        self._writer.write(json.dumps({"call": call, "verb": verb, "arguments": arguments}).encode() + b"\n")
        answer = await answered
        if "error" in answer:
            raise Refused(verb, *answer["error"])
        return answer["value"]

    async def close(self) -> None:
        self._writer.close()
        self._reading.cancel()
        await asyncio.wait([self._reading])

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                answer = json.loads(line)
                answered = self._answers.pop(answer["call"])
                if not answered.done():
                    answered.set_result(answer)
        except ConnectionError:
            pass
        finally:
            for answered in self._answers.values():
                if not answered.done():
                    answered.set_exception(ConnectionError("the process is gone"))
