"""KV hints: a router's message with a request, of which kvflow follows `kv.fetch`: who holds a prefix of the prompt.

A message of protocol version 0.1 has actions, each with a type, a version and a payload. The payload of `kv.fetch` 1.0
has the holder's address, `source_control_endpoint`, and the holder's hashes of blocks, which kvflow does not use: it
asks the holder for the prompt's own prefix keys. Hints are advice. What kvflow does not know or cannot read is counted,
logged once for each reason, and changes nothing in the request.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import msgspec

from kvflow import checks
from kvflow.core.protocol.addresses import side_channel_address
from kvflow.errors import RequestError
from kvflow.logs import logger_of

logger = logger_of(__name__)

_PROTOCOL, _FETCH, _COPY = "0.1", ("kv.fetch", "1.0"), "copy"
_ACTIONS_MAX = 64
_SHOWN_CHARS = 40


class IgnoredHint(enum.StrEnum):
    """Why a KV hint, or one of its actions, was ignored."""

    VERSION = "version"
    """kvflow does not know the message's protocol version."""
    ACTION = "action"
    """kvflow does not know the action, its version, or the mode of a `kv.fetch`."""
    MALFORMED = "malformed"
    NOT_PULLED = "not_pulled"
    """This engine pulls no prefixes."""


@checks.built
class _Version(msgspec.Struct):
    protocol_version: str


@checks.built
class _Action(msgspec.Struct):
    action_type: str
    action_version: str
    payload: Any = None


@checks.built
class _Actions(msgspec.Struct):
    actions: Annotated[list[_Action], msgspec.Meta(max_length=_ACTIONS_MAX)]


@checks.built
class _Fetch(msgspec.Struct):
    source_control_endpoint: str
    mode: str = _COPY


class _Ignored(Exception):
    def __init__(self, reason: IgnoredHint, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class KVHints:
    """Reads the KV hints of an engine's requests."""

    def __init__(self, *, pulls: bool, on_ignored: Callable[[IgnoredHint], None]) -> None:
        """`pulls`: this engine pulls prefixes. `on_ignored` is called for each ignored message, and each action."""
        self._pulls = pulls
        self._on_ignored = on_ignored
        self._logged = set[IgnoredHint]()

    def source(self, hints: object) -> str | None:
        """Return the address of a peer that, according to `hints`, holds a prefix of the prompt, or None.

        `hints` is the router's message, an object or a mapping. If several actions name peers, return the first peer.
        """
        sources: list[str] = []
        with self._ignoring():
            for action in self._actions_of(hints):
                with self._ignoring():
                    sources.append(_source_of(action))
        return sources[0] if sources else None

    def _actions_of(self, hints: object) -> list[_Action]:
        if not self._pulls:
            raise _Ignored(IgnoredHint.NOT_PULLED, "this engine pulls no prefixes")
        version: str = _read(hints, _Version).protocol_version
        if version != _PROTOCOL:
            raise _Ignored(IgnoredHint.VERSION, f"protocol_version: ours {_PROTOCOL}, theirs {version[:_SHOWN_CHARS]}")
        actions: list[_Action] = _read(hints, _Actions).actions
        return actions

    @contextlib.contextmanager
    def _ignoring(self) -> Iterator[None]:
        try:
            yield
        except _Ignored as error:
            self._ignore(error.reason, error)
        except (msgspec.ValidationError, RequestError) as error:
            self._ignore(IgnoredHint.MALFORMED, error)

    def _ignore(self, reason: IgnoredHint, why: Exception) -> None:
        self._on_ignored(reason)
        if reason not in self._logged:
            self._logged.add(reason)
            logger.warning("ignored a KV hint; no further line for this reason (%s): %s", reason, why)


def _source_of(action: _Action) -> str:
    shown = f"action {action.action_type[:_SHOWN_CHARS]} {action.action_version[:_SHOWN_CHARS]}"
    if (action.action_type, action.action_version) != _FETCH:
        raise _Ignored(IgnoredHint.ACTION, shown)
    fetch = _read(action.payload, _Fetch)
    if fetch.mode != _COPY:
        raise _Ignored(IgnoredHint.ACTION, f"{shown}, mode {fetch.mode[:_SHOWN_CHARS]}")
    return side_channel_address(fetch.source_control_endpoint, "source_control_endpoint")


def _read(value: object, kind: type[Any]) -> Any:
    return msgspec.convert(value, kind, from_attributes=True)
