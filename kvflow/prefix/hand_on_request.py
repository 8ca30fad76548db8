"""The side-channel messages with which an engine hands its prefixes on to its successor.

The leaving rank sends one `HandOnRequest`. The successor then asks the leaving rank for the keys of each prefix, one
`HandedOnKeysRequest` after the other, pulls the prefix, and answers the `HandOnRequest` at the end.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvflow.checks import built
from kvflow.core.bounds import Count, Reason, RequestName, Size, Wait
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.prefix.keys import KEY_BYTES

HANDED_ON_KEYS_MAX = 1 << 16
"""Maximum number of keys of one prefix that is handed on. 2 MiB fit into an answer of the side channel."""
HANDED_ON_PREFIXES_MAX = 1 << 16


class HandedOn(messages.PartReply, frozen=True, kw_only=True, tag="handed_on"):
    """The answer to a `HandOnRequest`: what the successor has pulled in the end."""

    prefixes: Count
    """Number of prefixes that the successor has considered."""
    tokens: Count
    size_bytes: Count
    reason: Reason = ""
    """Why the successor has not considered all prefixes; "" if it has."""


@built
class HandOnRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="hand_on"):
    """Offer of a leaving engine's most recently used prefixes to its successor. The answer is `HandedOn`."""

    hand_on_id: RequestName
    """Secret that names the offer. Who knows it may ask for the keys."""
    sender: Address
    """The leaving rank, which the successor asks for the keys, and reads from."""
    prefixes: Annotated[int, Meta(ge=0, le=HANDED_ON_PREFIXES_MAX)]
    bytes_max: Count
    within_s: Wait
    replies = codec.replies_with(HandedOn)


class HandedOnKeys(messages.PartReply, frozen=True, kw_only=True, tag="handed_on_keys"):
    """The answer to a `HandedOnKeysRequest`."""

    keys: Annotated[bytes, Meta(max_length=KEY_BYTES * HANDED_ON_KEYS_MAX)]
    """Keys of the prefix, 32 bytes each, concatenated. Key i covers the first (i + 1) * `key_tokens` tokens."""
    key_tokens: Size


@built
class HandedOnKeysRequest(messages.ReaderRequest, frozen=True, kw_only=True, tag="get_handed_on_keys"):
    """Question of a successor for the keys of one prefix of an offer. The answer is `HandedOnKeys`."""

    hand_on_id: RequestName
    index: Count
    """Index of the prefix; 0 is the most recently used one."""
    replies = codec.replies_with(HandedOnKeys)
