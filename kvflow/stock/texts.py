"""Notifications of stock readers: "ID:N" says that one of N readers has read, "HB:ID,ID" that these are still needed.

A stock producer decodes them in its engine's step without a guard: bytes that are no UTF-8, a text without a colon, or
a number that is none ends its engine. So only texts that this module makes are ever sent to one, and it makes none of
an id that cannot stand in one. Ours are MessagePack arrays, which begin with a byte that no such text begins with.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from kvflow.checks import counted
from kvflow.config import RANKS_MAX
from kvflow.core.protocol.codec import WireError
from kvflow.core.protocol.spare import bare_id
from kvflow.limits import REQUEST_ID_CHARS_MAX

_HEARTBEAT = "HB:"
_PUSHED = "PUSH_REG:"
_ARRAYS = range(0x90, 0xA0)
TEXT_BYTES_MAX = 1 << 14
"""Size of texts that are sent."""
HEARD_BYTES_MAX = 1 << 22
"""Size of texts that come: a stock reader names all requests that wait there for one producer at once, by ids with
a spare behind them."""
_HEARD_IDS_MAX = 1 << 14


class ReaderText(NamedTuple):
    """What a stock reader reports: a request that it has read, or the requests whose blocks it still needs."""

    request_ids: tuple[str, ...]
    readers: int = 0
    """Number of readers of this rank, of which one has read; 0 of a heartbeat."""


def is_text(payload: bytes) -> bool:
    """True if a notification is a stock reader's, if it is anybody's."""
    return not payload or payload[0] not in _ARRAYS


def can_be_told(request_id: str) -> bool:
    """True if a text can name this request, so that a stock producer takes it for no other."""
    plain = request_id.isprintable() and request_id.isascii() and 0 < len(request_id) <= REQUEST_ID_CHARS_MAX
    return plain and "," not in request_id and not request_id.startswith((_HEARTBEAT, _PUSHED))


def read_text(request_id: str, readers: int) -> bytes:
    """The notification that one of `readers` has read. ValueError for what would end the engine that gets it."""
    if not can_be_told(request_id) or not 1 <= readers <= RANKS_MAX:
        raise ValueError(f"no notification can say {request_id[:80]!a}:{readers}")
    return f"{request_id}:{readers}".encode()


def heartbeat_texts(request_ids: Iterable[str]) -> Iterator[bytes]:
    """Notifications that these are needed still, few and of a bounded size. ValueError as `read_text`."""
    some: list[str] = []
    size = 0
    for request_id in request_ids:
        if not can_be_told(request_id):
            raise ValueError(f"no heartbeat can name {request_id[:80]!a}")
        if some and size + len(request_id) + 1 > TEXT_BYTES_MAX - len(_HEARTBEAT):
            yield (_HEARTBEAT + ",".join(some)).encode()
            some, size = [], 0
        some.append(request_id)
        size += len(request_id) + 1
    if some:
        yield (_HEARTBEAT + ",".join(some)).encode()


def decode_text(payload: bytes) -> ReaderText:
    """Decode a stock reader's text, with request ids as they are here. WireError for anything else."""
    if len(payload) > HEARD_BYTES_MAX:
        raise WireError(f"a text of {counted(len(payload), 'byte')}, at most {HEARD_BYTES_MAX}")
    try:
        text = payload.decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError(f"no text of a stock reader, {counted(len(payload), 'byte')}: {error}") from error
    if text.startswith(_PUSHED):
        raise WireError("a reader that wants blocks pushed (NixlPushConnector)")
    if text.startswith(_HEARTBEAT):
        ids = text.removeprefix(_HEARTBEAT).split(",", _HEARD_IDS_MAX)
        if len(ids) > _HEARD_IDS_MAX:
            raise WireError(f"a heartbeat for more than {_HEARD_IDS_MAX} requests")
        names = tuple(dict.fromkeys(map(bare_id, ids)))
        if not all(map(can_be_told, names)):
            raise WireError(f"a heartbeat that cannot be, for {counted(len(names), 'request')}")
        return ReaderText(names)
    told, separator, count = text.rpartition(":")
    request_id = bare_id(told)
    plain = separator and count.isdigit() and len(count) <= len(str(RANKS_MAX))
    if not plain or not can_be_told(request_id) or not 1 <= int(count) <= RANKS_MAX:
        raise WireError(f"{text[:80]!a} says not what was read, and by how many")
    return ReaderText((request_id,), int(count))
