"""Compares the blocks that a reader has loaded with the producer's blocks, and names the first difference."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvflow.testing.caches import PatternCache


def compare_blocks(
    ours: PatternCache,
    our_ids: Sequence[int],
    theirs: PatternCache,
    their_ids: Sequence[int],
    *,
    num_tokens: int | None = None,
    windowed: bool = False,
) -> str | None:
    """Compare the blocks that a consumer has loaded with the producer's blocks, token by token.

    Only layers and heads that both ranks have are compared. The block sizes of the two caches may differ.

    Args:
        ours: The consumer's cache.
        our_ids: Ids of the loaded blocks, in prompt order: all blocks of the prompt, or its last ones.
        theirs: The producer's cache.
        their_ids: Ids of the offered blocks, in prompt order.
        num_tokens: Number of the prompt's tokens; None if every offered block is full.
        windowed: True if the offered blocks are only the prompt's last ones, as in a group with a sliding window.
            `num_tokens` is then required, and earlier tokens are not compared.

    Returns:
        None if every element is equal. Else a sentence about the first difference, which names the engine, layer, block
            and slot on both sides. It also names the place in the producer's cache from which the wrong content comes.
    """
    size, their_size = ours.layout.block_size, theirs.layout.block_size
    full = len(their_ids) * their_size
    stop = full if num_tokens is None else num_tokens if windowed else min(full, num_tokens)
    offered_from = max(-(-stop // their_size) * their_size - full, 0)
    first = -(-stop // size) - len(our_ids)
    tokens = torch.arange(min(max(first * size, offered_from, 0), stop), stop)
    places = torch.tensor(our_ids, dtype=torch.int64)[tokens // size - max(first, 0)], tokens % size
    their_blocks = (tokens - offered_from) // their_size
    their_places = torch.tensor(their_ids, dtype=torch.int64)[their_blocks], tokens % their_size
    heads = [head for head in ours.heads if head in theirs.heads]
    here, there = ([cache.heads.index(head) for head in heads] for cache in (ours, theirs))
    for layer, index in enumerate(ours.layout.layer_indices):
        if index not in theirs.layout.layer_indices or not heads:
            continue
        their_layer = theirs.layout.layer_indices.index(index)
        for part in range(len(ours.parts)):
            found = ours.slots(layer, part)[places][:, here].cpu()
            wrong = (found != theirs.slots(their_layer, part)[their_places][:, there].cpu()).nonzero().tolist()
            if wrong:
                token, head, _ = wrong[0]
                mine, other = ((int(blocks[token]), int(slots[token])) for blocks, slots in (places, their_places))
                holds = theirs.find(found[token, head]) or f"no place of engine {theirs.engine_id!r}"
                which = int(tokens[token])
                return (
                    f"{ours.name_of(layer, part, *mine, here[head])} is not token {which} of the prompt, as in "
                    f"{theirs.name_of(their_layer, part, *other, there[head])}; it holds what is in {holds}"
                )
    return None


def assert_blocks_equal(
    ours: PatternCache,
    our_ids: Sequence[int],
    theirs: PatternCache,
    their_ids: Sequence[int],
    *,
    num_tokens: int | None = None,
) -> None:
    """Assert that `compare_blocks` finds no difference between loaded and offered blocks.

    Args:
        ours: The consumer's cache.
        our_ids: Ids of the loaded blocks.
        theirs: The producer's cache.
        their_ids: Ids of the offered blocks.
        num_tokens: Number of the prompt's tokens; None if every offered block is full.

    Raises:
        AssertionError: An element differs.
    """
    problem = compare_blocks(ours, our_ids, theirs, their_ids, num_tokens=num_tokens)
    assert problem is None, problem


def assert_loaded(
    ours: PatternCache,
    our_ids: Sequence[int],
    theirs: PatternCache,
    their_ids: Sequence[int],
    *,
    num_tokens: int | None = None,
) -> None:
    """Assert that a load has written the offered content into the blocks `our_ids`, and nothing else into `ours`.

    Args:
        ours: The consumer's cache, filled with its pattern before the load.
        our_ids: Ids of the loaded blocks, in prompt order: all blocks of the prompt, or its last ones.
        theirs: The producer's cache.
        their_ids: Ids of the offered blocks, in prompt order.
        num_tokens: Number of the prompt's tokens; None if every offered block is full. Slots after the prompt in the
            last block must still hold the pattern of `ours`.

    Raises:
        AssertionError: A loaded element differs, or another element was written to.
    """
    assert_blocks_equal(ours, our_ids, theirs, their_ids, num_tokens=num_tokens)
    wanted = set(our_ids)
    ours.assert_untouched([block for block in range(ours.layout.num_blocks) if block not in wanted])
    if num_tokens is not None and num_tokens % ours.layout.block_size:
        ours.assert_untouched(our_ids[-1:], first_slot=num_tokens % ours.layout.block_size)
