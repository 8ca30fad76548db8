"""The class `PrefixMap`, which knows from KV events which engines have a prefix in their cache.

Events name blocks by the engine's own hashes and carry the tokens, so kvflow's keys are computed here. A block's key
covers all tokens before the block's end, so a block after an unknown block is skipped. A block is also skipped if its
key depends on something that the event lacks: the path of an adapter, embeddings, or SGLang's salt. vLLM's cache salt
and pictures are marked in the tokens, as in the keys of vLLM's requests. Windows and recurrent state do not count.
"""

from __future__ import annotations

import math
import struct
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterator, Sequence
from hashlib import blake2b
from itertools import islice
from typing import TypeAlias

from kvflow.checks import count, short_repr, text, whole
from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.errors import RequestError
from kvflow.prefix.keys import key_state
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockHash, BlockRemoved, BlockStored, KVEvent

BLOCKS_MAX = 100_000
WHOLE_PROMPT_KINDS = (None, "full_attention", "mla_attention", "sink_full_attention", "unknown")
"""vLLM's kinds of layer groups that keep the KV cache of the whole prompt; None: the event names no kind."""
PIECE_TOKENS, _PIECE_BLOCKS = 2048, 64
"""An event is applied in steps of about this many tokens, but at most this many blocks. Between steps other tasks run.
"""
_DEFAULT_MEDIUM = "GPU"
"""Kind of memory (`medium`) of events that name none: the cache with which the engine computes."""
_PLACES_MAX = 16
"""Maximum number of places (kind of memory, group of layers, hash) to remember for one block; usually there is one for
each group."""

_Place: TypeAlias = tuple[str, int | None, BlockHash]  # kind of memory, group of layers, the engine's hash of the block


class _Block:
    """A block of one engine, in one or more places (kind of memory, group of layers and the engine's own hash).

    `hash_state`: state of the key's hash after all tokens up to the block's end. `parent`: key of the block before.
    `start`, `end`: positions of the block's tokens in the prompt. `children`: number of blocks that follow directly.
    """

    __slots__ = ("children", "end", "hash_state", "key", "parent", "places", "start")

    def __init__(self, key: bytes, hash_state: blake2b, parent: _Block | None, end: int) -> None:
        self.key, self.hash_state, self.end = key, hash_state, end
        self.parent = b"" if parent is None else parent.key
        self.start = 0 if parent is None else parent.end
        self.places: tuple[_Place, ...] = ()
        self.children = 0


class _EngineBlocks:
    """The known blocks of one engine's prefix cache.

    `blocks` has the blocks by key, and `places` by place (kind of memory, group of layers and the engine's own hash).
    An engine may hold a block several times in one kind of memory and group, under the same hash, and publishes an
    event for each copy that it stores or removes. `copies` has the number of copies for each place with more than one.
    `leaves`: keys of the blocks that no other block follows, the oldest first. `block_tokens`: the largest block size
    so far.
    """

    def __init__(self, media: Collection[str | None]) -> None:
        self.media = frozenset(_DEFAULT_MEDIUM if medium is None else medium for medium in media)
        self.places: dict[_Place, _Block] = {}
        self.copies: dict[_Place, int] = {}
        self.blocks: dict[bytes, _Block] = {}
        self.leaves: OrderedDict[bytes, None] = OrderedDict()
        self.block_tokens = 1

    def add_block(self, hash_state: blake2b, place: _Place, parent: _Block | None, tokens: int) -> _Block:
        """Record that `place` holds a block of `tokens` tokens, which follows the block `parent`. Return the block.

        `hash_state`: state of the key's hash after all tokens up to the block's end. `parent`: None for a prompt's
        first block.
        """
        key = hash_state.digest()
        block = self.blocks.get(key)
        if block is None:
            end = tokens if parent is None else parent.end + tokens
            block = self.blocks[key] = _Block(key, hash_state, parent, end)
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
            self._remove_place(place)  # the engine may have used the same hash for another block
            if len(block.places) < _PLACES_MAX:
                self.places[place] = block
                block.places += (place,)
        return block

    def _remove_place(self, place: _Place) -> None:
        """Remove a place (kind of memory, group of layers, hash). Forget a block that has no place any longer."""
        self.copies.pop(place, None)
        block = self.places.pop(place, None)
        if block is not None:
            block.places = tuple(other for other in block.places if other != place)
            if not block.places:
                self._drop_block(block)

    def remove_steps(self, event: BlockRemoved) -> Iterator[None]:
        """Remove one copy of each block in the event. If that was the only copy, remove the place. Yield after each."""
        for name in event.block_hashes:
            place = (_medium_of(event), event.group_idx, name)
            copies = self.copies.pop(place, 1) - 1
            if copies > 1:
                self.copies[place] = copies
            elif not copies:
                self._remove_place(place)
            yield

    def clear_steps(self, medium: str) -> Iterator[None]:
        """Record that memory of the kind `medium` holds no blocks. Yield after each entry removed from `places`."""
        for place in [place for place in self.places if place[0] == medium]:
            self._remove_place(place)
            yield

    def parent_of(self, event: BlockStored) -> _Block | None:
        """Return the block before the event's first block, or None if there is none or that block is unknown.

        Search the event's kind of memory first, then the others, since the engine may have moved the block.
        """
        group, name = event.group_idx, event.parent_block_hash
        if name is None:
            return None
        places = ((medium, group, name) for medium in (_medium_of(event), *self.media))
        return next((self.places[place] for place in places if place in self.places), None)

    def forget_oldest(self) -> None:
        """Forget the oldest block that no other block follows."""
        key = next(iter(self.leaves), None) or next(reversed(self.blocks))
        for place in self.blocks[key].places:
            self._remove_place(place)

    def _drop_block(self, block: _Block) -> None:
        """Forget a block. If the block's parent has no other child, make the parent the oldest of `leaves`."""
        del self.blocks[block.key]
        self.leaves.pop(block.key, None)
        parent = self.blocks.get(block.parent)
        if parent is not None:
            parent.children -= 1
            if parent.children <= 0:  # negative if the parent was removed and stored again meanwhile
                self.leaves[parent.key] = None
                self.leaves.move_to_end(parent.key, last=False)

    def matched_tokens(self, keys: Sequence[bytes], key_tokens: int) -> int:
        """Return how many leading tokens of a prefix are in known blocks of the engine: a multiple of `key_tokens`."""
        have, stride = 0, math.lcm(key_tokens, self.block_tokens)
        for end, key in enumerate(keys, 1):
            block = self.blocks.get(key)
            if block is None:
                if end * key_tokens - have >= stride:
                    break
                continue
            before: _Block | None = block
            while before is not None and before.start > have:
                before = self.blocks.get(before.parent)
            if before is None:
                break
            have = end * key_tokens
        return have


class PrefixMap:
    """Map of prefixes to the engines that have them, built from KV events. Its answers are hints, which may be wrong.

    Args:
        salt: salt of all keys that the map is asked for.
        blocks_max: maximum number of blocks to remember for all engines together. To make room, the map takes the
            engine with most blocks, and forgets the oldest of that engine's blocks that no other block follows.
        media: kinds of memory that count as the engine's cache. An entry None stands for events that name no kind.
            Events about other kinds are ignored.

    Raises:
        RequestError: `salt` is not bytes or is too long, `blocks_max` is below 1, or `media` are no list of texts.
    """

    def __init__(
        self, *, salt: bytes = b"", blocks_max: int = BLOCKS_MAX, media: Collection[str | None] = (None, "GPU")
    ) -> None:
        self._empty_state = key_state(salt)
        self._blocks_max = whole(blocks_max, "blocks_max", least=1)
        count(media, "media")
        self._media = frozenset(None if medium is None else text(medium, "media") for medium in media)
        self._holders: dict[str, _EngineBlocks] = {}

    @property
    def blocks(self) -> int:
        """Number of blocks in the map, for all engines together."""
        return sum(len(engine_blocks.blocks) for engine_blocks in self._holders.values())

    def holders(self, keys: Sequence[bytes], key_tokens: int) -> list[tuple[str, int]]:
        """Return the engines that, as far as the map knows, have at least the beginning of a prefix.

        Args:
            keys: keys of the prefix, made by `prefix_keys` with the map's salt.
            key_tokens: the `block_tokens` that the keys were made with.

        Returns:
            Pairs of an engine's name and the number of leading tokens that the engine has, most tokens first.

        Raises:
            RequestError: `keys` are no list of bytes, or `key_tokens` is below 1.
        """
        if count(keys, "keys") and {*map(type, keys)} != {bytes}:
            raise RequestError("keys: expected a list of bytes")
        step = whole(key_tokens, "key_tokens", least=1)
        matched = [(name, holder.matched_tokens(keys, step)) for name, holder in self._holders.items()]
        return sorted((pair for pair in matched if pair[1]), key=lambda pair: -pair[1])

    def apply(self, holder: str, event: KVEvent) -> None:
        """Apply an event of the engine `holder` to the map.

        Args:
            holder: name of the engine in results of `PrefixMap.holders`, such as its address.
            event: a `BlockStored`, `BlockRemoved` or `AllBlocksCleared`.

        Raises:
            RequestError: `event` has another type.
        """
        for _ in self.steps(holder, event):
            pass

    def steps(self, holder: str, event: KVEvent) -> Iterator[None]:
        """Return an iterator that applies an event, a few blocks at each step.

        Args:
            holder: name of the engine, as for `apply`.
            event: a `BlockStored`, `BlockRemoved` or `AllBlocksCleared`.

        Returns:
            An iterator. Exhaust it before the engine's next event; other tasks may run between its steps.

        Raises:
            RequestError: `event` has another type; raised by the iterator.
        """
        if not isinstance(event, KVEvent):
            raise RequestError(
                f"event: expected BlockStored, BlockRemoved or AllBlocksCleared, got {short_repr(event)}"
            )
        if isinstance(event, AllBlocksCleared) and event.medium is None:
            yield from self.forgetting(holder)
        elif event.medium in self._media:
            engine_blocks = self._holders.setdefault(holder, _EngineBlocks(self._media))
            if isinstance(event, BlockStored):
                blocks = self._store_steps(engine_blocks, event)
                piece = max(1, PIECE_TOKENS // max(event.block_size, PIECE_TOKENS // _PIECE_BLOCKS))
            elif isinstance(event, BlockRemoved):
                blocks, piece = engine_blocks.remove_steps(event), _PIECE_BLOCKS
            else:
                blocks, piece = engine_blocks.clear_steps(_medium_of(event)), _PIECE_BLOCKS
            while sum(1 for _ in islice(blocks, piece)) and self._holders.get(holder) is engine_blocks:
                self._evict_excess()
                yield

    def forget(self, holder: str) -> None:
        """Forget all blocks of an engine, because the engine is gone or events were lost.

        Args:
            holder: name of the engine, as given to `apply`; an unknown name is ignored.
        """
        for _ in self.forgetting(holder):
            pass

    def forgetting(self, holder: str) -> Iterator[None]:
        """Return an iterator that forgets all blocks of an engine in several steps.

        The first step removes all blocks from the map; the others free memory.

        Args:
            holder: name of the engine, as given to `apply`; an unknown name is ignored.

        Returns:
            An iterator. Exhaust it before the engine's next event; other tasks may run between its steps.
        """
        known = self._holders.pop(holder, None)
        while known is not None and known.places:
            for _ in range(min(8 * _PIECE_BLOCKS, len(known.places))):
                known.blocks.pop(known.places.popitem()[1].key, None)
            yield

    def _store_steps(self, engine_blocks: _EngineBlocks, event: BlockStored) -> Iterator[None]:
        """Add the event's blocks to `engine_blocks`. Yield after each block.

        The iterator ends early at a block if the block's key cannot be computed, or if the block that precedes it in
        the prompt is unknown.
        """
        size, place = event.block_size, (_medium_of(event), event.group_idx)
        parent = engine_blocks.parent_of(event)
        if not _has_known_keys(event) or (parent is None and event.parent_block_hash is not None):
            return
        for at, name in enumerate(event.block_hashes):
            extra = event.extra_keys[at] if event.extra_keys else None
            tokens = _key_bytes_of(event.token_ids[at * size : (at + 1) * size], extra, first=parent is None)
            if tokens is None or (parent is not None and parent.key not in engine_blocks.blocks):
                return
            hash_state = self._empty_state.copy() if parent is None else parent.hash_state.copy()
            hash_state.update(tokens)
            parent = engine_blocks.add_block(hash_state, (*place, name), parent, size)
            yield

    def _evict_excess(self) -> None:
        """While the map has more than `blocks_max` blocks, forget one of the engine that has most blocks."""
        over = self.blocks - self._blocks_max
        for _ in range(over):
            max(self._holders.values(), key=lambda engine_blocks: len(engine_blocks.blocks)).forget_oldest()


def _medium_of(event: KVEvent) -> str:
    """Return the kind of memory that an event names, or else "GPU"."""
    return _DEFAULT_MEDIUM if event.medium is None else event.medium


def _has_known_keys(event: BlockStored) -> bool:
    """Return True if the keys of the event's blocks can be computed, and the blocks' group keeps the whole prompt.

    Keys cannot be computed for blocks of an adapter, for blocks with SGLang's salt, or if tokens are missing.
    """
    names, extra_keys = len(event.block_hashes), event.extra_keys
    return (
        event.kv_cache_spec_kind in WHOLE_PROMPT_KINDS
        and (event.lora_id, event.lora_name, event.cache_salt) == (None, None, None)
        and (extra_keys is None or len(extra_keys) == names)
        and len(event.token_ids) == names * event.block_size
    )


def _key_bytes_of(tokens: list[int], extra: Sequence[str | tuple[str, int]] | None, *, first: bool) -> bytes | None:
    """Return the bytes of a block's tokens from which keys are computed.

    At the position of a cache salt or picture, `marked_by_keys` replaces the token id. `extra`: the block's
    `BlockStored.extra_keys`; if an entry has an unknown form, return None. `first`: the block is the first of a prompt.
    """
    prompt = tokens
    if extra:
        keys: defaultdict[int, list[tuple[str | bytes, ...]]] = defaultdict(list)
        for key in sorted(extra, key=lambda one: isinstance(one, tuple)):
            match key:
                case str() if first:
                    keys[0].append(("cache_salt", key))
                case str(identifier), int(offset) if offset < len(tokens):
                    if offset >= 0:  # a negative offset was marked in the block in which the picture begins
                        keys[offset].append(("mm", identifier))
                case _:
                    return None
        prompt = marked_by_keys(tokens, keys)
    try:
        return struct.pack(f"<{len(prompt)}q", *prompt)
    except struct.error:  # a number beyond 64 signed bits
        return None
