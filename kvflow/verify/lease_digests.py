"""Translates a reader's request for digests into layers, heads and blocks of this rank."""

from __future__ import annotations

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.plan.topology import CacheShare, heads_held
from kvflow.core.protocol import codec
from kvflow.core.protocol.messages import REGIONS_MAX
from kvflow.core.protocol.ticket import Ticket
from kvflow.runtime.peers.peer import LocalRank
from kvflow.runtime.producer.lease import OpenLease
from kvflow.verify.cache_digests import DigestSpec
from kvflow.verify.digest_request import DIGEST_PARTS_MAX, DigestPart, DigestRequest
from kvflow.verify.digests import DIGEST_VERSION


def digest_specs_of(local: LocalRank, question: DigestRequest, found: OpenLease) -> list[DigestSpec]:
    """Return the layers, heads and blocks to digest for a reader's request: one DigestSpec for each DigestPart.

    `found`: the open lease that the request names. Raise WireError if the digest version differs, if the request is too
    large, or if this rank or the lease does not have the requested bytes.
    """
    if question.definition != DIGEST_VERSION:
        raise codec.WireError(f"digest version: ours {DIGEST_VERSION}, theirs {question.definition}")
    count = sum(len(part.layers) for part in question.parts)
    if not 0 < len(question.parts) <= DIGEST_PARTS_MAX or count > REGIONS_MAX:
        raise codec.WireError(f"digests: {counted(len(question.parts), 'part')} of {counted(count, 'layer')}")
    asked = []
    for part in question.parts:
        group = _share_of(local, part)[1].group
        ids = found.held.readable[group]
        asked.append(
            digest_spec_of(local, part, ids[: _blocks_up_to(local.groups[group], len(ids), found.ticket, part)])
        )
    return asked


def digest_spec_of(local: LocalRank, part: DigestPart, block_ids: BlockIds) -> DigestSpec:
    """Return the layers, heads and blocks of this rank to digest for one part of a request for digests.

    `block_ids`: blocks of this rank, in prompt order, up to the last token of `part`. Raise WireError if this rank does
    not have the layers or heads of `part`.
    """
    at, share = _share_of(local, part)
    if share.sharded:
        raise codec.WireError("digests: the tokens of this rank are sharded")
    heads = heads_held(share, part.model_heads) if part.model_heads > 0 else range(0)
    if len(heads) != share.kv_heads or not heads.start <= part.head < part.head + part.heads <= heads.stop:
        of = f"{part.head}+{part.heads} of the model's {part.model_heads}"
        raise codec.WireError(f"digests: heads {of}, this rank has {share.kv_heads}")
    first = part.head - heads.start
    return DigestSpec(
        layer_set=at,
        layers=[share.layers.index(layer) for layer in part.layers],
        heads=range(first, first + part.heads),
        model_head=part.head,
        block_ids=block_ids,
        block_size=local.groups[share.group].block_size,
        tokens=range(part.start, part.stop),
    )


def _share_of(local: LocalRank, part: DigestPart) -> tuple[int, CacheShare]:
    """Return (index, CacheShare) of the layer set of `local` that has all layers of `part`.

    The CacheShare says which layers and heads this rank holds. If no layer set has all the layers, raise WireError.
    """
    layers = set(part.layers)
    for at, share in enumerate(local.cache_shares):
        if share.part == part.part and layers <= set(share.layers) and len(layers) == len(part.layers) > 0:
            return at, share
    raise codec.WireError(f"digests: no layer set of this rank has all layers of {sorted(layers)[:6]}")


def _blocks_up_to(group: GroupFacts, blocks: int, ticket: Ticket, part: DigestPart) -> int:
    """Return how many of a lease's first blocks are needed to reach the last token of `part`.

    `blocks`: number of the lease's blocks in `group`. Raise WireError if the lease does not have all tokens of `part`.
    """
    size = group.block_size
    tokens = ticket.offered_tokens if ticket.groups else ticket.num_tokens
    last = -(-tokens // size)
    if group.whole:
        last, tokens = blocks, min(tokens, blocks * size)
    first = last - blocks
    if not first * size <= part.start < part.stop <= tokens:
        had = f"{first * size} to {tokens}"
        raise codec.WireError(f"digests: tokens {part.start} to {part.stop}, the lease has {had}")
    return -(-part.stop // size) - first
