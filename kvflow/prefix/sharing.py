"""Answers peers that ask for a prefix, with ordinary leases on blocks that the engine's prefix cache has pinned.

The engine may reuse the blocks of a prefix the moment their lease ends, since readers check the seal once more after
the last byte (`core.protocol.proof`). So `reclaim` waits for no reader.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.protocol import messages
from kvflow.errors import KVFlowError, Overloaded, RequestError, UsageError
from kvflow.logs import logger_of
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_cache import PinnedPrefix, PrefixCache, SharingStatistics
from kvflow.prefix.prefix_requests import token_size_bytes
from kvflow.prefix.seek_request import REQUEST_ID_PREFIX, SeekRequest
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.part import PartHost
from kvflow.runtime.producer.lease import OpenLease, ServeRequest
from kvflow.runtime.tasks import require_loop

logger = logger_of(__name__)

_TTL_S = 5.0  # short: readers begin to read immediately, and renew the lease
_LEASES_MAX = 1 << 10
_MATCHES_MAX = 256  # maximum number of questions that wait for an asynchronous `match`
_MATCH_TIMEOUT_S = 1.0
_PINNED_BLOCKS_DIVISOR = 4


class SharedPrefixes:
    """Handle, returned by `Prefixes.share`, of a prefix cache that is shared with peers until `close`."""

    def __init__(self, host: PartHost, cache: PrefixCache, pinned_blocks_max: int | None) -> None:
        """Share the prefix cache `cache` with peers.

        Raise UsageError if `cache` is no PrefixCache, or if `pinned_blocks_max` is below 1 or no integer. `host`: has
        the registered KV cache with the blocks of `cache`.
        """
        if not checks.try_call(lambda: isinstance(cache, PrefixCache)):
            raise UsageError(f"share: expected a PrefixCache, with match and unpin, got {checks.short_repr(cache)}")
        num_blocks = host.resources.ledger.counts().total
        most = max(num_blocks // _PINNED_BLOCKS_DIVISOR, 1)
        if pinned_blocks_max is not None:
            most = checks.whole(pinned_blocks_max, "share: pinned_blocks_max", least=1, error=UsageError)
        self._ttl_s = min(_TTL_S, host.context.config.lease_ttl_s)
        self._loop = asyncio.get_running_loop()
        self._serving = host.serving
        self._weights = host.context.weights
        self._cache = cache
        self._pinned_blocks_max = most
        self._groups = host.context.local.groups
        self._token_bytes = token_size_bytes(host.context.local)
        self._pins: npt.NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        """Number of leases that pin each block. The blocks of all groups are numbered in one sequence."""
        self._pinned_blocks = self._leased_tokens = 0
        self._prefix_of_lease: dict[OpenLease, PinnedPrefix] = {}
        """The pinned prefix of each open lease, the oldest lease first."""
        self._waiting_replies: dict[asyncio.Future[messages.Reply], asyncio.Future[object]] = {}
        """Futures of replies that wait for an asynchronous `match`, each with the task or future of its `match`."""
        self._counts = dict.fromkeys(("found", "missed", "busy", "failed", "reclaimed"), 0)
        self._closed = False

    @property
    def closed(self) -> bool:
        """True once sharing has ended, by `close` or because the KV cache was unregistered."""
        return self._closed

    @property
    def pinned_blocks(self) -> int:
        """Number of blocks that are pinned for readers now; a block in several leased prefixes counts once."""
        return self._pinned_blocks

    @property
    def statistics(self) -> SharingStatistics:
        """Numbers of prefixes and blocks leased now, and counts of peers' questions so far."""
        return SharingStatistics(prefixes=len(self._prefix_of_lease), pinned_blocks=self._pinned_blocks, **self._counts)

    def reclaim(self, blocks: int) -> int:
        """End leases immediately, the oldest first, until `blocks` pinned blocks are free.

        Call this when the engine needs blocks back. Loads of the ended leases fail, even if all bytes were read.
        `PrefixCache.unpin` is called for each ended lease before `reclaim` returns; but if a lease's blocks are being
        copied to a host buffer (staging), `unpin` is called after the copy.

        Args:
            blocks: number of blocks to free; if fewer are pinned, all are freed.

        Returns:
            Number of freed blocks.

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
        """End all leases of a pinned prefix immediately. Call this before the engine reuses the blocks.

        `PrefixCache.unpin` is called for each lease, and loads of these leases fail.

        Args:
            pinned: an object that `PrefixCache.match` has returned.

        Raises:
            UsageError: this is not the runtime's event loop.
        """
        require_loop(self._loop, "end()")
        for opened, leased in list(self._prefix_of_lease.items()):
            if leased is pinned:
                self._counts["reclaimed"] += 1
                self._revoke(opened)

    def close(self) -> None:
        """Stop sharing, and end all leases immediately. A second call does nothing.

        Peers that wait for an answer, or ask later, get no prefix.

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
        """Revoke a lease. Unpin the prefix now if the lease ends immediately, else in a callback at the lease's end."""
        self._serving.revoke(opened.entry)
        if opened.outcome.done():
            self._unpin_ended(opened)

    def _unpin_ended(self, opened: OpenLease) -> None:
        """Unpin the prefix of an ended lease, since no reader can use the lease now. A second call does nothing."""
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
        """Answer a peer that asks for a prefix. Only the runtime calls this.

        Args:
            question: the peer's message, with the keys of the prefix.

        Returns:
            The reply or, if `PrefixCache.match` is asynchronous, a future of the reply.
        """
        size = KEY_BYTES
        keys = [question.keys[at : at + size] for at in range(0, len(question.keys), size)]
        if len(question.keys) % size:
            return refusal(f"keys of a prefix: {counted(len(question.keys), 'byte')}, expected a multiple of {size}")
        if self._closed:
            return messages.NOTHING_YET
        if self._serving.open_lease(REQUEST_ID_PREFIX + question.request_id) is not None:
            return refusal("this question has an offer already")  # asked at another address of this engine
        if question.weights != self._weights.version:
            return self._empty_answer("missed")
        most = self._tokens_that_fit(self._pinned_blocks_max) // question.key_tokens
        if most < 1 or len(self._prefix_of_lease) >= _LEASES_MAX or len(self._waiting_replies) >= _MATCHES_MAX:
            return self._empty_answer("busy")
        del keys[most:]
        try:
            matched = self._cache.match(keys, question.key_tokens)
        except Exception as error:  # noqa: BLE001 - an engine's own code: whatever it is, the reader gets a miss
            return self._failed_answer(question, error)
        if matched is not None and inspect.isawaitable(matched):
            loop = asyncio.get_running_loop()
            reply: asyncio.Future[messages.Reply] = loop.create_future()
            match_task: asyncio.Future[object] = asyncio.ensure_future(matched)
            self._waiting_replies[reply] = match_task
            timer = loop.call_later(_MATCH_TIMEOUT_S, self._match_timeout, reply)
            match_task.add_done_callback(partial(self._match_done, question, keys, reply, timer))
            return reply
        return self._lease_prefix(question, keys, matched)

    def _match_timeout(self, reply: asyncio.Future[messages.Reply]) -> None:
        """Callback of a timer: if an asynchronous `match` took too long, answer its question without a prefix."""
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
        """Callback at the end of an asynchronous `match`: set `reply`. If `reply` is set already, unpin the prefix."""
        timer.cancel()
        del self._waiting_replies[reply]
        error = asyncio.CancelledError() if match_task.cancelled() else match_task.exception()
        pinned = match_task.result() if error is None else None
        if reply.done():  # the prefix comes too late
            if isinstance(pinned, PinnedPrefix):
                self._unpin(pinned)
        elif error is not None:
            reply.set_result(self._failed_answer(question, error))
        else:
            reply.set_result(self._lease_prefix(question, keys, pinned))

    def _lease_prefix(self, question: SeekRequest, keys: Sequence[bytes], pinned: object) -> messages.Reply:
        """Open a lease on `pinned`, a result of `match`.

        Return a reply with the offer or, on failure, without a prefix.
        """
        if pinned is None:
            return self._empty_answer("missed")
        if not isinstance(pinned, PinnedPrefix):
            wrong = f"a PrefixCache's match: expected a PinnedPrefix, got {checks.short_repr(pinned)}"
            return self._failed_answer(question, RequestError(wrong))
        if question.weights != self._weights.version:  # an asynchronous `match` found blocks of the old weights
            self._unpin(pinned)
            return self._empty_answer("missed")
        request_id = REQUEST_ID_PREFIX + question.request_id
        try:
            reason = self._serving.lease_answers.refusal_reason
            if self._closed or reason:  # either may have changed while an asynchronous `match` ran
                raise RequestError(reason or "the prefix cache is no longer shared")
            self._check_match(pinned, len(keys), question.key_tokens)
            request = ServeRequest(request_id, pinned.block_ids, pinned.num_tokens, ttl_s=self._ttl_s)
            self._serving.serve(request, hold_blocks=False, one_reader_rank=question.alone)
        except Overloaded:
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
        opened.outcome.add_done_callback(lambda _: self._unpin_ended(opened))
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

    def _tokens_that_fit(self, blocks: int) -> int:
        """Return a number of tokens for which a prefix takes at most `blocks` blocks in all groups of layers together.

        A longer prefix may fit, too.
        """
        whole = [group.block_size for group in self._groups if group.whole] or [1]
        rest = sum(group.blocks_needed(group.window + 1) for group in self._groups if not group.whole)
        return max(blocks - rest, 0) * min(whole) // len(whole)

    def _check_match(self, pinned: PinnedPrefix, keys: int, key_tokens: int) -> None:
        """Raise RequestError unless `pinned` has a multiple of `key_tokens` tokens, at most `keys` * `key_tokens`."""
        tokens = checks.whole(pinned.num_tokens, "a PrefixCache's match: num_tokens", least=1)
        if tokens % key_tokens or tokens > keys * key_tokens:
            up_to = f"up to {keys} x {key_tokens}"
            raise RequestError(f"a PrefixCache's match: {counted(tokens, 'token')}, expected {up_to}")

    def _empty_answer(self, what: str) -> messages.Reply:
        """Return a reply without a prefix. Add 1 to the count `what` ("missed", "busy" or "failed") of questions."""
        self._counts[what] += 1
        return messages.NOTHING_YET

    def _failed_answer(self, question: SeekRequest, error: BaseException) -> messages.Reply:
        """Log and count a failure of the engine's prefix cache. Return a reply without a prefix.

        The engine has a bug, or has matched a block that a load is still writing.
        """
        why = "it was cancelled" if isinstance(error, asyncio.CancelledError) else checks.error_text(error)
        logger.error(
            "prefix question %s: the prefix that the prefix cache has found could not be leased: %s",
            question.request_id,
            why,
        )
        return self._empty_answer("failed")
