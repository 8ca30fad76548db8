"""Tickets for routers that forward the fields they know and drop the others, kvflow's own among them.

Routers of this field pass `remote_request_id` on as it is. A spare of the field "kvflow" is written behind the id, and
taken off where the ticket is read; it counts only where the field itself is gone.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

MARK = "~kvflow~"
CHARS_MAX = 4096
"""An engine of very many ranks has no spare."""


def with_spare(params: Mapping[str, Any]) -> dict[str, Any]:
    """A ticket's dict, with the spare behind its request id."""
    packed = base64.urlsafe_b64encode(msgspec.msgpack.encode(params["kvflow"])).decode()
    if len(packed) > CHARS_MAX:
        return dict(params)
    return {**params, "remote_request_id": f"{params['remote_request_id']}{MARK}{packed}"}


def without_spare(params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """The dict as it was before, its field "kvflow" from the spare if it is gone. What is no spare stays as it is."""
    bare, _, packed = request_id.rpartition(MARK)
    try:
        spare = msgspec.msgpack.decode(base64.b64decode(packed, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError, msgspec.DecodeError):
        return params
    return {"kvflow": spare, **params, "remote_request_id": bare} if isinstance(spare, dict) else params
