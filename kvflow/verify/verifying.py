"""Verifying a load: its bytes, by digests, against those that the producer still holds under the lease.

Each rank that is read from is asked for the digests of what we read from it, named by layers and heads of the model
and tokens of the prompt; it computes while we read. Ours are computed after that, from the blocks that the load was
asked to fill. So what is compared is what both engines take for the same tokens, whatever the plan of the reads was.

The digests say nothing about freshness: the seals have done so before, and the lease has to be open still. If they
differ, the load reads and compares once more.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from kvflow.checks import counted
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.core.plan.topology import CacheShare, heads_held, kv_heads_of_model
from kvflow.core.protocol import messages
from kvflow.errors import ChecksumMismatch, PeerError, ProtocolError, TransferFailed
from kvflow.logs import logger_of
from kvflow.runtime.assembly import RegisteredCache
from kvflow.runtime.channel.protocol import Answered
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Load, Work
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.load.reader import Reader
from kvflow.runtime.load.requests import VERIFY, Verification
from kvflow.runtime.peers.peer import Source
from kvflow.verify.cache_digests import DigestedCache, Digesting, HeadSpan, TokenBlocks
from kvflow.verify.digests import DEFINITION
from kvflow.verify.lease_digests import DigestAnswers

logger = logger_of(__name__)


class LeaseEnded(Exception):
    """The producer does not hold the blocks any more: nobody can tell what was in them."""


class NotCompared(Exception):
    """Comparison without digests; `__cause__` is the peer's error, if it is the peer that has none."""


class _Compared(NamedTuple):
    """A part of a question for digests, and the blocks that our digest is computed from."""

    asked: messages.DigestPart
    ours: Digesting


def begin(cache: RegisteredCache) -> Verifying:
    """Return the part of a registration."""
    return Verifying(cache)


class Verifying:
    """Digests of one registration: its loads are compared by them, and readers that ask get them."""

    def __init__(self, cache: RegisteredCache) -> None:
        memory, copy_thread = cache.memory, cache.gear.copy_thread
        self._local = cache.local
        self._peers = cache.peers
        self.own = DigestedCache(memory.own, copy_thread, memory.device)
        """The engine's cache, which its loads fill."""
        self.shown = self.own
        """Memory that peers read: the cache or, with host staging, the host blocks."""
        if memory.staging:
            self.shown = DigestedCache(memory.shown, copy_thread)
        self.answers = DigestAnswers(cache, self.shown)

    @property
    def problem(self) -> str:
        """The reason why loads cannot be verified; "" if they can."""
        return self.own.problem

    def answer(self, question: messages.DigestRequest) -> Answered:
        """Answer a reader's question for digests of leased blocks."""
        return self.answers.answer(question)

    def verified(self, reader: Reader) -> Reader:
        """Return a reader that reads by another one, and compares."""
        return Verified(self, reader)

    @asynccontextmanager
    async def asking(
        self, request_id: str, reads: Sequence[Source], tables: Sequence[BlockIds]
    ) -> AsyncIterator[Comparison]:
        """Ask the ranks for their digests while the block reads from them, as far as their blocks are there already.

        `request_id` is the producer's. Questions that are not answered at the end of the block are given up.
        """
        async with AsyncExitStack() as stack:
            theirs = []
            for read in reads:
                parts = list(self._parts(read, tables))
                theirs.append(_Theirs(read, parts, partial(self._ask, request_id, read, parts)))
                stack.push_async_callback(theirs[-1].give_up)
            await asyncio.sleep(0)  # the questions are sent before the read is planned and posted
            yield Comparison(theirs, self._digests)

    async def _digests(self, asked: Sequence[Digesting]) -> list[int]:
        try:
            return await self.own.digests(asked)
        except Exception as error:  # noqa: BLE001 - of the memory, or of who computes on it
            raise NotCompared(f"no digests of our cache: {error}") from None

    async def _ask(self, request_id: str, read: Source, parts: Sequence[_Compared]) -> Sequence[int]:
        peer, lease = read.peer, read.lease
        question = messages.DigestRequest(
            reader=self._local.reader,
            target=peer.at.target,
            request_id=request_id,
            lease_id=lease.lease_id,
            definition=DEFINITION,
            parts=tuple(part.asked for part in parts),
        )
        try:
            reply = await self._peers.ask_digests(peer, question)
        except PeerError as error:
            raise NotCompared(str(error)) from error
        if isinstance(reply, messages.LeaseAnswer):
            raise LeaseEnded
        count = sum(len(part.asked.layers) for part in parts)
        if len(reply.values) != count:
            wrong = peer.at.failure(ProtocolError, f"{counted(len(reply.values), 'digest')}, expected {count}")
            raise NotCompared(str(wrong)) from wrong
        return reply.values

    def _parts(self, read: Source, tables: Sequence[BlockIds]) -> Iterator[_Compared]:
        """Parts that were read from one rank, for each pair of sets of layers."""
        for block_map in read.connection.block_maps:
            chunks = [some for its_map, some in read.chunks if its_map is block_map and len(some)]
            if chunks:
                yield self._part(read, block_map, chunks, tables)

    def _part(
        self, read: Source, block_map: BlockMap, chunks: Sequence[Chunks], tables: Sequence[BlockIds]
    ) -> _Compared:
        size = block_map.chunk_tokens
        start = min(some.first * size for some in chunks)
        stop = max((some.first + len(some) - 1) * size + some.tokens for some in chunks)
        mine = self._local.cache_shares[block_map.local_set]
        positions = [ours for ours, _ in block_map.places]
        layers = tuple(mine.layers[at] for at in positions)
        model_heads = kv_heads_of_model(mine, _their_share(read, mine, layers))
        head = heads_held(mine, model_heads).start + block_map.heads.local_start
        heads = HeadSpan(block_map.heads.local_start, block_map.heads.heads, head)
        blocks = TokenBlocks(tables[block_map.local_group], block_map.local.block.tokens, start, stop)
        asked = messages.DigestPart(
            part=mine.part,
            layers=layers,
            head=head,
            heads=heads.heads,
            model_heads=model_heads,
            start=start,
            stop=stop,
        )
        return _Compared(asked, Digesting(block_map.local_set, positions, heads, blocks))


class Verified:
    """Reads by another reader, and compares with what the producer holds. If it differs, does both once more."""

    def __init__(self, verifying: Verifying, reader: Reader) -> None:
        self._verifying = verifying
        self._reader = reader

    async def read(self, flight: Flight, load: Load, work: Work, plan: Plan) -> bool:
        """See `Reader`.

        Raises ChecksumMismatch, or why a load that has to be verified is not. Its blocks stay claimed all the time.
        """
        read = partial(self._reader.read, flight, load, work, plan)
        try:
            difference = await self._read_and_compare(work, read)
            work.verification = Verification.VERIFIED
            if difference:
                work.verification = Verification.MISMATCH
                logger.warning("load %s is read once more: %s", load.request_id, difference)
                for source in work.sources:
                    source.proof = source.proof.anew()
                difference = await self._read_and_compare(work, read)
                if difference:
                    why = f"what was read twice is not what is offered: {difference}"
                    raise work.failure(load, ChecksumMismatch, why)
                work.verification = Verification.REPAIRED
        except LeaseEnded:
            return False
        except NotCompared as problem:
            self._not_verified(load, work, problem)
        return True

    async def _read_and_compare(self, work: Work, read: Callable[[], Awaitable[bool]]) -> str:
        """Read, and give the difference in words, "" if there is none. Raises LeaseEnded or NotCompared afterwards."""
        async with self._verifying.asking(work.ticket.request_id, work.sources, work.tables) as comparison:
            work.enter("wire")
            if not await read():
                raise LeaseEnded
            work.enter(VERIFY)
            return await comparison.difference()

    def _not_verified(self, load: Load, work: Work, problem: NotCompared) -> None:
        """Note that a read could not be compared. Raises if the load must not go on without that."""
        if work.verification is Verification.MISMATCH:
            why = f"what was read is not what is offered, and then could not be compared: {problem}"
            raise work.failure(load, ChecksumMismatch, why) from problem
        work.verification = Verification.UNVERIFIED
        logger.info("load %s is not verified: %s", load.request_id, problem)
        if load.request.verify:
            if isinstance(problem.__cause__, PeerError):
                raise problem.__cause__ from None
            raise work.failure(load, TransferFailed, f"it cannot be verified: {problem}") from problem


class _Theirs:
    """The digests that one rank is asked for."""

    def __init__(
        self, read: Source, parts: Sequence[_Compared], ask: Callable[[], Coroutine[Any, Any, Sequence[int]]]
    ) -> None:
        self.read = read
        self.parts = parts
        self._ask = ask
        self._answer = None if read.proof.grows else asyncio.ensure_future(ask())

    async def digests(self) -> Sequence[int]:
        """Wait for the digests. If the lease grew during the read they are asked for now."""
        if self._answer is None:
            self._answer = asyncio.ensure_future(self._ask())
        return await self._answer

    async def give_up(self) -> None:
        if self._answer is not None:
            self._answer.cancel()
            await asyncio.gather(self._answer, return_exceptions=True)


class Comparison:
    """A load's blocks as it has read them, and as its producer holds them."""

    def __init__(
        self, theirs: Sequence[_Theirs], compute: Callable[[Sequence[Digesting]], Awaitable[list[int]]]
    ) -> None:
        self._theirs = theirs
        self._compute = compute

    async def difference(self) -> str:
        """Difference in words, "" if there is none. After the read. Raises LeaseEnded or NotCompared."""
        ours = [await self._compute([part.ours for part in one.parts]) for one in self._theirs]
        found = [
            _differences(one.read, one.parts, mine, await one.digests())
            for one, mine in zip(self._theirs, ours, strict=True)
        ]
        return "; ".join(text for text in found if text)


def _their_share(read: Source, mine: CacheShare, layers: Sequence[int]) -> CacheShare:
    """The producer's share that holds these layers."""
    shares = read.connection.cache_shares
    return next(one for one in shares if one.part == mine.part and set(layers) <= set(one.layers))


def _differences(read: Source, parts: Sequence[_Compared], ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Layers that differ, with the first one's digests."""
    named = [(part.asked, layer) for part in parts for layer in part.asked.layers]
    wrong = [at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
    if not wrong:
        return ""
    first = wrong[0]
    asked, layer = named[first]
    what = f"layer {layer}{asked.part and ' ' + asked.part}, tokens {asked.start} to {asked.stop}"
    digests = f"ours {ours[first]:016x}, theirs {theirs[first]:016x}"
    return f"{read.peer.label}: layers that differ: {len(wrong)} of {len(ours)}, the first: {what}: {digests}"
