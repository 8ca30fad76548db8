"""A shared prefix cache: questions for prefixes are answered by ordinary leases on blocks that its shelf has pinned.

The lease of a prefix has no hold (`core.protocol.proof`): its readers look at the seal after the last byte. So its
blocks are the owner's again the moment it ends, and `reclaim` waits for no reader.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.policy.lease_book import LeaseEntry
from kvflow.core.policy.ledger import BlockLedger
from kvflow.core.protocol import messages
from kvflow.errors import KVFlowError, RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_cache import Run, SharingStatistics, Shelf
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.context import RankContext
from kvflow.runtime.own_loop import require_loop
from kvflow.runtime.peers.peer import LocalRank, token_bytes
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.runtime.producer.open_lease import OpenLease

logger = logger_of(__name__)

_TTL_S = 5.0  # readers begin at once, and renew
_RUNS_MAX = 1 << 10
_ASKED_AT_ONCE_MAX = 256  # questions to a shelf that has to be waited for
_SHELF_WITHIN_S = 1.0
_SHARE_OF_CACHE = 4


class Leasing(NamedTuple):
    """Leases for runs, of `serving.Serving`."""

    serve: Callable[[ServeRequest, bool], object]
    """Opens a lease without a hold, for one rank alone or for an engine."""
    find: Callable[[str], OpenLease | None]
    revoke: Callable[[LeaseEntry], None]


class SharedPrefixes:
    """A prefix cache that is shared with peers, until `close`; what `Runtime.share` returns."""

    def __init__(
        self,
        context: RankContext,
        leasing: Leasing,
        shelf: Shelf,
        ledger: BlockLedger,
        local: LocalRank,
        pinned_blocks_max: int | None,
    ) -> None:
        if not checks.answer(lambda: isinstance(shelf, Shelf)):
            raise UsageError(f"share: expected a Shelf, with match and unpin, got {checks.shown(shelf)}")
        num_blocks = ledger.counts().total
        most = max(num_blocks // _SHARE_OF_CACHE, 1)
        if pinned_blocks_max is not None:
            most = checks.whole(pinned_blocks_max, "share: pinned_blocks_max", least=1, error=UsageError)
        self._ttl_s = min(_TTL_S, context.config.lease_ttl_s)
        self._spawn = context.spawn
        self._loop = asyncio.get_running_loop()
        self._leasing = leasing
        self._shelf = shelf
        self._pinned_max = most
        self._groups = local.groups
        self._token_bytes = token_bytes(local)
        self.on_close: Callable[[], None] = lambda: None
        """Called once, when it is closed."""
        self._pins: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        """Number of runs that have pinned each block, by its ledger entry."""
        self._pinned = self._leased_tokens = 0
        self._runs: dict[OpenLease, Run] = {}
        """Runs by their leases, the oldest first."""
        self._leases: defaultdict[int, list[OpenLease]] = defaultdict(list)
        """Leases of each run, by its identity: a shelf may give one object several times."""
        self._asked: set[asyncio.Future[messages.Reply]] = set()
        self._counts = dict.fromkeys(("found", "missed", "busy", "failed", "reclaimed"), 0)
        self._closed = False

    @property
    def pinned_blocks(self) -> int:
        """Blocks that are pinned for readers now, each counted once."""
        return self._pinned

    @property
    def statistics(self) -> SharingStatistics:
        """Counts of runs that are leased now, and of questions so far."""
        return SharingStatistics(runs=len(self._runs), pinned_blocks=self._pinned, **self._counts)

    def reclaim(self, blocks: int) -> int:
        """End the oldest runs at once, until as many blocks are free that were pinned: their owner needs them.

        `Shelf.unpin` is called for each of them before this returns. Their readers see a miss, whatever they have read.
        Where the cache goes through host buffers, a run that is being copied is free once that copy has ended.

        Args:
            blocks: how many; more than are pinned frees all.

        Returns:
            How many are free that were pinned.

        Raises:
            RequestError: it is no number.
            UsageError: off the runtime's loop.
        """
        require_loop(self._loop, "reclaim()")
        wanted, before = checks.whole(blocks, "reclaim: blocks", least=0), self._pinned
        for opened in list(self._runs):
            if before - self._pinned >= wanted:
                break
            self._counts["reclaimed"] += 1
            self._end(opened)
        return before - self._pinned

    def end(self, run: Run) -> None:
        """End a run at once, as by `reclaim`: its owner is about to use its blocks for something else.

        Args:
            run: the very object that `Shelf.match` has given, once or several times. No effect if it has ended.

        Raises:
            UsageError: off the runtime's loop.
        """
        require_loop(self._loop, "end()")
        for opened in tuple(self._leases.get(id(run), ())):
            self._counts["reclaimed"] += 1
            self._end(opened)

    def close(self) -> None:
        """Share no more: runs that are leased end, as by `reclaim`, and questions are answered with a miss.

        Closing twice is fine.

        Raises:
            UsageError: off the runtime's loop.
        """
        require_loop(self._loop, "close()")
        if not self._closed:
            self._closed = True
            for opened in list(self._runs):
                self._end(opened)
            self.on_close()

    def _end(self, opened: OpenLease) -> None:
        self._leasing.revoke(opened.entry)
        if opened.outcome.done():
            self._over(opened)

    def _over(self, opened: OpenLease) -> None:
        """Unpin a run, once: its lease has ended, and nothing reads its blocks."""
        run = self._runs.pop(opened, None)
        if run is None:
            return
        self._leases[id(run)].remove(opened)
        if not self._leases[id(run)]:
            del self._leases[id(run)]
        entries = opened.held.entries
        self._leased_tokens -= run.num_tokens
        self._pins[entries] -= 1
        self._pinned -= int((self._pins[entries] == 0).sum())
        self._unpin(run)

    def _unpin(self, run: Run) -> None:
        try:
            self._shelf.unpin(run)
        except Exception:
            logger.exception("shelf failed to unpin a run of %s", counted(run.num_tokens, "token"))

    def answer(self, question: messages.SeekRequest) -> Answered:
        """Only for the runtime: answer a reader in this turn of the loop, or when the shelf has.

        Args:
            question: the keys of a prefix.

        Returns:
            A reply, or a future of one.
        """
        size = KEY_BYTES
        keys = [question.keys[at : at + size] for at in range(0, len(question.keys), size)]
        if len(question.keys) % size:
            return refusal(f"keys of a prefix: {counted(len(question.keys), 'byte')}, expected a multiple of {size}")
        if self._closed:
            return messages.NOTHING_YET
        if self._leasing.find(messages.PREFIX_OF + question.request_id) is not None:
            return refusal("this question has an offer already")  # it came by another address of this engine
        most = self._tokens_in(self._pinned_max) // question.key_tokens
        if most < 1 or len(self._runs) >= _RUNS_MAX or len(self._asked) >= _ASKED_AT_ONCE_MAX:
            return self._counted("busy")
        del keys[most:]
        try:
            found = self._shelf.match(keys, question.key_tokens)
        except Exception as error:  # noqa: BLE001 - an engine's own code: whatever it is, the reader gets a miss
            return self._failed(question, error)
        if found is not None and inspect.isawaitable(found):
            reply: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
            self._asked.add(reply)
            reply.add_done_callback(self._asked.discard)
            waiting: asyncio.Future[Run | None] = asyncio.ensure_future(found)
            body = self._answer_later(question, keys, waiting, reply)
            task = self._spawn(body, name=f"kvflow-seek {question.request_id}")
            task.add_done_callback(partial(self._answered, waiting, reply))
            return reply
        return self._offered(question, keys, found)

    async def _answer_later(
        self,
        question: messages.SeekRequest,
        keys: Sequence[bytes],
        waiting: asyncio.Future[Run | None],
        reply: asyncio.Future[messages.Reply],
    ) -> None:
        answer: messages.Reply = messages.NOTHING_YET
        done, _ = await asyncio.wait([waiting], timeout=_SHELF_WITHIN_S)
        if not done:
            waiting.add_done_callback(self._too_late)
            answer = self._counted("busy")
        elif waiting.cancelled() or waiting.exception() is not None:
            answer = self._failed(question, None if waiting.cancelled() else waiting.exception())
        else:
            answer = self._offered(question, keys, waiting.result())
        if not reply.done():
            reply.set_result(answer)

    def _answered(
        self, waiting: asyncio.Future[Run | None], reply: asyncio.Future[messages.Reply], task: asyncio.Task[None]
    ) -> None:
        """End a question that had to wait: answered, or ended with the registration while the shelf looked."""
        if not reply.done():
            reply.set_result(messages.NOTHING_YET)
        if task.cancelled():
            waiting.add_done_callback(self._too_late)

    def _too_late(self, waiting: asyncio.Future[Run | None]) -> None:
        """Unpin the run of an answer for which nobody waited any more."""
        if not waiting.cancelled() and waiting.exception() is None and isinstance(run := waiting.result(), Run):
            self._unpin(run)

    def _offered(self, question: messages.SeekRequest, keys: Sequence[bytes], run: object) -> messages.Reply:
        """Lease the run that a shelf has found, and offer it."""
        if run is None:
            return self._counted("missed")
        if not isinstance(run, Run):
            return self._failed(question, RequestError(f"a Shelf's match: expected a Run, got {checks.shown(run)}"))
        request_id = messages.PREFIX_OF + question.request_id
        try:
            if self._closed:
                raise RequestError("it is shared no more")
            self._check(run, len(keys), question.key_tokens)
            request = ServeRequest(request_id, run.block_ids, run.num_tokens, ttl_s=self._ttl_s)
            self._leasing.serve(request, question.alone)
        except KVFlowError as error:
            self._unpin(run)
            return self._failed(question, error)
        opened = self._leasing.find(request_id)
        if opened is None:  # a run of no blocks
            self._unpin(run)
            return self._counted("missed")
        queued = self._leased_tokens * self._token_bytes
        self._leased_tokens += run.num_tokens
        entries = opened.held.entries
        fresh = int((self._pins[entries] == 0).sum())
        self._runs[opened] = run
        self._leases[id(run)].append(opened)
        self._pins[entries] += 1
        self._pinned += fresh
        opened.outcome.add_done_callback(partial(self._ended, opened))
        if self._pinned > self._pinned_max:
            self._end(opened)
            return self._counted("busy")
        if opened.held.offered_tokens != run.num_tokens:
            self._end(opened)
            blocks, tokens = counted(len(opened.held.entries), "block"), counted(run.num_tokens, "token")
            return self._failed(question, RequestError(f"a Shelf's match: {blocks} for {tokens}"))
        self._counts["found"] += 1
        state, lease = messages.Told.OPEN, opened.lease()
        return messages.LeaseAnswer(state=state, lease=lease, offer=opened.offer(queued))

    def _ended(self, opened: OpenLease, _: object) -> None:
        self._over(opened)

    def _tokens_in(self, blocks: int) -> int:
        """Tokens of a prefix that surely has no more blocks than that, in all groups."""
        whole = [group.block_size for group in self._groups if group.whole] or [1]
        rest = sum(group.blocks_needed(group.window + 1) for group in self._groups if not group.whole)
        return max(blocks - rest, 0) * min(whole) // len(whole)

    def _check(self, run: Run, keys: int, key_tokens: int) -> None:
        tokens = checks.whole(run.num_tokens, "a Shelf's match: num_tokens", least=1)
        if tokens % key_tokens or tokens > keys * key_tokens:
            up_to = f"up to {keys} x {key_tokens}"
            raise RequestError(f"a Shelf's match: {counted(tokens, 'token')}, expected {up_to}")

    def _counted(self, what: str) -> messages.Reply:
        self._counts[what] += 1
        return messages.NOTHING_YET

    def _failed(self, question: messages.SeekRequest, error: BaseException | None) -> messages.Reply:
        """Answer with a miss, since the shelf has failed: a bug of its engine, or a block that is being written."""
        why = "it was cancelled" if error is None else checks.said(error)
        logger.error("prefix question %s: the shelf's run could not be leased: %s", question.request_id, why)
        return self._counted("failed")
