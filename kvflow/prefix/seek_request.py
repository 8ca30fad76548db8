"""The side-channel message that asks a rank for a prefix. The reply is a `LeaseAnswer`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvflow.checks import built
from kvflow.core.bounds import RequestName, Size, Weights
from kvflow.core.protocol import messages
from kvflow.prefix.keys import KEY_BYTES

KEYS_MAX = 1 << 10
"""Maximum number of keys in a `SeekRequest`, so that the peer's event loop can answer in a short time."""
REQUEST_ID_PREFIX = "kvflow-prefix/"
"""Text with which the request id of each prefix lease begins. No engine's request id begins with this text."""


@built
class SeekRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="seek"):
    """Message that asks a rank for the longest beginning of a prefix in its cache.

    The reply offers a lease on this beginning.
    """

    request_id: RequestName
    """Request id of the wanted lease, without `REQUEST_ID_PREFIX`; the same for all ranks of an engine."""
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]
    """Keys of the prefix, 32 bytes each, concatenated. Key i covers the first (i + 1) * `key_tokens` tokens."""
    key_tokens: Size
    alone: bool = True
    """True if exactly one reader rank will read the offered blocks."""
    weights: Weights = ""
    """Version of the reader's weights. A rank with other weights has no such prefix."""
