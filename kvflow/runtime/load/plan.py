"""Plan a load: check that the request fits its offer, and decide which offered block goes to which local block.

No I/O, no clock; the only effect is that `plan_load` sets `chunks` and `tables` of the sources that are read.

Every rank of an engine holds the same prompt in the same blocks. So blocks are matched once for each pair of a local
and a remote group of layers, as chunks of tokens (`Chunks`), and then the block ids of each rank are filled in. If the
producer's tokens are sharded, each of its ranks has chunks of its own. All block ids from outside are checked against
the registered caches before they are used (invariant I8). `steps` has a faster planner for a few whole blocks from one
rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvflow.checks import count, counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, check_block_ids, match_chunks
from kvflow.core.plan.room import check_blocks_match, check_not_beyond
from kvflow.core.protocol.prompts import check_prompt
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import PromptMismatch, RequestError
from kvflow.runtime.load.requests import LoadRequest
from kvflow.runtime.peers.peer import Source

MatchedChunks: TypeAlias = Mapping[tuple[int, int, int], tuple[Chunks, ...]]
"""Chunks to read, keyed by `BlockMap.match_key`. Their `remote_ids` hold positions in the offered block table in place
of block ids. The positions are the same for all producer ranks, unlike the block ids."""


class Plan(NamedTuple):
    """The ranks, tokens and blocks that a load reads.

    `plan_load` not only returns a plan, but also sets the attributes `chunks` and `tables` of each source.
    """

    sources: Sequence[Source]
    matched: MatchedChunks
    tokens: int
    block_pairs: Sequence[tuple[int, int]] = ()
    """Pairs (remote block id, local block id) to read. Only the plan of a load of a few blocks has pairs; its `matched`
    is empty."""


def plan_load(
    what: str, ticket: Ticket, tables: Sequence[BlockIds], groups: Sequence[GroupFacts], sources: Sequence[Source]
) -> Plan:
    """Return the plan of a load from `sources` into `tables`, the local blocks of each group.

    `what` names the request in errors. RequestError if the offered blocks and the local blocks do not match.
    """
    matched: dict[tuple[int, int, int], tuple[Chunks, ...]] = {}
    filled: dict[tuple[int, int], int] = {}
    read_from = []
    for source in sources:
        wanted = False
        for block_map in source.connection.block_maps:
            chunks = matched.get(block_map.match_key)
            if chunks is None:
                chunks = matched[block_map.match_key] = _match_blocks(what, ticket, tables, groups, block_map, source)
                tokens = filled.get(block_map.group_pair, 0)
                for some in chunks:
                    tokens += len(some.local_ids) * some.tokens
                filled[block_map.group_pair] = tokens
            wanted = wanted or len(chunks) > 0
        if wanted:
            source.tables = remote_tables(ticket, source)
            for block_map in source.connection.block_maps:
                if chunks := matched[block_map.match_key]:
                    table = source.tables[block_map.remote_group]
                    source.chunks[block_map] = [some.locate(table) for some in chunks]
            read_from.append(source)
    return Plan(read_from, matched, max(filled.values(), default=0))


def remote_tables(ticket: Ticket, source: Source) -> list[BlockIds]:
    """Return the block ids of the lease of `source`, one array for each remote group; -1 stands for ids not known yet.

    RequestError if an id is invalid.
    """
    what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
    offered = ticket.block_tables if source.lease.block_ids is None else source.lease.block_tables
    tables = []
    for ids, num_blocks in zip(offered, source.connection.num_blocks, strict=True):
        tables.append(check_block_ids(ids, num_blocks=num_blocks, what=what))
    if ticket.extends:
        for group, total in enumerate(ticket.block_counts):
            if total > source.connection.num_blocks[group]:
                raise RequestError(
                    f"{what}: {counted(total, 'block')} in the end, but there are {source.connection.num_blocks[group]}"
                )
            tables[group] = np.concatenate((tables[group], np.full(total - len(tables[group]), -1, dtype=np.int64)))
    return tables


def _match_blocks(
    what: str,
    ticket: Ticket,
    tables: Sequence[BlockIds],
    groups: Sequence[GroupFacts],
    block_map: BlockMap,
    source: Source,
) -> tuple[Chunks, ...]:
    """Match the offered blocks of a remote group with the blocks of a local group. Return the chunks to read.

    `block_map.group_pair` has the indexes of both groups. RequestError if the blocks do not match.
    """
    local_group, remote_group = block_map.group_pair
    whole = source.connection.whole[remote_group]
    tokens = ticket.offered_tokens if ticket.groups else ticket.num_tokens
    offered = ticket.block_tables if source.lease.block_ids is None else source.lease.block_tables
    return match_chunks(
        tables[local_group],
        ticket.block_counts[remote_group] if ticket.extends else len(offered[remote_group]),
        local_block_size=block_map.local.block.tokens,
        remote_block_size=block_map.remote.block.tokens,
        num_tokens=tokens,
        needed_from=0 if whole else groups[local_group].first_needed(tokens),
        whole=whole,
        local_shard=block_map.local_shard,
        remote_shard=block_map.remote_shard,
        what=what,
    )


def check_against_ticket(
    groups: Sequence[GroupFacts], request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]
) -> None:
    """Check a request against the offer of `ticket`, as far as the offer is known. `tables`: the local blocks by group.

    PromptMismatch if the offer is for another prompt or number of tokens. RequestError if the local blocks do not fit
    the offered tokens exactly, or go beyond the prompt.
    """
    what = f"request {request.request_id!r}"
    if not ticket.awaited:
        _check_offer(ticket, request)
        check_blocks_fit(groups, request, ticket, tables)
    elif request.prompt is not None:
        tokens = count(request.prompt, f"{what}: prompt")
        check_not_beyond(
            groups, tables, request.cached_tokens, tokens, what, f"the {counted(tokens, 'token')} of its prompt"
        )


def check_awaited_offer(
    groups: Sequence[GroupFacts], request: LoadRequest, ticket: Ticket, tables: Sequence[BlockIds]
) -> None:
    """Check a request against an offer for which the load has waited; `ticket` is the ticket of that offer.

    If the request has neither `prompt` nor `num_tokens`, nothing is checked. PromptMismatch if the offer is for another
    prompt or number of tokens. The last local block has to be that of the last offered token; if it is not, the error
    is PromptMismatch for a request with a prompt, and RequestError for others.
    """
    if request.prompt is not None or request.num_tokens is not None:
        _check_offer(ticket, request)
        check_blocks_fit(groups, request, ticket, tables, RequestError if request.prompt is None else PromptMismatch)


def check_blocks_fit(
    groups: Sequence[GroupFacts],
    request: LoadRequest,
    ticket: Ticket,
    tables: Sequence[BlockIds],
    kind: type[RequestError] = RequestError,
) -> None:
    """Raise `kind` unless the local blocks, `tables`, are exactly those for the offered tokens that are not cached.

    Do nothing if there are no local blocks.
    """
    expected_tokens = request.num_tokens
    if expected_tokens is None and request.prompt is not None:
        expected_tokens = len(request.prompt)
    check_blocks_match(
        groups,
        tables,
        request.cached_tokens,
        ticket.offered_tokens,
        expected_tokens=expected_tokens,
        what=f"request {request.request_id!r}",
        producer=_producer_text(ticket),
        kind=kind,
    )


def _check_offer(ticket: Ticket, request: LoadRequest) -> None:
    """Raise PromptMismatch if the prompt or the number of tokens that the ticket offers differs from the request's.

    A value is compared only if both the ticket and the request have it.
    """
    what, offers = f"request {request.request_id!r}", f"{_producer_text(ticket)} offers {ticket.offered_tokens}"
    if request.prompt is not None:
        check_prompt(ticket, request.prompt, what)
        if len(request.prompt) < ticket.offered_tokens:
            raise PromptMismatch(f"{what}: its prompt has {counted(len(request.prompt), 'token')}, {offers}")
    if request.num_tokens is not None and request.num_tokens != ticket.offered_tokens:
        raise PromptMismatch(f"{what}: expected {counted(request.num_tokens, 'token')}, {offers}")


def _producer_text(ticket: Ticket) -> str:
    return f"{ticket.engine_id!r} at {ticket.address}"
