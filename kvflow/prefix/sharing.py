"""Answers peers that ask for prefixes: with ordinary leases on blocks that the engine's prefix cache has pinned.

Blocks of a prefix are not held after their lease has ended (`core.protocol.proof`), because the readers look at the
seal once more after the last byte. So the engine may reuse the blocks the moment the lease ends, and `reclaim` waits
for no reader.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.protocol import messages
from kvflow.errors import HostBlocksBusy, KVFlowError, RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_cache import PinnedPrefix, PrefixCache, SharingStatistics
from kvflow.prefix.prefix_requests import token_size_bytes
from kvflow.prefix.seek_request import LEASE_ID_PREFIX, SeekRequest
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.producer.lease import OpenLease, ServeRequest
from kvflow.runtime.tasks import require_loop

if TYPE_CHECKING:
    from kvflow.runtime.assembly import RegisteredCache

logger = logger_of(__name__)

_TTL_S = 5.0  # readers begin at once, and renew the lease
_LEASES_MAX = 1 << 10
_MATCHES_MAX = 256  # questions that wait for an asynchronous `match`
_MATCH_TIMEOUT_S = 1.0
_PINNED_BLOCKS_DIVISOR = 4


class SharedPrefixes:
    """Handle of a prefix cache that is shared with peers until `close`. `Prefixes.share` returns it."""

    def __init__(self, registered: RegisteredCache, cache: PrefixCache, pinned_blocks_max: int | None) -> None:
        """Raise UsageError if `cache` is no PrefixCache, or `pinned_blocks_max` is no number of blocks."""
        if not checks.try_call(lambda: isinstance(cache, PrefixCache)):
            raise UsageError(f"share: expected a PrefixCache, with match and unpin, got {checks.short_repr(cache)}")
        num_blocks = registered.ledger.counts().total
        most = max(num_blocks // _PINNED_BLOCKS_DIVISOR, 1)
        if pinned_blocks_max is not None:
            most = checks.whole(pinned_blocks_max, "share: pinned_blocks_max", least=1, error=UsageError)
        self._ttl_s = min(_TTL_S, registered.config.lease_ttl_s)
        self._loop = asyncio.get_running_loop()
        self._serving = registered.serving
        self._cache = cache
        self._pinned_blocks_max = most
        self._groups = registered.local.groups
        self._token_bytes = token_size_bytes(registered.local)
        self._pins: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        """Number of leases that pin each block, by the index of the block's entry in the ledger."""
        self._pinned_blocks = self._leased_tokens = 0
        self._prefix_of_lease: dict[OpenLease, PinnedPrefix] = {}
        """Pinned prefixes by their leases, the oldest first."""
        self._waiting_replies: dict[asyncio.Future[messages.Reply], asyncio.Future[object]] = {}
        """Replies that wait for an asynchronous `match`, each with the future of the `match`."""
        self._counts = dict.fromkeys(("found", "missed", "busy", "failed", "reclaimed"), 0)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once sharing has ended, by `close` or because the KV cache is being unregistered."""
        return self._closed

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that are pinned for readers now, each counted once."""
        return self._pinned_blocks

    @property
    def statistics(self) -> SharingStatistics:
        """Number of prefixes and blocks leased now, and counts of questions so far."""
        return SharingStatistics(prefixes=len(self._prefix_of_lease), pinned_blocks=self._pinned_blocks, **self._counts)

    def reclaim(self, blocks: int) -> int:
        """End the oldest leases at once, until `blocks` pinned blocks are free. For an engine that needs the blocks.

        `PrefixCache.unpin` is called for each ended lease before this returns. Loads of these leases fail, even if they
        have read all bytes. If the KV cache goes through host buffers, a block that is being copied is free once its
        copy has ended.

        Args:
            blocks: number of blocks to free; if fewer are pinned, all are freed.

        Returns:
            Number of blocks that were pinned and are free now.

        Raises:
            RequestError: `blocks` is no number of blocks.
            UsageError: this is not the runtime's event loop.
        """
        require_loop(self._loop, "reclaim()")
        wanted, before = checks.whole(blocks, "reclaim: blocks", least=0), self._pinned_blocks
        for opened in list(self._prefix_of_lease):
            if before - self._pinned_blocks >= wanted:
                break
            self._counts["reclaimed"] += 1
            self._revoke(opened)
        return before - self._pinned_blocks

    def end(self, pinned: PinnedPrefix) -> None:
        """End all leases of a pinned prefix at once, as `reclaim` does. Call it before the engine reuses the blocks.

        Args:
            pinned: the object that `PrefixCache.match` has returned. If `match` has returned it several times, all of
                these leases end. If all have ended before, this does nothing.

        Raises:
            UsageError: this is not the runtime's event loop.
        """
        require_loop(self._loop, "end()")
        for opened, leased in list(self._prefix_of_lease.items()):
            if leased is pinned:
                self._counts["reclaimed"] += 1
                self._revoke(opened)

    def close(self) -> None:
        """Stop sharing: end all leases, as `reclaim` does. Waiting and later questions get no prefix.

        Closing twice is fine.

        Raises:
            UsageError: this is not the runtime's event loop.
        """
        require_loop(self._loop, "close()")
        if not self._closed:
            self._closed = True
            for reply in self._waiting_replies:
                if not reply.done():
                    reply.set_result(messages.NOTHING_YET)
            for opened in list(self._prefix_of_lease):
                self._revoke(opened)

    def _revoke(self, opened: OpenLease) -> None:
        """Revoke a lease. If the lease has ended when this returns, its prefix is unpinned."""
        self._serving.revoke(opened.entry)
        if opened.outcome.done():
            self._unpin_ended(opened)

    def _unpin_ended(self, opened: OpenLease) -> None:
        """Unpin the prefix of a lease that has ended: no reader can use its blocks. A second call does nothing."""
        pinned = self._prefix_of_lease.pop(opened, None)
        if pinned is None:
            return
        entries = opened.held.entries
        self._leased_tokens -= pinned.num_tokens
        self._pins[entries] -= 1
        self._pinned_blocks -= int((self._pins[entries] == 0).sum())
        self._unpin(pinned)

    def _unpin(self, pinned: PinnedPrefix) -> None:
        try:
            self._cache.unpin(pinned)
        except Exception:
            logger.exception("the prefix cache failed to unpin %s", counted(pinned.num_tokens, "token"))

    def answer(self, question: SeekRequest) -> Answered:
        """Only for the runtime: answer a question in this turn of the loop or, if `match` is asynchronous, after it.

        Args:
            question: the question, with the keys of a prefix.

        Returns:
            The reply, or a future of the reply.
        """
        size = KEY_BYTES
        keys = [question.keys[at : at + size] for at in range(0, len(question.keys), size)]
        if len(question.keys) % size:
            return refusal(f"keys of a prefix: {counted(len(question.keys), 'byte')}, expected a multiple of {size}")
        if self._closed:
            return messages.NOTHING_YET
        if self._serving.open_lease(LEASE_ID_PREFIX + question.request_id) is not None:
            return refusal("this question has an offer already")  # asked at another address of this engine
        most = self._tokens_that_fit(self._pinned_blocks_max) // question.key_tokens
        if most < 1 or len(self._prefix_of_lease) >= _LEASES_MAX or len(self._waiting_replies) >= _MATCHES_MAX:
            return self._empty_answer("busy")
        del keys[most:]
        try:
            found = self._cache.match(keys, question.key_tokens)
        except Exception as error:  # noqa: BLE001 - an engine's own code: whatever it is, the reader gets a miss
            return self._failed_answer(question, error)
        if found is not None and inspect.isawaitable(found):
            loop = asyncio.get_running_loop()
            reply: asyncio.Future[messages.Reply] = loop.create_future()
            match_task: asyncio.Future[object] = asyncio.ensure_future(found)
            self._waiting_replies[reply] = match_task
            timer = loop.call_later(_MATCH_TIMEOUT_S, self._match_timeout, reply)
            match_task.add_done_callback(partial(self._match_done, question, keys, reply, timer))
            return reply
        return self._lease_prefix(question, keys, found)

    def _match_timeout(self, reply: asyncio.Future[messages.Reply]) -> None:
        """Callback of a timer, after which an asynchronous `match` has taken too long: answer with no prefix."""
        if not reply.done():
            reply.set_result(self._empty_answer("busy"))

    def _match_done(
        self,
        question: SeekRequest,
        keys: Sequence[bytes],
        reply: asyncio.Future[messages.Reply],
        timer: asyncio.TimerHandle,
        match_task: asyncio.Future[object],
    ) -> None:
        """Callback when an asynchronous `match` has ended: set `reply`. If `reply` was set before, unpin the prefix."""
        timer.cancel()
        del self._waiting_replies[reply]
        error = None if match_task.cancelled() else match_task.exception()
        found = not match_task.cancelled() and error is None
        if reply.done():
            if found:
                self._unpin_unused(match_task.result())
        else:
            reply.set_result(
                self._lease_prefix(question, keys, match_task.result())
                if found
                else self._failed_answer(question, error)
            )

    def _unpin_unused(self, pinned: object) -> None:
        """Unpin a prefix that was found after its question had been answered."""
        if isinstance(pinned, PinnedPrefix):
            self._unpin(pinned)

    def _lease_prefix(self, question: SeekRequest, keys: Sequence[bytes], pinned: object) -> messages.Reply:
        """Lease the prefix that `match` has returned. Return the reply that offers it, or one without a prefix."""
        if pinned is None:
            return self._empty_answer("missed")
        if not isinstance(pinned, PinnedPrefix):
            return self._failed_answer(
                question,
                RequestError(f"a PrefixCache's match: expected a PinnedPrefix, got {checks.short_repr(pinned)}"),
            )
        request_id = LEASE_ID_PREFIX + question.request_id
        try:
            if (
                self._closed or self._serving.lease_answers.refusal_reason
            ):  # either may have changed since the cache was asked
                raise RequestError(self._serving.lease_answers.refusal_reason or "the prefix cache is no longer shared")
            self._check_match(pinned, len(keys), question.key_tokens)
            request = ServeRequest(request_id, pinned.block_ids, pinned.num_tokens, ttl_s=self._ttl_s)
            self._serving.serve(request, hold_blocks=False, one_reader_rank=question.alone)
        except HostBlocksBusy:
            self._unpin(pinned)
            return self._empty_answer("busy")
        except KVFlowError as error:
            self._unpin(pinned)
            return self._failed_answer(question, error)
        opened = self._serving.open_lease(request_id)
        if opened is None:  # the prefix has no blocks, so there is no lease
            self._unpin(pinned)
            return self._empty_answer("missed")
        queued = self._leased_tokens * self._token_bytes
        self._leased_tokens += pinned.num_tokens
        entries = opened.held.entries
        fresh = int((self._pins[entries] == 0).sum())
        self._prefix_of_lease[opened] = pinned
        self._pins[entries] += 1
        self._pinned_blocks += fresh
        opened.outcome.add_done_callback(partial(self._on_lease_end, opened))
        if self._pinned_blocks > self._pinned_blocks_max:
            self._revoke(opened)
            return self._empty_answer("busy")
        if opened.held.offered_tokens != pinned.num_tokens:
            self._revoke(opened)
            blocks, tokens = counted(len(opened.held.entries), "block"), counted(pinned.num_tokens, "token")
            return self._failed_answer(question, RequestError(f"a PrefixCache's match: {blocks} for {tokens}"))
        self._counts["found"] += 1
        state, lease = messages.LeaseAnswerState.OPEN, opened.rank_lease()
        return messages.LeaseAnswer(state=state, lease=lease, offer=opened.offer(queued))

    def _on_lease_end(self, opened: OpenLease, _: object) -> None:
        self._unpin_ended(opened)

    def _tokens_that_fit(self, blocks: int) -> int:
        """Return a number of tokens so small that a prefix of this length takes at most `blocks` blocks.

        The blocks of all groups of layers are added up.
        """
        whole = [group.block_size for group in self._groups if group.whole] or [1]
        rest = sum(group.blocks_needed(group.window + 1) for group in self._groups if not group.whole)
        return max(blocks - rest, 0) * min(whole) // len(whole)

    def _check_match(self, pinned: PinnedPrefix, keys: int, key_tokens: int) -> None:
        """Raise RequestError unless `pinned` has a multiple of `key_tokens` tokens, for at most `keys` keys."""
        tokens = checks.whole(pinned.num_tokens, "a PrefixCache's match: num_tokens", least=1)
        if tokens % key_tokens or tokens > keys * key_tokens:
            up_to = f"up to {keys} x {key_tokens}"
            raise RequestError(f"a PrefixCache's match: {counted(tokens, 'token')}, expected {up_to}")

    def _empty_answer(self, what: str) -> messages.Reply:
        """Add 1 to the count `what` of questions, and return the reply without a prefix."""
        self._counts[what] += 1
        return messages.NOTHING_YET

    def _failed_answer(self, question: SeekRequest, error: BaseException | None) -> messages.Reply:
        """Log and count a failure of the prefix cache, and return the reply without a prefix.

        The cause is a bug of the engine, or a block that is being written.
        """
        why = "it was cancelled" if error is None else checks.error_text(error)
        logger.error(
            "prefix question %s: the prefix that the prefix cache has found could not be leased: %s",
            question.request_id,
            why,
        )
        return self._empty_answer("failed")
