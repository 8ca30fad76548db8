"""The message that asks a peer for a prefix; the peer replies with a `LeaseAnswer`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvflow.core.bounds import RequestName, Size
from kvflow.core.protocol import messages
from kvflow.prefix.keys import KEY_BYTES

KEYS_MAX = 1 << 10
"""Maximum number of keys in one question, so that a peer answers it in one short turn of its event loop."""
LEASE_ID_PREFIX = "kvflow-prefix/"
"""First characters of the request id of each lease on a prefix, so that it differs from every engine's own request."""


class SeekRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="seek"):
    """Asks a rank for the longest beginning of a prefix that is in its cache now. The reply leases these blocks."""

    request_id: RequestName
    """Request id of the wanted lease, without `LEASE_ID_PREFIX`. All ranks of an engine are asked with the same id."""
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]
    """Keys of the prefix, 32 bytes each, concatenated. Key i covers the first (i + 1) * `key_tokens` tokens."""
    key_tokens: Size
    alone: bool = True
    """True if exactly one reader rank will read the offer."""
