"""EngineRanks: the metadata of all ranks of one engine, so that any rank can answer stock readers for all ranks.

In kvflow each rank has a runtime, but a stock reader asks one listener about every rank. A rank without the metadata of
all ranks answers no reader, which would take some ranks for the whole engine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

import msgspec

from kvflow import checks
from kvflow.checks import counted
from kvflow.config import RANKS_MAX
from kvflow.errors import RequestError, UsageError
from kvflow.stock.wire import METADATA, METADATA_BYTES_MAX

StructT = TypeVar("StructT", bound=msgspec.Struct)

_EQUAL_FIELDS = ("num_blocks", "block_size", "block_lens", "kv_cache_layout", "region_names", "region_group_ids")
"""Metadata fields that must be equal on all ranks of an engine, since readers look only at the first rank's."""


class _Card(msgspec.Struct, frozen=True, kw_only=True):
    """Decoded form of `EngineRanks.card`: what a rank tells the engine's other ranks about itself."""

    engine_id: str
    tp_rank: int
    tp_size: int
    metadata: bytes
    """The rank's StockMetadata, encoded as stock readers expect it."""


_CARD = msgspec.msgpack.Decoder(_Card)


class EngineRanks:
    """The metadata of all ranks of this rank's engine, for stock readers.

    A stock reader asks one rank about all ranks. So your program has to pass each rank's metadata, encoded as bytes
    (the rank's *card*), to the other ranks:

        ranks = EngineRanks()  # on each rank, for StockPeers(ranks=ranks)
        card = ranks.card  # on each rank, once a cache is registered
        ranks.show(cards)  # the cards of all ranks, on each rank that stock readers may ask

    A rank that registers its cache again has a new card, and answers no reader until `show` is called again with all
    cards. An engine of one rank needs no EngineRanks. Any thread may call the methods.
    """

    def __init__(self) -> None:
        self._own: _Card | None = None
        self._metadata_by_rank: Mapping[int, bytes] = {}

    def __repr__(self) -> str:
        return f"<EngineRanks, metadata of {counted(len(self._metadata_by_rank), 'rank')}>"

    @property
    def card(self) -> bytes:
        """This rank's metadata as bytes, for `show` on the engine's ranks.

        UsageError if no cache is registered yet, or if `StockPeers.serve_version` is empty.
        """
        if self._own is None:
            raise UsageError("stock ranks: no cache is registered that stock readers are served from")
        return msgspec.msgpack.encode(self._own)

    def show(self, cards: Sequence[bytes]) -> None:
        """Start to answer stock readers for all ranks of this engine, with the metadata in `cards`.

        Args:
            cards: the `card` of every rank, in any order.

        Raises:
            RequestError: a rank's card is missing, is from another engine or from an earlier registration, or the
                ranks' caches differ.
            UsageError: no cache is registered, or stock readers are not served.
        """
        own = _decode_card(self.card)
        given = checks.try_call(lambda: list(cards))
        if given is None or len(given) > RANKS_MAX:
            raise RequestError(
                f"stock ranks: expected the cards of 1 to {RANKS_MAX} ranks, got {checks.short_repr(cards)}"
            )
        found = [_decode_card(card) for card in given]
        places = [card.tp_rank for card in found]
        if sorted(places) != list(range(own.tp_size)):
            expected = f"expected a card of each of {counted(own.tp_size, 'rank')}"
            raise RequestError(f"stock ranks: {expected}, got tp_ranks {sorted(places)[:16]}")
        for card in found:
            if (card.engine_id, card.tp_size) != (own.engine_id, own.tp_size):
                theirs = f"engine {card.engine_id[:80]!a} of {counted(card.tp_size, 'rank')}"
                raise RequestError(
                    f"stock ranks: ours is engine {own.engine_id!r} of {own.tp_size}, a card is from {theirs}"
                )
        _check_equal_fields(found)
        if own not in found:
            raise RequestError(f"stock ranks: the card of tp_rank {own.tp_rank} is from another registration")
        self._metadata_by_rank = {card.tp_rank: card.metadata for card in found}

    def begin(self, engine_id: str, tp_rank: int, tp_size: int, metadata: bytes) -> None:
        """Only for the rank's runtime: set this rank's metadata, and drop the other ranks' cards.

        `metadata` is encoded as stock readers expect it.
        """
        self._metadata_by_rank = {}
        self._own = _Card(engine_id=engine_id, tp_rank=tp_rank, tp_size=tp_size, metadata=metadata)
        if tp_size == 1:
            self._metadata_by_rank = {0: metadata}

    def metadata_of(self, tp_rank: int) -> bytes | None:
        """Return the encoded metadata that stock readers get for a rank of this engine.

        Args:
            tp_rank: index of the rank.

        Returns:
            The metadata; None if there is no such rank, or `show` has not been called yet.
        """
        return self._metadata_by_rank.get(tp_rank)


def _decode_card(card: bytes) -> _Card:
    if type(card) is not bytes or len(card) > METADATA_BYTES_MAX:
        raise RequestError(f"stock ranks: expected the card of a rank, got {checks.short_repr(card)}")
    return _decoded(card, _CARD)


def _check_equal_fields(cards: Sequence[_Card]) -> None:
    """Raise RequestError if the ranks of `cards` differ in a field in `_EQUAL_FIELDS`."""
    shown = [_decoded(card.metadata, METADATA) for card in cards]
    for name in _EQUAL_FIELDS:
        values = {repr(getattr(one, name)) for one in shown}
        if len(values) > 1:
            raise RequestError(f"stock ranks: {name} of the ranks differ: {', '.join(sorted(values))[:400]}")


def _decoded(data: bytes, decoder: msgspec.msgpack.Decoder[StructT]) -> StructT:
    try:
        return decoder.decode(data)
    except msgspec.MsgspecError as error:
        raise RequestError(
            f"stock ranks: expected a card, got {counted(len(data), 'byte')}: {str(error)[:200]}"
        ) from error
