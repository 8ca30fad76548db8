"""Spare of a ticket's field "kvflow", for routers that forward only the fields they know.

Routers of this field pass `remote_request_id` on as it is. A spare of the fields "kvflow" and "tp_size" is written
behind the id, and taken off where the ticket is read; it counts only where a field itself is gone, or null. The id is
marked whatever there is room for: without the field a dict would pass for one of an engine of another make.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

MARK = "~kvflow~"
CHARS_MAX = 4096
"""Longest spare; that of a ticket of very many ranks names one of them."""


def with_spare(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a ticket's dict with the spare behind its request id.

    Where there is no room for all of it, the spare names one of the ranks, or nothing: who reads no more than that asks
    the others, or refuses the ticket.
    """
    extra = params["kvflow"]
    # Routers leave "tp_size" out, and engines of another make take its absence for 1.
    whole = {**extra, **({"tp_size": params["tp_size"]} if "tp_size" in params else {})}
    spares = map(_packed, (whole, {**whole, "ranks": extra["ranks"][:1]}, {}))
    packed = next(packed for packed in spares if len(packed) <= CHARS_MAX)
    return {**params, "remote_request_id": f"{params['remote_request_id']}{MARK}{packed}"}


def bare_id(request_id: str) -> str:
    """A request's id without what is written behind it."""
    return request_id.rpartition(MARK)[0] or request_id


def _packed(extra: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(extra)).decode()


def without_spare(params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """Take the spare off the id, and use it for fields that are gone. A dict without a spare stays as it is."""
    bare, _, packed = request_id.rpartition(MARK)
    try:
        spare = msgspec.msgpack.decode(base64.b64decode(packed, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError, msgspec.DecodeError):
        return params
    if not isinstance(spare, dict):
        return params
    size = {"tp_size": spare.pop("tp_size")} if "tp_size" in spare else {}
    kept = {name: value for name, value in params.items() if value is not None or name not in ("kvflow", "tp_size")}
    return {"kvflow": spare, **size, **kept, "remote_request_id": bare}
