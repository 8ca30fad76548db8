"""Comparisons of loaded blocks with offered ones, which name the place of the first difference."""

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
    """Compare blocks that were loaded: None, or the first place that differs and what lies there instead.

    Args:
        ours: The consumer's cache.
        our_ids: The blocks that were loaded; fewer than the prompt's are its last ones.
        theirs: The producer's. Layers and heads that both ranks have are compared; their block sizes may differ.
        their_ids: The blocks that were offered.
        num_tokens: How long the prompt is; None stands for full blocks.
        windowed: Whether the offered blocks are the prompt's last ones, as of a group with a window, which needs
            `num_tokens`. Tokens before them are not compared.

    Returns:
        A sentence that names engine, layer, block and slot on both sides; None if every element is right.
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
    """Assert that loaded blocks hold what was offered, as by `compare_blocks`.

    Args:
        ours: The consumer's cache.
        our_ids: The blocks that were loaded; fewer than the prompt's are its last ones.
        theirs: The producer's cache.
        their_ids: The blocks that were offered.
        num_tokens: How long the prompt is; None stands for full blocks.

    Raises:
        AssertionError: Some element is wrong; it says what `compare_blocks` does.
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
    """Assert that loaded blocks hold what was offered, and everything else in `ours` its own pattern.

    Args:
        ours: The consumer's cache; it was filled with its pattern before the load.
        our_ids: The blocks that were loaded; fewer than the prompt's are its last ones.
        theirs: The producer's cache.
        their_ids: The blocks that were offered.
        num_tokens: How long the prompt is; slots of the last block behind it count as everything else. None stands for
            full blocks.

    Raises:
        AssertionError: Some element is wrong; it names the first place.
    """
    assert_blocks_equal(ours, our_ids, theirs, their_ids, num_tokens=num_tokens)
    wanted = set(our_ids)
    ours.assert_untouched([block for block in range(ours.layout.num_blocks) if block not in wanted])
    if num_tokens is not None and num_tokens % ours.layout.block_size:
        ours.assert_untouched(our_ids[-1:], first_slot=num_tokens % ours.layout.block_size)
