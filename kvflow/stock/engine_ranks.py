"""EngineRanks: the ranks of one engine, as each of them shows them to stock readers.

A stock engine has one listener, and its readers ask it for every rank that they read from. Our ranks have a runtime
each, so their engine brings what each of them shows (its *card*) to the others, as it does with tickets for
`merge_tickets`. Until all cards are there nobody is answered: a reader would take some ranks for the engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.config import RANKS_MAX
from kvflow.errors import RequestError, UsageError
from kvflow.stock.wire import METADATA_BYTES_MAX, StockMetadata

StructT = TypeVar("StructT", bound=msgspec.Struct)

_ALIKE = ("num_blocks", "block_size", "block_lens", "kv_cache_layout", "region_names", "region_group_ids")
"""Fields that are the same for all ranks of an engine: readers look at the first one's."""


class _Card(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata that one rank shows, for its engine's other ranks."""

    engine_id: str
    tp_rank: int
    tp_size: int
    metadata: bytes
    """Metadata as a reader gets it."""


class EngineRanks:
    """Cards that all ranks of an engine show stock readers: one object for each rank, given to its `StockPeers`.

        card = ranks.card  # once a cache is registered, on every rank
        ranks.show(cards)  # of all ranks, on every rank that tickets may name first

    A rank that registers its cache anew has another card, and answers nobody before it has been shown them all again.
    An engine of one rank needs none of it. Its methods may be called from any thread.
    """

    def __init__(self) -> None:
        self._own: _Card | None = None
        self._shown: Mapping[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<EngineRanks, {len(self._shown)} shown>"

    @property
    def card(self) -> bytes:
        """Card of this rank. UsageError before its cache is registered, or if readers are not served."""
        if self._own is None:
            raise UsageError("stock ranks: no cache is registered that stock readers are served from")
        return msgspec.msgpack.encode(self._own)

    def show(self, cards: Sequence[bytes]) -> None:
        """Answer readers for all ranks of this engine from now on: these are the cards of all of them.

        Args:
            cards: what `card` has said on every rank, in any order.

        Raises:
            RequestError: they are not of all ranks of this engine in their present lives, or their caches differ.
            UsageError: as `card`.
        """
        own = _read(self.card)
        given = checks.answer(lambda: list(cards))
        if given is None or len(given) > RANKS_MAX:
            raise RequestError(f"stock ranks: expected the cards of 1 to {RANKS_MAX} ranks, got {checks.shown(cards)}")
        found = [_read(card) for card in given]
        places = [card.tp_rank for card in found]
        if sorted(places) != list(range(own.tp_size)):
            raise RequestError(f"stock ranks: cards of tp_ranks {sorted(places)[:16]}, there are {own.tp_size}")
        for card in found:
            if (card.engine_id, card.tp_size) != (own.engine_id, own.tp_size):
                theirs = f"engine {card.engine_id[:80]!a} of {counted(card.tp_size, 'rank')}"
                raise RequestError(f"stock ranks: this is {own.engine_id!r} of {own.tp_size}, a card is of {theirs}")
        _check_alike(found)
        if own not in found:
            raise RequestError(f"stock ranks: the card of tp_rank {own.tp_rank} is of another life of it")
        self._shown = {card.tp_rank: card.metadata for card in found}

    def begin(self, engine_id: str, tp_rank: int, tp_size: int, metadata: bytes) -> None:
        """Begin to show the cache that this rank has registered. Only its runtime calls it.

        Args:
            engine_id: of the engine.
            tp_rank: which of its ranks this is.
            tp_size: how many it has.
            metadata: what a reader gets of this rank.
        """
        self._shown = {}
        self._own = _Card(engine_id=engine_id, tp_rank=tp_rank, tp_size=tp_size, metadata=metadata)
        if tp_size == 1:
            self._shown = {0: metadata}

    def metadata_of(self, tp_rank: int) -> bytes | None:
        """Metadata of a rank that its readers get.

        Args:
            tp_rank: which of the engine's ranks.

        Returns:
            Its metadata; None if there is no such rank, or not all are known.
        """
        return self._shown.get(tp_rank)


def _read(card: bytes) -> _Card:
    if type(card) is not bytes or len(card) > METADATA_BYTES_MAX:
        raise RequestError(f"stock ranks: expected the cards of ranks, got {checks.shown(card)}")
    return _decoded(card, _Card)


def _check_alike(cards: Sequence[_Card]) -> None:
    """RequestError for ranks that a reader would not take for those of one engine, and fail."""
    shown = [_decoded(card.metadata, StockMetadata) for card in cards]
    for name in _ALIKE:
        values = {repr(getattr(one, name)) for one in shown}
        if len(values) > 1:
            raise RequestError(f"stock ranks: {name} of the ranks differ: {', '.join(sorted(values))[:400]}")


def _decoded(data: bytes, kind: type[StructT]) -> StructT:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RequestError(f"stock ranks: {counted(len(data), 'byte')}, no card: {str(error)[:200]}") from error
