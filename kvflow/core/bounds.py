"""Bounds of the fields of messages and tickets. Decoding checks them, so no code ever handles a value out of bounds.

No kvflow peer sends a value out of bounds, whatever cache the peer has. The code that uses a value checks it against
the cache in question. A test checks that every field of every message has a bound.
"""

from __future__ import annotations

import math
import re
from typing import Annotated, TypeAlias

from msgspec import Meta

from kvflow import checks, config, limits
from kvflow.checks import INT64_MAX
from kvflow.config import RANKS_MAX
from kvflow.core.cache.tensors import LAYERS_MAX, NAME_CHARS_MAX
from kvflow.hosts import HOST_CHARS_MAX
from kvflow.limits import REQUEST_ID_CHARS_MAX, SEALS_MAX, WAIT_S_MAX

READER_CHARS_MAX = 4096
FACT_CHARS_MAX = 1 << 14
REASON_CHARS_MAX = 4096
INCARNATION_CHARS_MAX = 256
LEASE_ID_CHARS = 32
NO_LEASE_ID = "0" * LEASE_ID_CHARS  # lease id that a wiped seal shows
OFFER_PART_CHARS = 8
WEIGHTS_CHARS_MAX = 128
TRACEPARENT = r"\A(?:[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2})?\Z"
"""Pattern of a W3C trace context (version, trace id, span id and flags), or of an empty string."""
_TRACE_CONTEXT = re.compile(
    r"(?!ff)([0-9a-f]{2})-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL
)
ENTRIES_MAX = 1 << 24
"""Maximum number of block ids in one block table."""
_FINITE_MAX = math.nextafter(math.inf, 0.0)

Count: TypeAlias = checks.Count
Missing: TypeAlias = Annotated[int, Meta(ge=-1, le=INT64_MAX)]
"""Number of tokens that cannot be read yet; -1 if no number is given."""
Size: TypeAlias = checks.Size
RankCount: TypeAlias = config.RankCount
RankIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=RANKS_MAX)]
LayerIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=LAYERS_MAX)]
SealCount: TypeAlias = limits.SealCount
SealAddress: TypeAlias = Annotated[int, Meta(ge=1, le=INT64_MAX - 16 * SEALS_MAX)]
"""Address of a table of 16-byte seals. The bound keeps the table's end below 2**63."""
DeviceIndex: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 16)]
Word32: TypeAlias = Annotated[int, Meta(ge=0, lt=1 << 32)]

Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=_FINITE_MAX)]
Wait: TypeAlias = Annotated[float, Meta(ge=0, le=WAIT_S_MAX)]
Hold: TypeAlias = limits.SealHold

Name: TypeAlias = Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
Reader: TypeAlias = Annotated[str, Meta(max_length=READER_CHARS_MAX)]
Fact: TypeAlias = Annotated[str, Meta(max_length=FACT_CHARS_MAX)]
Reason: TypeAlias = Annotated[str, Meta(max_length=REASON_CHARS_MAX)]
RequestName: TypeAlias = Annotated[str, Meta(max_length=REQUEST_ID_CHARS_MAX)]
NetAddress: TypeAlias = Annotated[str, Meta(max_length=HOST_CHARS_MAX + len("tcp://:65535"))]
Incarnation: TypeAlias = Annotated[str, Meta(max_length=INCARNATION_CHARS_MAX, pattern=r"\A[!-~]+\Z")]
PromptDigest: TypeAlias = Annotated[
    str, Meta(max_length=32 + 8 * 34, pattern=r"\A(?:[0-9a-f]{32}(?::[a-z_]{1,16}=[0-9a-f]{16}){0,8})?\Z")
]
"""Digest of a prompt's tokens and, if it has them, of its adapter, pictures and salt (`core.protocol.prompts`). "" if
the producer gives no digest."""
LeaseId: TypeAlias = Annotated[str, Meta(max_length=LEASE_ID_CHARS)]
"""Lease id as readers send it. Any text is accepted, since an unknown id matches no lease."""
TicketLeaseId: TypeAlias = Annotated[
    str, Meta(max_length=LEASE_ID_CHARS, pattern=rf"\A(?:(?!0{{{LEASE_ID_CHARS}}})[0-9a-f]{{{LEASE_ID_CHARS}}})?\Z")
]
"""Lease id in a ticket: the bytes of the lease's seal as hexadecimal digits, not all 0; "" if readers have to ask the
rank for its lease."""
Traceparent: TypeAlias = Annotated[str, Meta(pattern=TRACEPARENT)]
Weights: TypeAlias = Annotated[str, Meta(max_length=WEIGHTS_CHARS_MAX)]
"""Version of an engine's weights (`Runtime.set_weights`); "" for the weights that the engine began with."""


def read_traceparent(value: object, what: str = "traceparent") -> str:
    """Return the trace context in a `traceparent` header, as one of version 00; "" if the header is to be ignored.

    Headers come from clients, so no text is an error. As W3C says, a header that does not parse is ignored, and a later
    version is read by its first four fields. None is no header. RequestError if `value` is neither a text nor None.
    """
    header = "" if value is None else checks.instance(value, str, what)
    parsed = _TRACE_CONTEXT.fullmatch(str.strip(header, " \t"))
    if parsed is None or (parsed[1] == "00" and parsed[5]):
        return ""
    flags = parsed[4] if parsed[1] == "00" else f"{int(parsed[4], 16) & 1:02x}"  # others may mean something else
    return f"00-{parsed[2]}-{parsed[3]}-{flags}"


GivenTraceparent: TypeAlias = Annotated[str | None, read_traceparent]

Digest: TypeAlias = Annotated[bytes, Meta(max_length=64)]
BlockIds: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=ENTRIES_MAX)]
Layers: TypeAlias = Annotated[tuple[LayerIndex, ...], Meta(max_length=LAYERS_MAX)]
