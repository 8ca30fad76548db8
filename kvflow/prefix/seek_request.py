"""The message of this part: the question for a prefix. The answer is a `LeaseAnswer`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvflow.core.bounds import RequestName, Size
from kvflow.core.protocol import messages
from kvflow.prefix.keys import KEY_BYTES

KEYS_MAX = 1 << 10
"""Keys of a prefix in one question: few enough to be answered in one short turn of the loop."""
PREFIX_OF = "kvflow-prefix/"
"""Beginning of the names of leases of prefixes: no reader can take the name of an engine's own request."""


class SeekRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="seek"):
    """Question for the longest beginning of a prefix that is in the cache now: a `LeaseAnswer` offers it."""

    request_id: RequestName
    """Name of the lease that the reader gets, with `PREFIX_OF` before it; the same at every rank of an engine."""
    keys: Annotated[bytes, Meta(min_length=KEY_BYTES, max_length=KEY_BYTES * KEYS_MAX)]
    """See `prefix.keys`: number i is that of the first (i + 1) * `key_tokens` tokens."""
    key_tokens: Size
    alone: bool = True
    """True if nobody but this rank is to read what is offered."""
