"""The side-channel messages that ask a rank for digests of leased blocks, and that bring the digests."""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec
from msgspec import Meta

from kvflow.checks import built
from kvflow.core.bounds import Count, Fact, Layers, LeaseId, RequestName
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.messages import PartReply, ReaderRequest

DIGEST_PARTS_MAX = 1 << 12

Word64: TypeAlias = Annotated[int, Meta(ge=0)]
"""Unsigned 64-bit number. MessagePack has no larger numbers, so no upper bound is needed."""


class Digests(PartReply, frozen=True, kw_only=True, tag="digests"):
    """The answer to a `DigestRequest`: one digest per layer of the first `DigestPart`, then of the next, and so on.

    The lease was still open when the last digest had been computed.
    """

    values: Annotated[tuple[Word64, ...], Meta(max_length=messages.REGIONS_MAX)]


class DigestPart(msgspec.Struct, frozen=True, array_like=True):
    """Layers, heads and tokens to compute digests of. Indices of layers and heads are those of the whole model;
    positions count from the start of the prompt.
    """

    part: Fact
    """Name of a segment of state per request; "" for the KV cache."""
    layers: Layers
    head: Count
    heads: Count
    model_heads: Count
    """Number of heads of the whole model, from which a rank computes which of the heads it holds."""
    start: Count
    stop: Count
    """Position after the last token."""


DigestParts: TypeAlias = Annotated[tuple[DigestPart, ...], Meta(max_length=DIGEST_PARTS_MAX)]


@built
class DigestRequest(ReaderRequest, frozen=True, kw_only=True, tag="get_digests"):
    """Ask for digests of the bytes of an open lease (`verify.digests`). The answer is `Digests`."""

    request_id: RequestName
    lease_id: LeaseId
    definition: Count
    """Version of the algorithm with which the reader computes digests."""
    parts: DigestParts
    replies = codec.replies_with(Digests)


REQUEST = DigestRequest
