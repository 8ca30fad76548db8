"""Map of prefixes to engines that have them, as their KV events tell: a hint, which may be wrong.

Events name blocks by the engine's own hashes and carry the tokens, so kvflow's keys are computed here. A block's key
takes all tokens before it, so a block with an unknown parent is passed over. So is a block whose keys depend on more
than its event tells: an adapter, whose path is missing, embeddings, SGLang's salt. vLLM's cache salt and pictures are
`marked` as in the prompts of its requests. Only cache groups that keep all of a prompt count; blocks of a window or
with state say less about what is there.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeAlias

from kvflow.checks import count, shown, text, whole
from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.errors import RequestError
from kvflow.prefix.keys import key_state
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

BLOCKS_MAX = 100_000
KEEP_ALL = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
"""vLLM's kinds of groups that keep all of a prompt; None where an event names no kind."""
PIECE_TOKENS, _PIECE_BLOCKS = 2048, 64
"""Tokens and blocks that are taken in at once, about."""
_DEVICE = "GPU"
"""The medium of events that name none: the cache that the engine computes with."""
_PLACES_MAX = 16
"""Names of one block: one in each group of a cache."""

_Place: TypeAlias = tuple[str, int | None, BlockHash]  # medium, group, the engine's name


class _Block:
    """A block that its engine has, in one place or more, and the hash of all tokens up to its end."""

    __slots__ = ("children", "end", "key", "parent", "places", "start", "state")

    def __init__(self, key: bytes, state: blake2b, parent: _Block | None, end: int) -> None:
        self.key, self.state, self.end = key, state, end
        self.parent = b"" if parent is None else parent.key
        self.start = 0 if parent is None else parent.end
        self.places: tuple[_Place, ...] = ()
        self.children = 0


class _Cached:
    """The blocks of one engine.

    An engine may hold a block several times, and tells of each copy that it stores or removes: `copies` counts those of
    places with more than one. `leaves` are the blocks that no other follows, the oldest first.
    """

    def __init__(self, media: Collection[str | None]) -> None:
        self.media = frozenset(_DEVICE if medium is None else medium for medium in media)
        self.places: dict[_Place, _Block] = {}
        self.copies: dict[_Place, int] = {}
        self.blocks: dict[bytes, _Block] = {}
        self.leaves: OrderedDict[bytes, None] = OrderedDict()
        self.block_tokens = 1

    def store(self, state: blake2b, place: _Place, parent: _Block | None, tokens: int) -> _Block:
        key = state.digest()
        block = self.blocks.get(key)
        if block is None:
            end = tokens if parent is None else parent.end + tokens
            block = self.blocks[key] = _Block(key, state, parent, end)
            if parent is not None:
                parent.children += 1
                self.leaves.pop(parent.key, None)
            self.leaves[key] = None
            self.block_tokens = max(self.block_tokens, tokens)
        elif key in self.leaves:
            self.leaves.move_to_end(key)
        if place in block.places:
            self.copies[place] = self.copies.get(place, 1) + 1
        else:
            self._leave(place)  # the name was another block's
            if len(block.places) < _PLACES_MAX:
                self.places[place] = block
                block.places += (place,)
        return block

    def _leave(self, place: _Place) -> None:
        self.copies.pop(place, None)
        block = self.places.pop(place, None)
        if block is not None:
            block.places = tuple(one for one in block.places if one != place)
            if not block.places:
                self._drop(block)

    def removing(self, event: BlockRemoved) -> Iterator[None]:
        """Remove one copy of each block that is named; with the last copy a block is not there any more."""
        for name in event.block_hashes:
            place = (_medium_of(event), event.group_idx, name)
            copies = self.copies.pop(place, 1) - 1
            if copies > 1:
                self.copies[place] = copies
            elif not copies:
                self._leave(place)
            yield

    def clearing(self, medium: str) -> Iterator[None]:
        for place in [place for place in self.places if place[0] == medium]:
            self._leave(place)
            yield

    def parent(self, event: BlockStored) -> _Block | None:
        """Return the block before the event's first one, on its medium or, for a part that was moved, on another."""
        group, name = event.group_idx, event.parent_block_hash
        if name is None:
            return None
        places = ((medium, group, name) for medium in (_medium_of(event), *self.media))
        return next((self.places[place] for place in places if place in self.places), None)

    def forget_oldest(self) -> None:
        """Forget the leaf that was stored first; the block before it may become a leaf."""
        key = next(iter(self.leaves), None) or next(reversed(self.blocks))
        for place in self.blocks[key].places:
            self._leave(place)

    def _drop(self, block: _Block) -> None:
        del self.blocks[block.key]
        self.leaves.pop(block.key, None)
        parent = self.blocks.get(block.parent)
        if parent is not None:
            parent.children -= 1
            if parent.children <= 0:  # below, if it was removed and stored again while others followed it
                self.leaves[parent.key] = None
                self.leaves.move_to_end(parent.key, last=False)

    def tokens(self, keys: Sequence[bytes], key_tokens: int) -> int:
        """Tokens up to the last key for which this and every earlier block is there."""
        have, stride = 0, math.lcm(key_tokens, self.block_tokens)
        for end, key in enumerate(keys, 1):
            block = self.blocks.get(key)
            if block is None:
                if end * key_tokens - have >= stride:
                    break
                continue
            found: _Block | None = block
            while found is not None and found.start > have:
                found = self.blocks.get(found.parent)
            if found is None:
                break
            have = end * key_tokens
        return have


class PrefixMap:
    """Map of engines to how much of a prefix they have, fed by their KV events. It may be wrong, and asks nobody.

    Args:
        salt: That of the keys that it is asked for: a map answers for one salt.
        blocks_max: Blocks that are remembered of all holders together. Beyond that the holder with the most of them
            loses the one that it has not stored for the longest time and that no other follows.
        media: Media whose blocks count; what an engine has moved elsewhere is not in its cache.

    Raises:
        RequestError: A salt that is no bytes or too long, `blocks_max` below 1, or media that are no list of texts.
    """

    def __init__(
        self, *, salt: bytes = b"", blocks_max: int = BLOCKS_MAX, media: Collection[str | None] = (None, "GPU")
    ) -> None:
        self._beginning = key_state(salt)
        self._blocks_max = whole(blocks_max, "blocks_max", least=1)
        count(media, "media")
        self._media = frozenset(None if medium is None else text(medium, "media") for medium in media)
        self._holders: dict[str, _Cached] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks in the map."""
        return sum(len(cached.blocks) for cached in self._holders.values())

    def holders(self, keys: Sequence[bytes], key_tokens: int) -> list[tuple[str, int]]:
        """Holders of the prefix, as far as is known.

        Args:
            keys: Those of `prefix_keys`, by the map's salt.
            key_tokens: The `block_tokens` that they were made with.

        Returns:
            Holders and how many tokens each has, the most first.

        Raises:
            RequestError: `keys` are no list of bytes, or `key_tokens` is below 1.
        """
        if count(keys, "keys") and {*map(type, keys)} != {bytes}:
            raise RequestError("keys: expected a list of bytes")
        step = whole(key_tokens, "key_tokens", least=1)
        found = [(name, holder.tokens(keys, step)) for name, holder in self._holders.items()]
        return sorted((one for one in found if one[1]), key=lambda one: -one[1])

    def apply(self, holder: str, event: KVEvent) -> None:
        """Take in an event.

        Args:
            holder: Whose it is, in the words that `holders` is to answer in, such as its address.
            event: A `BlockStored`, `BlockRemoved` or `AllBlocksCleared`.

        Raises:
            RequestError: It is none of these.
        """
        for _ in self.steps(holder, event):
            pass

    def steps(self, holder: str, event: KVEvent) -> Iterator[None]:
        """Take in an event piece by piece, one for each item: an event can be of many blocks.

        Args:
            holder: As for `apply`.
            event: As for `apply`.

        Returns:
            An iterator to be used up before the holder's next event.

        Raises:
            RequestError: As `apply`, by the iterator.
        """
        if not isinstance(event, KVEvent):
            raise RequestError(f"event: expected one of a prefix cache's, got {shown(event)}")
        if isinstance(event, AllBlocksCleared) and event.medium is None:
            yield from self.forgetting(holder)
        elif event.medium in self._media:
            cached = self._holders.setdefault(holder, _Cached(self._media))
            if isinstance(event, BlockStored):
                blocks = self._storing(cached, event)
                piece = max(1, PIECE_TOKENS // max(event.block_size, PIECE_TOKENS // _PIECE_BLOCKS))
            elif isinstance(event, BlockRemoved):
                blocks, piece = cached.removing(event), _PIECE_BLOCKS
            else:
                blocks, piece = cached.clearing(_medium_of(event)), _PIECE_BLOCKS
            while sum(1 for _ in islice(blocks, piece)) and self._holders.get(holder) is cached:
                self._make_room()
                yield

    def forget(self, holder: str) -> None:
        """Forget all blocks of a holder: it is gone, or its events were lost.

        Args:
            holder: As for `apply`; one that is not known is nothing.
        """
        for _ in self.forgetting(holder):
            pass

    def forgetting(self, holder: str) -> Iterator[None]:
        """Forget a holder in pieces: it has nothing from the first on, and its memory is given back with the last.

        Args:
            holder: As for `apply`.

        Returns:
            An iterator to be used up before the holder's next event.
        """
        known = self._holders.pop(holder, None)
        while known is not None and known.places:
            for _ in range(min(8 * _PIECE_BLOCKS, len(known.places))):
                known.blocks.pop(known.places.popitem()[1].key, None)
            yield

    def _storing(self, cached: _Cached, event: BlockStored) -> Iterator[None]:
        """Take in blocks one by one; stop where their chain, which may be cut meanwhile, does not go on."""
        size, place = event.block_size, (_medium_of(event), event.group_idx)
        parent = cached.parent(event)
        if not _tells_all(event) or (parent is None and event.parent_block_hash is not None):
            return
        for at, name in enumerate(event.block_hashes):
            extra = event.extra_keys[at] if event.extra_keys else None
            tokens = _tokens_of(event.token_ids[at * size : (at + 1) * size], extra, first=parent is None)
            if tokens is None or (parent is not None and parent.key not in cached.blocks):
                return
            state = self._beginning.copy() if parent is None else parent.state.copy()
            state.update(tokens)
            parent = cached.store(state, (*place, name), parent, size)
            yield

    def _make_room(self) -> None:
        over = self.blocks - self._blocks_max
        for _ in range(over):
            max(self._holders.values(), key=lambda cached: len(cached.blocks)).forget_oldest()


def _medium_of(event: KVEvent) -> str:
    return _DEVICE if event.medium is None else event.medium


def _tells_all(event: BlockStored) -> bool:
    """True if the keys of the event's blocks can be computed, and prove that the blocks are there."""
    names, told = len(event.block_hashes), event.extra_keys
    return (
        event.kv_cache_spec_kind in KEEP_ALL
        and (event.lora_id, event.lora_name, event.cache_salt) == (None, None, None)
        and (told is None or len(told) == names)
        and len(event.token_ids) == names * event.block_size
    )


def _tokens_of(tokens: list[int], extra: Sequence[str | tuple[str, int]] | None, *, first: bool) -> bytes | None:
    """A block's tokens as its key takes them; None if its extra keys are unknown."""
    prompt = tokens
    if extra:
        keys: defaultdict[int, list[tuple[str | bytes, ...]]] = defaultdict(list)
        for found in sorted(extra, key=lambda one: isinstance(one, tuple)):
            match found:
                case str() if first:
                    keys[0].append(("cache_salt", found))
                case str(identifier), int(offset) if offset < len(tokens):
                    if offset >= 0:  # else it has begun, and was marked, in a block before
                        keys[offset].append(("mm", identifier))
                case _:
                    return None
        prompt = marked_by_keys(tokens, keys)
    try:
        return struct.pack(f"<{len(prompt)}q", *prompt)
    except struct.error:  # above 64 bits with a sign
        return None
