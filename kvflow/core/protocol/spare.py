"""The spare: a copy of a ticket's field "kvflow" for routers that forward only fields they know.

Routers for KV transfer forward `remote_request_id` unchanged. So the spare, a copy of the fields "kvflow" and
"tp_size", is appended to that id after SPARE_MARK, and removed where the ticket is read. A copy is used only if the
field itself is missing or null. The mark is appended even if the copy does not fit, because a ticket without the field
"kvflow" would be taken for one of vLLM's own NixlConnector.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping
from typing import Any

import msgspec

SPARE_MARK = "~kvflow~"
SPARE_CHARS_MAX = 4096
"""Maximum number of characters of a spare (the copy of a ticket's field "kvflow" behind its request id)."""


def with_spare(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of `params`, a ticket's dict, with the spare appended to its request id.

    The spare is a copy of the dict's fields "kvflow" and "tp_size". If the leases of all ranks do not fit, the spare
    has only the first rank's lease, and readers ask the other ranks for their leases. If the first lease does not fit
    either, the spare is empty, and readers refuse the ticket if a router has dropped the field "kvflow".
    """
    extra = params["kvflow"]
    # Some routers drop "tp_size", and other engines take 1 if it is missing.
    whole = {**extra, **({"tp_size": params["tp_size"]} if "tp_size" in params else {})}
    spares = map(_packed, (whole, {**whole, "ranks": extra["ranks"][:1]}, {}))
    packed = next(packed for packed in spares if len(packed) <= SPARE_CHARS_MAX)
    return {**params, "remote_request_id": f"{params['remote_request_id']}{SPARE_MARK}{packed}"}


def bare_id(request_id: str) -> str:
    """Return a request id without the copy of a ticket's fields that `with_spare` has appended, if there is one."""
    return request_id.rpartition(SPARE_MARK)[0] or request_id


def _packed(extra: Mapping[str, Any]) -> str:
    return base64.urlsafe_b64encode(msgspec.msgpack.encode(extra)).decode()


def without_spare(params: Mapping[str, Any], request_id: str) -> Mapping[str, Any]:
    """Return a copy of `params`, a ticket's dict, with "kvflow" and "tp_size", if missing or null, from the spare.

    `request_id`: the dict's request id, to which `with_spare` has appended the spare; the returned dict has the bare
    request id. Return `params` itself if the spare is not valid.
    """
    bare, _, packed = request_id.rpartition(SPARE_MARK)
    try:
        spare = msgspec.msgpack.decode(base64.b64decode(packed, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError, msgspec.DecodeError):
        return params
    if not isinstance(spare, dict):
        return params
    size = {"tp_size": spare.pop("tp_size")} if "tp_size" in spare else {}
    kept = {name: value for name, value in params.items() if value is not None or name not in ("kvflow", "tp_size")}
    return {"kvflow": spare, **size, **kept, "remote_request_id": bare}
