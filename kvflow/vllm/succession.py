"""Succession: which server takes this one's place. The workers' goodbyes name it to their readers.

vLLM tells no connector that its server is going to be stopped, nor which server comes next. An operator says so, by two
requests (`kvflow hand-on` sends both). A request to the new server, with `"kv_transfer_params": {"kvflow":
{"introduce": true}}`, is answered with a ticket that names the new server's ranks. A request to the old server carries
that ticket: `{"kvflow": {"successor": {...}}}`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.logs import logger_of

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = logger_of("vllm.kvflow")

_INTRODUCE, _SUCCESSOR = "introduce", "successor"


class Succession:
    """The requests in vLLM's scheduler that ask for this server's introduction, or name its successor."""

    def __init__(self) -> None:
        self.introduction: Ticket | None = None
        """Ticket without blocks that names this engine's ranks; None until the workers are known."""
        self._answers: dict[str, dict[str, Any]] = {}
        """By request id, the part of the answer's `kv_transfer_params` that is kvflow's."""
        self._named: Ticket | None = None

    def add(self, request: Request) -> None:
        """Note a new request, if it asks for the introduction or names a successor. The server answers one token."""
        extra = (request.kv_transfer_params or {}).get("kvflow")
        if not isinstance(extra, Mapping):
            return
        if extra.get(_INTRODUCE) is True:
            params = None if self.introduction is None else self.introduction.to_params()
            self._answers[request.request_id] = {"introduction": params}
        elif _SUCCESSOR in extra:
            self._answers[request.request_id] = {_SUCCESSOR: self._name(extra[_SUCCESSOR])}
        else:
            return
        request.max_tokens = 1

    def take_named(self) -> Ticket | None:
        """Return a ticket of the successor that was named since the last call, or None."""
        named, self._named = self._named, None
        return named

    def finish(self, request: Request) -> dict[str, Any] | None:
        """Return the `kv_transfer_params` of the answer to a request that `add` has noted; else None."""
        answer = self._answers.pop(request.request_id, None)
        return None if answer is None else {"kvflow": answer}

    def _name(self, given: object) -> dict[str, str]:
        """Take the successor's ticket from a request. Return its engine id, or the reason why it is refused."""
        try:
            if not isinstance(given, Mapping):
                raise RequestError("expected the introduction of a server")
            ticket = Ticket.from_params(given)
            if self.introduction is not None and ticket.engine_id == self.introduction.engine_id:
                raise RequestError("it is this server")
        except RequestError as error:
            logger.warning("kv_transfer_params: kvflow.successor: %s", error)
            return {"reason": f"kv_transfer_params: kvflow.successor: {error}"}
        self._named = ticket
        return {"engine_id": ticket.engine_id}
