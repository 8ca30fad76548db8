"""Plan of one load, from tables of block ids to chunks of tokens: which offered blocks go where. Pure.

Every rank of an engine holds the same prompt in the same blocks. So blocks are matched once for each pair of groups of
layers; then each rank's own block ids are put in. Nothing is believed that was not checked against the registered
caches (invariant I8). `whole` plans loads of a few whole blocks of one rank itself, in one go.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks, check_block_ids, match_chunks
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from kvflow.runtime.peers.peer import Source

Matched: TypeAlias = Mapping[tuple[int, int], tuple[Chunks, ...]]
"""Chunks by (our group, theirs), with positions among the offered blocks in place of block ids."""


class Plan(NamedTuple):
    """Tokens and blocks that a load reads. The `chunks` and `tables` of its sources are set."""

    sources: Sequence[Source]
    """The ranks that are read from."""
    matched: Matched
    tokens: int
    """Tokens of the prompt that are read."""
    few: Sequence[tuple[int, int]] = ()
    """Pairs (their block, ours) of a load of a few blocks; `matched` and `chunks` are empty then."""


def planned(
    what: str, ticket: Ticket, tables: Sequence[BlockIds], groups: Sequence[GroupFacts], sources: Sequence[Source]
) -> Plan:
    """The plan of a load into `tables`, by group. RequestError if blocks, theirs and ours, do not go together."""
    matched: dict[tuple[int, int], tuple[Chunks, ...]] = {}
    read_from, tokens = [], 0
    for source in sources:
        wanted = False
        for block_map in source.connection.block_maps:
            found = matched.get(block_map.of_groups)
            if found is None:
                found = matched[block_map.of_groups] = _match(what, ticket, tables, groups, block_map, source)
                count = 0
                for some in found:
                    count += len(some.local_ids) * some.tokens
                tokens = max(tokens, count)
            wanted = wanted or len(found) > 0
        if wanted:
            source.tables = known_so_far(ticket, source)
            for block_map in source.connection.block_maps:
                for some in matched[block_map.of_groups]:
                    source.chunks.append((block_map, some.locate(source.tables[block_map.remote_group])))
            read_from.append(source)
    return Plan(read_from, matched, tokens)


def known_so_far(ticket: Ticket, source: Source) -> list[BlockIds]:
    """A rank's blocks, by group, with -1 for those that are not known yet. RequestError if they cannot be right."""
    what = f"request {ticket.request_id!r}: remote_block_ids of {ticket.engine_id!r}"
    given = ticket.block_tables if source.lease.block_ids is None else source.lease.block_tables
    tables = []
    for ids, count in zip(given, source.connection.num_blocks, strict=True):
        tables.append(check_block_ids(ids, num_blocks=count, what=what))
    if ticket.extends:
        for at, total in enumerate(ticket.block_counts):
            if total > source.connection.num_blocks[at]:
                raise RequestError(
                    f"{what}: {counted(total, 'block')} in the end, but there are {source.connection.num_blocks[at]}"
                )
            tables[at] = np.concatenate((tables[at], np.full(total - len(tables[at]), -1, dtype=np.int64)))
    return tables


def _match(
    what: str,
    ticket: Ticket,
    tables: Sequence[BlockIds],
    groups: Sequence[GroupFacts],
    block_map: BlockMap,
    source: Source,
) -> tuple[Chunks, ...]:
    """Chunks of one of their groups that go to one of ours. RequestError if they do not go together."""
    ours, theirs = block_map.of_groups
    whole = source.connection.whole[theirs]
    tokens = ticket.offered_tokens if ticket.groups else ticket.num_tokens
    given = ticket.block_tables if source.lease.block_ids is None else source.lease.block_tables
    return match_chunks(
        tables[ours],
        ticket.block_counts[theirs] if ticket.extends else len(given[theirs]),
        local_block_size=block_map.local.block.tokens,
        remote_block_size=block_map.remote.block.tokens,
        num_tokens=tokens,
        needed_from=0 if whole else groups[ours].first_needed(tokens),
        whole=whole,
        what=what,
    )
