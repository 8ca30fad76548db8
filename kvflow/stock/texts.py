"""Notifications of stock readers: "ID:N" (one of N readers has read request ID) and "HB:ID,ID" (still needed).

A stock producer takes the notifications that it gets on trust. So a producer gets only texts of this module, which
refuses ids that would change a text's meaning. kvflow's own notifications are MessagePack arrays, which begin with a
byte that no text begins with.
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
_PUSH_REGISTRATION = "PUSH_REG:"
_MSGPACK_ARRAYS = range(0x90, 0xA0)
TEXT_BYTES_MAX = 1 << 14
"""Largest size in bytes of a heartbeat to a stock producer."""
RECEIVED_BYTES_MAX = 1 << 22
"""Largest size in bytes of a stock reader's notification. It is large because a heartbeat has the ids of all requests
that wait for one producer, and kvflow's parameters are appended to each id (`make_stock_params`)."""
_HEARTBEAT_IDS_MAX = 1 << 14


class ReaderText(NamedTuple):
    """A decoded notification of a stock reader: the one request that was read, or a heartbeat's requests."""

    request_ids: tuple[str, ...]
    readers: int = 0
    """Number N in the notification; 0 for a heartbeat. N is how many readers will report to this rank that they have
    read the request, or in older release lines the readers' tensor-parallel size (`ReleaseLine.reports_tp_size`)."""


def is_text(payload: bytes) -> bool:
    """Return True if the notification `payload` is not kvflow's own, so that only a stock reader can have sent it."""
    return not payload or payload[0] not in _MSGPACK_ARRAYS


def fits_text(request_id: str) -> bool:
    """Return True if notifications to a stock producer can contain `request_id` without being misread."""
    plain = request_id.isprintable() and request_id.isascii() and 0 < len(request_id) <= REQUEST_ID_CHARS_MAX
    return plain and "," not in request_id and not request_id.startswith((_HEARTBEAT, _PUSH_REGISTRATION))


def read_text(request_id: str, readers: int) -> bytes:
    """Return the notification that one of `readers` readers has read the request `request_id`.

    ValueError if an argument is out of range, or if the id would change the meaning of the text.
    """
    if not fits_text(request_id) or not 1 <= readers <= RANKS_MAX:
        raise ValueError(f"no notification can contain {request_id[:80]!a}:{readers}")
    return f"{request_id}:{readers}".encode()


def heartbeat_texts(request_ids: Iterable[str]) -> Iterator[bytes]:
    """Yield heartbeats, each of at most `TEXT_BYTES_MAX` bytes, that together name all `request_ids`.

    ValueError if an id would change the meaning of a text.
    """
    some: list[str] = []
    size = 0
    for request_id in request_ids:
        if not fits_text(request_id):
            raise ValueError(f"no heartbeat can contain {request_id[:80]!a}")
        if some and size + len(request_id) + 1 > TEXT_BYTES_MAX - len(_HEARTBEAT):
            yield (_HEARTBEAT + ",".join(some)).encode()
            some, size = [], 0
        some.append(request_id)
        size += len(request_id) + 1
    if some:
        yield (_HEARTBEAT + ",".join(some)).encode()


def decode_text(payload: bytes) -> ReaderText:
    """Decode a stock reader's notification. WireError if it is not valid.

    The returned request ids lack the copy of kvflow's parameters that `make_stock_params` has appended.
    """
    if len(payload) > RECEIVED_BYTES_MAX:
        raise WireError(f"a text of {counted(len(payload), 'byte')}, at most {RECEIVED_BYTES_MAX}")
    try:
        text = payload.decode("ascii")
    except UnicodeDecodeError as error:
        raise WireError(f"expected a stock reader's text, got {counted(len(payload), 'byte')}: {error}") from error
    if text.startswith(_PUSH_REGISTRATION):
        raise WireError("a reader that wants blocks pushed (NixlPushConnector)")
    if text.startswith(_HEARTBEAT):
        ids = text.removeprefix(_HEARTBEAT).split(",", _HEARTBEAT_IDS_MAX)
        if len(ids) > _HEARTBEAT_IDS_MAX:
            raise WireError(f"a heartbeat for more than {_HEARTBEAT_IDS_MAX} requests")
        names = tuple(dict.fromkeys(map(bare_id, ids)))
        if not all(map(fits_text, names)):
            raise WireError(f"a heartbeat for {counted(len(names), 'request')}, one of them with an invalid id")
        return ReaderText(names)
    encoded_id, separator, count = text.rpartition(":")
    request_id = bare_id(encoded_id)
    plain = separator and count.isdigit() and len(count) <= len(str(RANKS_MAX))
    if not plain or not fits_text(request_id) or not 1 <= int(count) <= RANKS_MAX:
        raise WireError(f"{text[:80]!a} does not say which request was read, and by how many readers")
    return ReaderText((request_id,), int(count))
