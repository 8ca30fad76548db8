"""Digests of leased blocks, for readers that compare what they have read (`verify.digests`).

A question names a lease by its secret, so its reader has the ticket. The digests are computed on the copy thread, piece
by piece. The answer is given if the lease is still open afterwards: then its blocks were the lease's all the time.
Questions are bounded in all and for one reader; those beyond are refused for now.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from functools import partial

from kvflow.checks import counted
from kvflow.core.cache.groups import GroupFacts
from kvflow.core.plan.descriptors import BlockIds
from kvflow.core.plan.topology import CacheShare, heads_held
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RuntimeClosed
from kvflow.logs import logger_of
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.producer.open_lease import OpenLease
from kvflow.verify.cache_digests import DigestedCache, Digesting
from kvflow.verify.digests import DEFINITION

logger = logger_of(__name__)

OF_READER_MAX = 8
"""Digest requests of one reader that are answered at once."""


class DigestAnswers:
    """Answers questions for digests of one rank's leased blocks."""

    def __init__(self, cache: RegisteredCache, shown: DigestedCache) -> None:
        """`shown`: memory that peers read."""
        self._limits = cache.config.limits
        self._spawn = cache.spawn
        self._local = cache.local
        self._known = cache.serving.known
        self._counts = cache.serving.digests
        self._shown = shown
        self._under_way: Counter[str] = Counter()
        """Questions under way, by reader."""

    def answer(self, question: messages.DigestRequest) -> Answered:
        """The digests that a reader asks for, promised; or at once why there are none."""
        reader, limits = question.reader, self._limits
        found = self._known(question.lease_id, question.request_id)
        if found is None:
            return self._refused(messages.LeaseAnswer(state=messages.Told.ENDED))
        held = found.held
        if held.missing and any(part.stop > held.num_tokens - held.missing for part in question.parts):
            return self._refused(refusal("its blocks are not there yet", transient=True))
        try:
            asked = self._understood(question, found)
        except codec.WireError as error:
            return self._refused(refusal(str(error)))
        if self._under_way.total() >= limits.digests_max or self._under_way[reader] >= OF_READER_MAX:
            return self._refused(refusal("too many digests are asked for at once", transient=True))
        reply: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        try:
            task = self._spawn(self._compute(question, asked, reply), name=f"kvflow-digest {question.request_id}")
        except RuntimeClosed as error:
            return self._refused(refusal(str(error), transient=True))
        self._under_way[reader] += 1
        task.add_done_callback(partial(self._ended, reader, reply))
        return reply

    def _refused(self, reply: messages.Reply) -> messages.Reply:
        self._counts["digests_refused"] += 1
        return reply

    async def _compute(
        self, question: messages.DigestRequest, asked: Sequence[Digesting], reply: asyncio.Future[messages.Reply]
    ) -> None:
        """Body of a question's task.

        Task `kvflow-digest <request>`: begun by a reader's question for digests of leased blocks;
        `limits.digests_max` at once. Ends when they are computed. If it fails the question is refused.
        """
        try:
            values = await self._shown.digests(asked)
        except Exception as error:  # noqa: BLE001 - of the memory: a reader's question must not end the runtime
            logger.warning("request %s: no digests of its blocks: %s", question.request_id, error)
            reply.set_result(self._refused(refusal(f"no digests: {error}")))
            return
        if self._known(question.lease_id, question.request_id) is None:
            reply.set_result(self._refused(messages.LeaseAnswer(state=messages.Told.ENDED)))
        else:
            self._counts["digests"] += 1
            reply.set_result(messages.Digests(values=tuple(values)))

    def _ended(self, reader: str, reply: asyncio.Future[messages.Reply], _: asyncio.Task[None]) -> None:
        """End a question whose task is over, perhaps cancelled before its first step."""
        self._under_way -= Counter((reader,))
        if not reply.done():
            reply.set_result(self._refused(refusal("the engine closes", transient=True)))

    def _understood(self, question: messages.DigestRequest, found: OpenLease) -> list[Digesting]:
        """The digests to compute. WireError if they are of nothing that this rank, or the lease, has."""
        if question.definition != DEFINITION:
            raise codec.WireError(f"digests: ours are of definition {DEFINITION}, theirs {question.definition}")
        count = sum(len(part.layers) for part in question.parts)
        if not 0 < len(question.parts) <= messages.DIGEST_PARTS_MAX or count > messages.REGIONS_MAX:
            raise codec.WireError(f"digests: {counted(len(question.parts), 'part')} of {counted(count, 'layer')}")
        return [self._understood_part(part, found.ticket, found.held.readable) for part in question.parts]

    def _understood_part(self, part: messages.DigestPart, ticket: Ticket, tables: Sequence[BlockIds]) -> Digesting:
        at, share = self._share_of(part)
        heads = heads_held(share, part.model_heads) if part.model_heads > 0 else range(0)
        if len(heads) != share.kv_heads or not heads.start <= part.head < part.head + part.heads <= heads.stop:
            of = f"{part.head}+{part.heads} of the model's {part.model_heads}"
            raise codec.WireError(f"digests: heads {of}, this rank has {share.kv_heads}")
        group, ids = self._local.groups[share.group], tables[share.group]
        first = part.head - heads.start
        return Digesting(
            layer_set=at,
            layers=[share.layers.index(layer) for layer in part.layers],
            heads=range(first, first + part.heads),
            model_head=part.head,
            block_ids=ids[: offered_blocks(group, len(ids), ticket, part)],
            block_size=group.block_size,
            tokens=range(part.start, part.stop),
        )

    def _share_of(self, part: messages.DigestPart) -> tuple[int, CacheShare]:
        """Find the set that has all these layers."""
        layers = set(part.layers)
        for at, share in enumerate(self._local.cache_shares):
            if share.part == part.part and layers <= set(share.layers) and len(layers) == len(part.layers) > 0:
                return at, share
        raise codec.WireError(f"digests: no layers of this rank look alike that are {sorted(layers)[:6]}")


def offered_blocks(group: GroupFacts, blocks: int, ticket: Ticket, part: messages.DigestPart) -> int:
    """Return how many of a lease's blocks of a group hold these tokens. WireError if not all tokens are there."""
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
