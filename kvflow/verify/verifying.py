"""Verification of a load: digests of the loaded bytes are compared with the producer's digests of the same bytes.

The reader asks each rank for digests of the bytes that it reads, named by layers and heads of the model and by tokens
of the prompt. The rank computes the digests during the read. The local digests are those of the blocks that the request
wants filled: of each span of blocks once it has landed, or of all blocks after the read. So each engine itself finds
the blocks of these tokens, and a mistake in the plan of the reads is found, too.

Freshness is proven by the seals, not by digests. If digests differ, the load reads and compares once more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias
from weakref import WeakKeyDictionary

from kvflow.checks import counted
from kvflow.core.plan.block_map import BlockMap
from kvflow.core.plan.descriptors import BlockIds, Chunks
from kvflow.core.plan.topology import CacheShare, heads_held, kv_heads_of_model
from kvflow.core.protocol import codec, messages
from kvflow.errors import ChecksumMismatch, PeerError, ProtocolError, RuntimeClosed, TransferFailed
from kvflow.logs import logger_of
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.load.flight import Flight
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.plan import Plan
from kvflow.runtime.load.reads import direct_reads
from kvflow.runtime.load.requests import VERIFY, Verification
from kvflow.runtime.optional import ReadBlocks, Verify
from kvflow.runtime.part import PartHost
from kvflow.runtime.peers.peer import LocalRank, Peer, Source
from kvflow.verify.cache_digests import DigestedCache, DigestSpec
from kvflow.verify.digest_request import DigestPart, DigestRequest, Digests
from kvflow.verify.digests import DIGEST_VERSION
from kvflow.verify.landed_digests import LandedDigests
from kvflow.verify.lease_digests import digest_spec_of, digest_specs_of

logger = logger_of(__name__)

REQUESTS_OF_READER_MAX = 8
"""Maximum number of requests for digests from one reader that are answered at the same time."""

_ASKED_AT_ONCE_MAX = REQUESTS_OF_READER_MAX // 2  # leaves room for the reader's earlier questions

PartToCompare: TypeAlias = tuple[DigestPart, DigestSpec]
"""One part of a request for digests, as sent to the producer, and the local layers, heads and blocks that must have the
same digests.
"""
PartsToCompare: TypeAlias = Mapping[BlockMap, PartToCompare]
"""The parts to compare with one rank, one for each pair of a local and a remote layer set that the load reads."""


class NotCompared(Exception):
    """Raised if the digests of a load cannot be compared with the producer's.

    If the producer gave no digests, `__cause__` is the error of the request for digests.
    """


def begin(host: PartHost) -> Verify:
    """Return the object that verifies loads into the registered cache of `host`."""
    return LoadVerifier(host)


class LoadVerifier:
    """Verifies loads into one registered cache by digests, and answers the digest requests of readers."""

    def __init__(self, host: PartHost) -> None:
        memory, copy_thread = host.memory, host.resources.copy_thread
        self._local = host.context.local
        self._peers = host.peers
        self._limits = host.context.config.limits
        self._spawn = host.context.spawn
        self._find_lease = host.serving.find_lease
        self._counts = host.serving.part_counts
        self._rooms = WeakKeyDictionary[Peer, asyncio.Semaphore]()
        """Semaphores that limit concurrent questions for digests to a peer, which cost the peer much time."""
        self._under_way: Counter[str] = Counter()
        """Number of requests for digests under way, by the reader's name."""
        self.local_cache = DigestedCache(memory.own_layers, copy_thread, memory.device)
        """Computes digests of the engine's own cache, which loads fill."""
        self.served_cache = DigestedCache(memory.served_layers, copy_thread) if memory.staging else self.local_cache
        """Computes digests of the memory that peers read: the cache or, with host staging, the host blocks."""
        memory.views.update((self.local_cache, self.served_cache))

    @property
    def problem(self) -> str:
        """Reason why loads cannot be verified; empty if there is none."""
        return self.local_cache.problem

    def answer(self, question: messages.ReaderRequest) -> Answered:
        """Answer a reader's request for digests of leased blocks. Return a refusal, or a future of the reply.

        The request names the lease by its secret id. The digests are sent only if the lease is still open after their
        computation, so the blocks belonged to the lease all the time. The request is refused if it is invalid, if the
        lease has ended, if the tokens cannot be read yet, or if too many requests are under way.
        """
        assert isinstance(question, DigestRequest), "by its row in parts.REQUESTS"
        reader, limits = question.reader, self._limits
        found = self._find_lease(question.lease_id, question.request_id)
        if found is None:
            return self._count_refusal(messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED))
        held = found.held
        if held.missing and any(part.stop > held.num_tokens - held.missing for part in question.parts):
            return self._count_refusal(refusal("its blocks are not computed yet", transient=True))
        try:
            asked = digest_specs_of(self._local, question, found)
        except codec.WireError as error:
            return self._count_refusal(refusal(str(error)))
        if self._under_way.total() >= limits.digests_max or self._under_way[reader] >= REQUESTS_OF_READER_MAX:
            return self._count_refusal(refusal("too many digests are requested at once", transient=True))
        reply: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        try:
            task = self._spawn(
                self._compute_digests(question, asked, reply), name=f"kvflow-digest {question.request_id}"
            )
        except RuntimeClosed as error:
            return self._count_refusal(refusal(str(error), transient=True))
        self._under_way[reader] += 1
        task.add_done_callback(partial(self._digest_task_ended, reader, reply))
        return reply

    def _count_refusal(self, reply: messages.Reply) -> messages.Reply:
        self._counts["digests_refused"] += 1
        return reply

    async def _compute_digests(
        self, question: DigestRequest, asked: Sequence[DigestSpec], reply: asyncio.Future[messages.Reply]
    ) -> None:
        """Compute the digests of `asked`, and set them, or a refusal, as the result of `reply`.

        Task `kvflow-digest <request>`: begun by a reader's request for digests of leased blocks, at most
        `limits.digests_max` at a time; ends when the digests are computed. If the task fails, the request is refused.
        """
        try:
            values = await self.served_cache.digests(asked)
        except Exception as error:  # noqa: BLE001 - of the memory: a reader's question must not end the runtime
            logger.warning("request %s: no digests of its blocks: %s", question.request_id, error)
            reply.set_result(self._count_refusal(refusal(f"no digests: {error}")))
            return
        if self._find_lease(question.lease_id, question.request_id) is None:
            reply.set_result(self._count_refusal(messages.LeaseAnswer(state=messages.LeaseAnswerState.ENDED)))
        else:
            self._counts["digests"] += 1
            reply.set_result(Digests(values=tuple(values)))

    def _digest_task_ended(self, reader: str, reply: asyncio.Future[messages.Reply], _: asyncio.Task[None]) -> None:
        """Callback at the end of the task that answers a request for digests from `reader`.

        If the task was cancelled before it set a reply, refuse the request.
        """
        self._under_way -= Counter((reader,))
        if not reply.done():
            reply.set_result(self._count_refusal(refusal("the engine closes", transient=True)))

    async def read_verified(self, reader: ReadBlocks | None, load: Load, flight: Flight, plan: Plan) -> bool:
        """Read a load's blocks, and compare their digests with the producer's.

        `reader` reads the load's blocks. None: read them straight into the cache, and compute the digests of blocks
        that have landed while others are read.

        If the digests differ, do both again. Return True if the leases covered the whole read. Raise ChecksumMismatch
        if the digests differ twice, and another error if the digests of a load with `verify=True` cannot be compared.
        The blocks stay claimed throughout.
        """
        if any(block_map.sharded for source in load.sources for block_map in source.chunks):
            self._note_unverified(load, NotCompared("tokens are sharded over ranks"))
            if reader is not None:
                return await reader(load, flight, plan)
            return await flight.read_all(direct_reads(self._limits, plan.sources, flight.seal_piece))
        read_and_compare = partial(self._read_and_compare, reader, load, flight, plan)
        try:
            difference = await read_and_compare()
            if difference:
                load.verification = Verification.MISMATCH
                logger.warning("load %s is read once more: %s", load.request_id, difference)
                for source in load.sources:
                    source.proof = source.proof.fresh_copy()
                difference = await read_and_compare()
                if difference:
                    why = f"two reads brought other bytes than the producer has: {difference}"
                    raise load.failure(ChecksumMismatch, why)
            if difference is None:
                return False
            repaired = load.verification is Verification.MISMATCH
            load.verification = Verification.REPAIRED if repaired else Verification.VERIFIED
        except NotCompared as problem:
            self._note_unverified(load, problem)
        return True

    async def _read_and_compare(self, reader: ReadBlocks | None, load: Load, flight: Flight, plan: Plan) -> str | None:
        """Read a load, then compare digests. Return the difference in words, "" for none; None if a lease has ended.

        A rank with a lease that does not grow is asked before the read, and computes its digests during the read; any
        other rank is asked after the read. If digests cannot be compared, raise NotCompared after the read.
        """
        compared = {source: self.parts_to_compare(source, load.tables) for source in load.sources}
        specs = {source: {key: spec for key, (_, spec) in parts.items()} for source, parts in compared.items()}
        landed: LandedDigests | None = None
        if reader is None:
            landed = LandedDigests(self._limits, self.local_cache, specs)
            reader = landed.read
        request_id = load.ticket.request_id
        under_way = {
            source: asyncio.ensure_future(self._ask_digests(request_id, source, parts))
            for source, parts in compared.items()
            if not source.proof.grows
        }
        try:
            await asyncio.sleep(0)  # send the questions before the read is planned and posted
            load.enter_phase("wire")
            if not await reader(load, flight, plan):
                return None
            load.enter_phase(VERIFY)
            ours = [await self._local_digests(landed, source, specs[source]) for source in compared]
            found = []
            for (source, parts), mine in zip(compared.items(), ours, strict=True):
                answer = under_way.get(source) or self._ask_digests(request_id, source, parts)
                if (theirs := await answer) is None:
                    return None
                found.append(_difference(source, parts, mine, theirs))
            return "; ".join(filter(None, found))
        finally:
            for asking in under_way.values():
                asking.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)
            if landed is not None:
                await landed.aclose()

    async def _local_digests(
        self, landed: LandedDigests | None, source: Source, specs: Mapping[BlockMap, DigestSpec]
    ) -> list[int]:
        """Return the digests of the blocks that were read from `source`: those of `landed`, or computed now."""
        try:
            if landed is not None:
                return await landed.digests(source)
            return await self.local_cache.digests(list(specs.values()))
        except Exception as error:  # noqa: BLE001 - of the memory, or of the copy thread
            raise NotCompared(f"no digests of the local cache: {error}") from None

    def _note_unverified(self, load: Load, problem: NotCompared) -> None:
        """Record that the digests of a load could not be compared, because of `problem`.

        If the load was read twice, and the digests differed after the first read, raise ChecksumMismatch. Else, if the
        request has `verify=True`, raise another error.
        """
        if load.verification is Verification.MISMATCH:
            why = f"the bytes differ from the producer's, and could not be compared after the second read: {problem}"
            raise load.failure(ChecksumMismatch, why) from problem
        load.verification = Verification.UNVERIFIED
        logger.info("load %s is not verified: %s", load.request_id, problem)
        if load.request.verify:
            if isinstance(problem.__cause__, PeerError):
                raise problem.__cause__ from None
            raise load.failure(TransferFailed, f"it cannot be verified: {problem}") from problem

    async def _ask_digests(self, request_id: str, source: Source, parts: PartsToCompare) -> Sequence[int] | None:
        """Ask the rank of `source` for digests. Return a flat list with one digest for each layer of each of `parts`.

        Return None if the rank's lease has ended. Raise NotCompared if the rank gives no digests.
        """
        peer, lease = source.peer, source.lease
        question = DigestRequest(
            reader=self._local.reader,
            target=peer.at,
            request_id=request_id,
            lease_id=lease.lease_id,
            definition=DIGEST_VERSION,
            parts=tuple(asked for asked, _ in parts.values()),
        )
        try:
            async with self._rooms.setdefault(peer, asyncio.Semaphore(_ASKED_AT_ONCE_MAX)):
                reply: Digests | messages.LeaseAnswer = await self._peers.ask(
                    peer, question, Digests, messages.LeaseAnswer
                )
        except PeerError as error:
            raise NotCompared(str(error)) from error
        if isinstance(reply, messages.LeaseAnswer):
            return None
        count = sum(len(asked.layers) for asked, _ in parts.values())
        if len(reply.values) != count:
            wrong = peer.at.failure(ProtocolError, f"{counted(len(reply.values), 'digest')}, expected {count}")
            raise NotCompared(str(wrong)) from wrong
        return reply.values

    def parts_to_compare(self, source: Source, tables: Sequence[BlockIds]) -> PartsToCompare:
        """Return the parts to compare with the rank of `source`. `tables`: the local block ids, by group."""
        found: dict[BlockMap, PartToCompare] = {}
        for block_map, chunks in source.chunks.items():
            if some := [one for one in chunks if len(one)]:
                asked = _part_of(self._local, source, block_map, some)
                found[block_map] = asked, digest_spec_of(self._local, asked, tables[block_map.local_group])
        return found


def _part_of(local: LocalRank, source: Source, block_map: BlockMap, chunks: Sequence[Chunks]) -> DigestPart:
    """Return the part of a request for digests that names the layers, heads and tokens of `chunks`.

    `chunks`: chunks that the load reads from the rank of `source`. `block_map`: pairs the source's layers with local
    ones.
    """
    size, mine = block_map.chunk_tokens, local.cache_shares[block_map.local_set]
    layers = tuple(mine.layers[ours] for ours, _ in block_map.layer_pairs)
    model_heads = kv_heads_of_model(mine, _producer_share(source, mine, layers))
    return DigestPart(
        part=mine.part,
        layers=layers,
        head=heads_held(mine, model_heads).start + block_map.heads.local_start,
        heads=block_map.heads.heads,
        model_heads=model_heads,
        start=min(some.first * size for some in chunks),
        stop=max((some.first + len(some) - 1) * size + some.tokens for some in chunks),
    )


def _producer_share(source: Source, mine: CacheShare, layers: Sequence[int]) -> CacheShare:
    """Return the CacheShare (layers and heads that a rank holds) of the producer's rank that has all of `layers`.

    `mine`: the reader's CacheShare with these layers.
    """
    shares = source.connection.cache_shares
    return next(one for one in shares if one.part == mine.part and set(layers) <= set(one.layers))


def _difference(source: Source, parts: PartsToCompare, ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Return a text with the number of layers that differ, and the reader's and the producer's digest of the first one.

    Return "" if no digests differ.

    `ours`, `theirs`: digests of the reader and of the producer, one for each layer of each of `parts`.
    """
    named = [(asked, layer) for asked, _ in parts.values() for layer in asked.layers]
    wrong = [at for at, (mine, other) in enumerate(zip(ours, theirs, strict=True)) if mine != other]
    if not wrong:
        return ""
    first = wrong[0]
    asked, layer = named[first]
    what = f"layer {layer}{asked.part and ' ' + asked.part}, tokens {asked.start} to {asked.stop}"
    digests = f"ours {ours[first]:016x}, theirs {theirs[first]:016x}"
    return f"{source.peer.label}: layers that differ: {len(wrong)} of {len(ours)}, the first: {what}: {digests}"
