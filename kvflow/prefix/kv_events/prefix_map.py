"""Map of prefixes to the engines that have them, built from their KV events: a hint, which may be wrong.

Events name blocks by the engine's own hashes and carry the tokens, so kvflow's keys are computed here. A block's key
takes all tokens before the block's end, so a block with an unknown parent is skipped. A block is also skipped if its
key depends on more than its event says: an adapter, for which the path is missing, embeddings, or SGLang's salt. vLLM's
cache salt and pictures are marked in the tokens, as in the prompts of vLLM's requests. Only cache groups that keep all
of a prompt count; blocks of a window or of state say less about the cache.
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
"""Kinds of vLLM's cache groups that keep all of a prompt; None for an event that names no kind."""
PIECE_TOKENS, _PIECE_BLOCKS = 2048, 64
"""About how many tokens, and how many blocks, of an event are applied before other tasks of the loop run."""
_DEFAULT_MEDIUM = "GPU"
"""Medium (kind of memory) of events that name none: the cache that the engine computes with."""
_PLACES_MAX = 16
"""Maximum number of places of a block, usually one in each cache group. A place is a medium, a group and a hash."""

_Place: TypeAlias = tuple[str, int | None, BlockHash]  # medium, group, the engine's name of the block


class _Block:
    """A block of one engine, in one or more places (medium, cache group and the engine's hash of the block).

    `hash_state` is the running hash of all tokens up to the block's end.
    """

    __slots__ = ("children", "end", "hash_state", "key", "parent", "places", "start")

    def __init__(self, key: bytes, hash_state: blake2b, parent: _Block | None, end: int) -> None:
        self.key, self.hash_state, self.end = key, hash_state, end
        self.parent = b"" if parent is None else parent.key
        self.start = 0 if parent is None else parent.end
        self.places: tuple[_Place, ...] = ()
        self.children = 0


class _EngineBlocks:
    """The blocks of one engine.

    An engine may hold several copies of a block in one place (medium, cache group and the engine's hash of the block),
    and publishes an event for each copy that it stores or removes. `copies` counts the copies in places with more than
    one. `leaves` are the blocks that no other block follows, the oldest first.
    """

    def __init__(self, media: Collection[str | None]) -> None:
        self.media = frozenset(_DEFAULT_MEDIUM if medium is None else medium for medium in media)
        self.places: dict[_Place, _Block] = {}
        self.copies: dict[_Place, int] = {}
        self.blocks: dict[bytes, _Block] = {}
        self.leaves: OrderedDict[bytes, None] = OrderedDict()
        self.block_tokens = 1

    def add_block(self, hash_state: blake2b, place: _Place, parent: _Block | None, tokens: int) -> _Block:
        """Record that the engine has a block of `tokens` tokens in a place, after block `parent`. Return the block.

        `hash_state`: running hash of all tokens up to the block's end.
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
            self._remove_place(place)  # the engine may have used the name for another block
            if len(block.places) < _PLACES_MAX:
                self.places[place] = block
                block.places += (place,)
        return block

    def _remove_place(self, place: _Place) -> None:
        """Forget that a block is in `place`. If this was the block's last place, forget the block."""
        self.copies.pop(place, None)
        block = self.places.pop(place, None)
        if block is not None:
            block.places = tuple(one for one in block.places if one != place)
            if not block.places:
                self._drop_block(block)

    def remove_steps(self, event: BlockRemoved) -> Iterator[None]:
        """Remove one copy of each block that an event names, one for each item of the iterator.

        A place without a copy is removed.
        """
        for name in event.block_hashes:
            place = (_medium_of(event), event.group_idx, name)
            copies = self.copies.pop(place, 1) - 1
            if copies > 1:
                self.copies[place] = copies
            elif not copies:
                self._remove_place(place)
            yield

    def clear_steps(self, medium: str) -> Iterator[None]:
        """Remove all places on a medium (kind of memory), one for each item of the iterator."""
        for place in [place for place in self.places if place[0] == medium]:
            self._remove_place(place)
            yield

    def parent_of(self, event: BlockStored) -> _Block | None:
        """Return the known block before the event's first block, if any.

        It is looked up on the medium of the event first, then on the others, to which the engine may have moved it.
        """
        group, name = event.group_idx, event.parent_block_hash
        if name is None:
            return None
        places = ((medium, group, name) for medium in (_medium_of(event), *self.media))
        return next((self.places[place] for place in places if place in self.places), None)

    def forget_oldest(self) -> None:
        """Forget the block that was stored longest ago, of the blocks that no other block follows."""
        key = next(iter(self.leaves), None) or next(reversed(self.blocks))
        for place in self.blocks[key].places:
            self._remove_place(place)

    def _drop_block(self, block: _Block) -> None:
        """Remove a block. If no other block follows its parent, the parent becomes the oldest leaf."""
        del self.blocks[block.key]
        self.leaves.pop(block.key, None)
        parent = self.blocks.get(block.parent)
        if parent is not None:
            parent.children -= 1
            if parent.children <= 0:  # negative if the parent was removed and stored again meanwhile
                self.leaves[parent.key] = None
                self.leaves.move_to_end(parent.key, last=False)

    def matched_tokens(self, keys: Sequence[bytes], key_tokens: int) -> int:
        """Return how many tokens of a prefix the engine has: up to the last key with only known blocks up to it."""
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
    """Map of prefixes to the engines that have them, fed by KV events. It asks no engine, and may be wrong.

    Args:
        salt: salt of the keys that are looked up; a map answers for one salt.
        blocks_max: maximum number of blocks to remember, over all engines. Beyond that, a block of the engine with most
            blocks is forgotten: of the blocks that no other block follows, the one that was stored longest ago.
        media: kinds of memory that count as the engine's cache. Events about blocks in other kinds are ignored.

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
        """Number of blocks in the map."""
        return sum(len(engine_blocks.blocks) for engine_blocks in self._holders.values())

    def holders(self, keys: Sequence[bytes], key_tokens: int) -> list[tuple[str, int]]:
        """Return the engines that have a beginning of a prefix, as far as the map knows.

        Args:
            keys: keys of the prefix, by `prefix_keys` with the map's salt.
            key_tokens: the `block_tokens` that the keys were made with.

        Returns:
            Pairs of an engine's name and the number of tokens that it has, the engine with most tokens first.

        Raises:
            RequestError: `keys` are no list of bytes, or `key_tokens` is below 1.
        """
        if count(keys, "keys") and {*map(type, keys)} != {bytes}:
            raise RequestError("keys: expected a list of bytes")
        step = whole(key_tokens, "key_tokens", least=1)
        found = [(name, holder.matched_tokens(keys, step)) for name, holder in self._holders.items()]
        return sorted((one for one in found if one[1]), key=lambda one: -one[1])

    def apply(self, holder: str, event: KVEvent) -> None:
        """Apply an event to the map.

        Args:
            holder: name under which `holders` returns the engine, such as its address.
            event: a `BlockStored`, `BlockRemoved` or `AllBlocksCleared`.

        Raises:
            RequestError: `event` is none of these.
        """
        for _ in self.steps(holder, event):
            pass

    def steps(self, holder: str, event: KVEvent) -> Iterator[None]:
        """Apply an event step by step, a few blocks for each item of the iterator, since an event may have many.

        Args:
            holder: as for `apply`.
            event: as for `apply`.

        Returns:
            An iterator, to be exhausted before the holder's next event.

        Raises:
            RequestError: as for `apply`; raised by the iterator.
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
        """Forget all blocks of an engine, because the engine is gone or its events were lost.

        Args:
            holder: as for `apply`; an unknown holder is ignored.
        """
        for _ in self.forgetting(holder):
            pass

    def forgetting(self, holder: str) -> Iterator[None]:
        """Forget all blocks of an engine step by step.

        The first item of the iterator removes all blocks from the map; the others free their memory.

        Args:
            holder: as for `apply`.

        Returns:
            An iterator, to be exhausted before the holder's next event.
        """
        known = self._holders.pop(holder, None)
        while known is not None and known.places:
            for _ in range(min(8 * _PIECE_BLOCKS, len(known.places))):
                known.blocks.pop(known.places.popitem()[1].key, None)
            yield

    def _store_steps(self, engine_blocks: _EngineBlocks, event: BlockStored) -> Iterator[None]:
        """Add the blocks of an event, one for each item of the iterator.

        Stop if the key of a block cannot be computed, or if the block before it has been removed.
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
        """Forget blocks until at most `blocks_max` are left, each of the engine that has most blocks then."""
        over = self.blocks - self._blocks_max
        for _ in range(over):
            max(self._holders.values(), key=lambda engine_blocks: len(engine_blocks.blocks)).forget_oldest()


def _medium_of(event: KVEvent) -> str:
    """Return the medium (kind of memory) of an event, "GPU" if the event names none."""
    return _DEFAULT_MEDIUM if event.medium is None else event.medium


def _has_known_keys(event: BlockStored) -> bool:
    """Return True if the keys of the event's blocks follow from the event, and its group keeps all of a prompt."""
    names, extra_keys = len(event.block_hashes), event.extra_keys
    return (
        event.kv_cache_spec_kind in WHOLE_PROMPT_KINDS
        and (event.lora_id, event.lora_name, event.cache_salt) == (None, None, None)
        and (extra_keys is None or len(extra_keys) == names)
        and len(event.token_ids) == names * event.block_size
    )


def _key_bytes_of(tokens: list[int], extra: Sequence[str | tuple[str, int]] | None, *, first: bool) -> bytes | None:
    """Return a block's tokens as the bytes that its key hashes, with cache salt and pictures marked in them.

    Return None if `extra` has keys of an unknown form. `first`: the block begins a prompt.
    """
    prompt = tokens
    if extra:
        keys: defaultdict[int, list[tuple[str | bytes, ...]]] = defaultdict(list)
        for found in sorted(extra, key=lambda one: isinstance(one, tuple)):
            match found:
                case str() if first:
                    keys[0].append(("cache_salt", found))
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
