"""The message of this part: the question for a prefix, answered by a `LeaseAnswer`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvflow.core.bounds import RequestName, Size
from kvflow.core.protocol import messages
from kvflow.prefix.keys import KEY_BYTES

KEYS_MAX = 1 << 10
"""Most keys in one question: few enough to be answered in one short turn of the loop."""
PREFIX_OF = "kvflow-prefix/"
"""Beginning of the request ids of prefix leases: a reader cannot use the request id of an engine's own request."""


class SeekRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="seek"):
    """Question for the longest beginning of a prefix that is in the cache now. A `LeaseAnswer` offers it."""

    request_id: RequestName
    """Request id of the lease, without `PREFIX_OF`; the same at every rank of an engine."""
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]
    """Keys of the prefix in a row: key i is of the first (i + 1) * `key_tokens` tokens. See `prefix.keys`."""
    key_tokens: Size
    alone: bool = True
    """True if exactly one reader rank will read the offer."""
