"""Hands prefixes on: an engine that is taken out of service offers its prefixes to a successor, which pulls them.

The successor takes an offer only from an engine that it was told of (`Prefixes.accept`), and asks and reads that
engine at the address that it knows. So a forged offer cannot bring blocks of another engine. The successor's engine
pulls each prefix as any other one, into blocks that it chooses: leases, proofs and quarantine are those of a pull.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from kvflow import checks
from kvflow.checks import counted
from kvflow.core.bounds import REASON_CHARS_MAX
from kvflow.core.protocol import messages
from kvflow.core.protocol.addresses import Address, PeerAddress, peer_at
from kvflow.errors import KVFlowError, ProtocolError, RequestError, RuntimeUnavailable, UsageError
from kvflow.limits import WAIT_S_MAX
from kvflow.logs import logger_of
from kvflow.prefix.hand_on_request import (
    HANDED_ON_KEYS_MAX,
    HANDED_ON_PREFIXES_MAX,
    HandedOn,
    HandedOnKeys,
    HandedOnKeysRequest,
    HandOnRequest,
)
from kvflow.prefix.keys import KEY_BYTES
from kvflow.prefix.prefix_requests import checked_keys, token_size_bytes
from kvflow.runtime.channel.protocol import Answered, refusal
from kvflow.runtime.part import PartHost

logger = logger_of(__name__)

_OFFERS_MAX = 8
_ANSWER_SLACK_S = 1.0  # a pull that ends late, and the way of the answer
_SHORTEST_S = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOnPrefix:
    """A prefix that a leaving engine offers. Pull it from `holder`, into blocks of the local prefix cache."""

    keys: Sequence[bytes]
    """One key for each `key_tokens` tokens of the prefix, as `prefix_keys` makes them."""
    key_tokens: int
    holder: PeerAddress
    """The leaving engine, for `PrefixRequest.peers`."""
    within_s: float
    """Seconds left, for `PrefixRequest.deadline_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOnOffer:
    """An offer of this engine's prefixes to a successor."""

    hand_on_id: str
    prefixes: Sequence[Sequence[bytes]]
    key_tokens: int
    bytes_max: int
    within_s: float


@dataclass(slots=True)
class _Pulled:
    """Numbers of prefixes considered and tokens pulled so far, of one offer."""

    prefixes: int = 0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandOnReport:
    """What a successor has pulled from this engine."""

    prefixes: int
    """Number of prefixes that the successor has considered, the most recently used first."""
    tokens: int
    """Number of tokens that the successor has pulled. Tokens that it had already do not count."""
    bytes: int
    """Number of bytes that one rank of the successor has read."""
    reason: str
    """Why the successor has not considered all prefixes, such as "no room"; "" if it has."""


TakePrefix: TypeAlias = Callable[[HandedOnPrefix], Awaitable[int | None]]
"""Function of an engine that pulls a prefix. Awaiting its result gives the number of tokens that were pulled, or None
if the engine has no room for the prefix, so that nothing more is to be offered."""


class HandingOn:
    """The leaving side: one offer at a time, of which a successor asks for the keys."""

    def __init__(self, host: PartHost, counts: dict[str, int]) -> None:
        self._peers, self._context, self._counts = host.peers, host.context, counts
        self._offer: HandOnOffer | None = None
        """The offer under way."""

    def checked(
        self, prefixes: Sequence[Sequence[bytes]], *, key_tokens: int, bytes_max: int, within_s: float
    ) -> HandOnOffer:
        """Return the arguments of `Prefixes.hand_on`, or raise RequestError if one is invalid.

        UsageError if another offer is under way.
        """
        if self._offer is not None:
            raise UsageError(f"hand_on: another call is under way at engine {self._context.config.engine_id!r}")
        checks.count(prefixes, "hand_on: prefixes", most=HANDED_ON_PREFIXES_MAX)
        seconds = checks.seconds(within_s, "hand_on: within_s")
        if seconds > WAIT_S_MAX:
            raise RequestError(f"hand_on: within_s: expected at most {WAIT_S_MAX:g}, got {seconds:g}")
        return HandOnOffer(
            hand_on_id=self._context.token_hex(16),
            prefixes=[checked_keys(keys, f"hand_on: prefixes[{at}]") for at, keys in enumerate(prefixes)],
            key_tokens=checks.whole(key_tokens, "hand_on: key_tokens", least=1),
            bytes_max=checks.whole(bytes_max, "hand_on: bytes_max", least=1),
            within_s=seconds,
        )

    async def send(self, successor: Address, offer: HandOnOffer) -> HandOnReport:
        """Send an offer to the rank `successor`, and wait until it has pulled the prefixes. PeerError if it has not."""
        local, engine_id = self._context.local, self._context.config.engine_id
        question = HandOnRequest(
            reader=local.reader,
            target=successor,
            hand_on_id=offer.hand_on_id,
            sender=local.caller,
            prefixes=len(offer.prefixes),
            bytes_max=offer.bytes_max,
            within_s=offer.within_s,
        )
        timeout_s = offer.within_s + self._context.config.cancel_grace_s + _ANSWER_SLACK_S
        self._offer = offer
        try:
            # Not as a first contact, which would keep other new peers waiting until the last prefix is pulled.
            answer = await self._peers.handshakes.ask(self._peers.get(successor), question, timeout_s)
        finally:
            self._offer = None
        if not isinstance(answer, HandedOn):
            raise successor.failure(ProtocolError, f"expected HandedOn, got {type(answer).__name__}")
        self._counts["handed_on_tokens"] += answer.tokens
        pulled = f"{counted(answer.tokens, 'token')} of {counted(answer.prefixes, 'prefix', 'prefixes')}"
        reason = checks.printable(answer.reason, REASON_CHARS_MAX)
        logger.info("engine %r: %s has pulled %s%s", engine_id, successor, pulled, reason and f"; {reason}")
        return HandOnReport(prefixes=answer.prefixes, tokens=answer.tokens, bytes=answer.size_bytes, reason=reason)

    def answer(self, question: HandedOnKeysRequest) -> Answered:
        """Answer the successor's question for the keys of one prefix."""
        offer = self._offer
        if offer is None or question.hand_on_id != offer.hand_on_id or question.index >= len(offer.prefixes):
            return refusal("no such prefix is handed on")
        keys = offer.prefixes[question.index][:HANDED_ON_KEYS_MAX]
        return HandedOnKeys(keys=b"".join(keys), key_tokens=offer.key_tokens)


class TakingOver:
    """The successor's side: takes offers over from the engines at `predecessors` (None: from any engine).

    `take` pulls one prefix. `counts`: counts of `PrefixStatistics` by field name, which offers increase.
    """

    def __init__(
        self, host: PartHost, counts: dict[str, int], take: TakePrefix, predecessors: Collection[str] | None
    ) -> None:
        self._peers, self._context, self._counts = host.peers, host.context, counts
        self._token_bytes = max(token_size_bytes(host.context.local), 1)
        self.accept(take, predecessors)
        self._offers: dict[str, asyncio.Task[None]] = {}
        """Tasks that carry out offers, by the ids of the offers."""

    def accept(self, take: TakePrefix, predecessors: Collection[str] | None) -> None:
        """Pull further prefixes by `take`, and accept further offers of the engines at `predecessors` alone."""
        self._take, self._predecessors = take, predecessors

    def close(self) -> None:
        """Cancel all offers under way. Their senders get a refusal."""
        for task in self._offers.values():
            task.cancel()

    def answer(self, question: HandOnRequest) -> Answered:
        """Return a refusal, or a future of the answer to a leaving engine's offer."""
        engine_id, sender = self._context.config.engine_id, question.sender
        if self._predecessors is not None and sender.address not in self._predecessors:
            return refusal(f"engine {engine_id!r} takes over no prefixes of an engine at {sender.address}")
        if sender.engine_id != messages.claimed_engine_id(question):
            return refusal(f"an offer of engine {sender.engine_id!r}, which another engine has sent")
        if question.hand_on_id in self._offers or len(self._offers) >= _OFFERS_MAX:
            return refusal(f"engine {engine_id!r} takes over {counted(len(self._offers), 'offer')}", transient=True)
        reply: asyncio.Future[messages.Reply] = asyncio.get_running_loop().create_future()
        try:
            task = self._context.spawn(self._carry_out(question, reply), name=f"kvflow-take {sender.address}")
        except RuntimeUnavailable as error:
            return refusal(str(error), transient=True)
        self._offers[question.hand_on_id] = task
        task.add_done_callback(partial(self._ended, question, reply))
        return reply

    def _ended(self, question: HandOnRequest, reply: asyncio.Future[messages.Reply], _: asyncio.Task[None]) -> None:
        """Callback at the end of a task that carries out an offer. If the task has set no reply, refuse the offer."""
        del self._offers[question.hand_on_id]
        if not reply.done():
            reply.set_result(refusal("the engine closes", transient=True))

    async def _carry_out(self, question: HandOnRequest, reply: asyncio.Future[messages.Reply]) -> None:
        """Have the engine pull the prefixes of an offer, and set `reply`.

        Task `kvflow-take <address>`: begun by a leaving engine's offer of its prefixes, at most eight at a time. The
        task ends when the offered prefixes are pulled, at one of the offer's bounds, when the engine has no room, or
        when a pull fails.
        """
        pulled, reason = _Pulled(), ""
        try:
            async with asyncio.timeout(question.within_s):
                reason = await self._take_all(question, pulled)
        except TimeoutError:
            reason = f"within_s: {question.within_s:g} s have passed"
        except KVFlowError as error:
            reason = str(error)
        except Exception as error:  # of the engine's own function: it must not end the runtime
            logger.exception("engine %r: prefixes of %s", self._context.config.engine_id, question.sender)
            reason = f"{type(error).__name__}: {checks.error_text(error)}"
        logger.info(
            "engine %r: pulled %s of %s of its predecessor %s%s",
            self._context.config.engine_id,
            counted(pulled.tokens, "token"),
            counted(pulled.prefixes, "prefix", "prefixes"),
            question.sender,
            reason and f"; not the others: {reason}",
        )
        reply.set_result(
            HandedOn(
                prefixes=pulled.prefixes,
                tokens=pulled.tokens,
                size_bytes=pulled.tokens * self._token_bytes,
                reason=checks.printable(reason, REASON_CHARS_MAX),
            )
        )

    async def _take_all(self, question: HandOnRequest, pulled: _Pulled) -> str:
        """Have the engine pull prefixes, and count them in `pulled`. Return why there are others; "" if there are none.

        Stop when the next prefix exceeds the offer's bytes, or the engine has no room.
        """
        loop, sender = asyncio.get_running_loop(), question.sender
        until_s, peer = loop.time() + question.within_s, self._peers.get(sender)
        holder = peer_at(sender)
        for index in range(question.prefixes):
            asked = HandedOnKeysRequest(
                reader=self._context.local.reader, target=sender, hand_on_id=question.hand_on_id, index=index
            )
            known = await self._peers.ask(peer, asked, HandedOnKeys)
            keys = [known.keys[at : at + KEY_BYTES] for at in range(0, len(known.keys), KEY_BYTES)]
            if len(known.keys) % KEY_BYTES:
                raise sender.failure(ProtocolError, f"keys of a prefix: {counted(len(known.keys), 'byte')}")
            left_bytes = question.bytes_max - pulled.tokens * self._token_bytes
            del keys[left_bytes // (self._token_bytes * known.key_tokens) :]
            if not keys:
                return f"bytes_max: {question.bytes_max}, of which {left_bytes} are left"
            offered = HandedOnPrefix(
                keys=keys, key_tokens=known.key_tokens, holder=holder, within_s=max(until_s - loop.time(), _SHORTEST_S)
            )
            tokens = await self._take(offered)
            if tokens is None:
                return "no room"
            most = len(keys) * known.key_tokens
            if not 0 <= checks.whole(tokens, "a function given to accept: tokens", least=0) <= most:
                raise RequestError(f"a function given to accept: {counted(tokens, 'token')} of a prefix of {most}")
            pulled.prefixes += 1
            pulled.tokens += tokens
            self._counts["taken_over_tokens"] += tokens
        return ""
