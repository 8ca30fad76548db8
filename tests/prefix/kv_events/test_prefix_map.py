"""`PrefixMap` against sets that are counted by hand: reported blocks, forgotten blocks, unknown blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_events import SGLANG, VLLM

from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.errors import RequestError
from kvflow.prefix import prefix_keys
from kvflow.prefix.kv_events.batches import AllBlocksCleared, BlockRemoved, BlockStored, decode_batch
from kvflow.prefix.kv_events.prefix_map import PrefixMap
from tests.support.tests_support import each

PROMPT = list(range(1000, 1096))


def names(tokens: Sequence[int], size: int) -> list[int]:
    """An engine's own names for the blocks of a prompt."""
    return [hash((size, *tokens[:end])) for end in range(size, len(tokens) + 1, size)]


def stored(tokens: Sequence[int], size: int, begin: int = 0, **more: Any) -> BlockStored:
    """The blocks of a prompt from the token `begin` on."""
    found = names(tokens, size)
    parent = found[begin // size - 1] if begin else None
    given = {"block_hashes": found[begin // size :], "parent_block_hash": parent, "token_ids": list(tokens[begin:])}
    return BlockStored(**{**given, "block_size": size, "medium": "GPU", **more})


def told(*events: Any, **settings: Any) -> PrefixMap:
    known = PrefixMap(**settings)
    for event in events:
        known.apply("a", event)
    return known


def tokens_known(known: PrefixMap, prompt: Sequence[int] = PROMPT, step: int = 16, salt: bytes = b"") -> int:
    return dict(known.holders(prefix_keys(prompt, step, salt=salt), step)).get("a", 0)


def test_the_holder_of_the_most_comes_first() -> None:
    known = PrefixMap()
    for holder, tokens in (("a", 32), ("b", 96), ("c", 64), ("d", 15)):
        known.apply(holder, stored(PROMPT[:tokens], 16 if tokens > 15 else 5))
    assert known.holders(prefix_keys(PROMPT, 16), 16) == [("b", 96), ("c", 64), ("a", 32)]
    assert known.holders(prefix_keys(PROMPT, 5), 5)[-1] == ("d", 15)
    assert known.holders(prefix_keys(PROMPT[1:], 16), 16) == []
    assert known.holders([], 16) == []


@pytest.mark.parametrize(
    ("size", "step", "tokens"), [(16, 32, 96), (32, 16, 96), (48, 32, 96), (12, 8, 96), (32, 5, 0)]
)
def test_blocks_and_keys_of_other_sizes_meet_at_common_boundaries(size: int, step: int, tokens: int) -> None:
    assert tokens_known(told(stored(PROMPT, size)), step=step) == tokens


def test_a_chain_is_known_as_far_as_all_of_it_is_there() -> None:
    known, found = told(stored(PROMPT, 16)), names(PROMPT, 16)
    known.apply("a", BlockRemoved(block_hashes=[found[2]], medium="GPU"))
    assert tokens_known(known) == tokens_known(known, step=32) == 32
    known.apply("a", stored(PROMPT[:48], 16, begin=32))
    assert tokens_known(known) == 96
    known.apply("a", BlockRemoved(block_hashes=[found[0], 12345, b"?"], medium="GPU"))
    assert tokens_known(known) == 0
    known.apply("a", AllBlocksCleared())
    assert known.blocks == 0


def test_a_chain_grows_from_a_known_parent_only() -> None:
    known = told(stored(PROMPT[:32], 16), stored(PROMPT, 16, begin=32))
    assert tokens_known(known) == 96
    assert told(stored(PROMPT, 16, begin=32)).blocks == 0
    assert told(stored(PROMPT[:32], 16, group_idx=0), stored(PROMPT, 16, begin=32, group_idx=1)).blocks == 2


def test_a_name_that_an_engine_gives_to_other_tokens_is_theirs() -> None:
    known = told(stored(PROMPT[:16], 16, block_hashes=[1]), stored(PROMPT[16:32], 16, block_hashes=[1]))
    assert (tokens_known(known), tokens_known(known, PROMPT[16:]), known.blocks) == (0, 16, 1)


def test_a_block_has_few_names() -> None:
    """Otherwise a block that gets new names without end would take memory without end."""
    known = PrefixMap()
    for name in range(100):
        known.apply("a", stored(PROMPT[:16], 16, block_hashes=[name]))
    known.apply("a", BlockRemoved(block_hashes=list(range(15)), medium="GPU"))
    assert tokens_known(known) == 16
    known.apply("a", BlockRemoved(block_hashes=[15], medium="GPU"))
    assert known.blocks == 0


def test_blocks_of_several_groups_are_there_while_one_has_them() -> None:
    known = told(stored(PROMPT, 16, group_idx=0), stored(PROMPT, 16, group_idx=1))
    known.apply("a", BlockRemoved(block_hashes=names(PROMPT, 16), medium="GPU", group_idx=0))
    assert tokens_known(known) == 96
    known.apply("a", BlockRemoved(block_hashes=names(PROMPT, 16), medium="GPU", group_idx=1))
    assert known.blocks == 0


def test_a_block_that_was_stored_twice_is_there_until_it_was_removed_twice() -> None:
    """vLLM computes a block again that it has, reports both copies, and evicts them one by one."""
    found = names(PROMPT, 16)
    last, again = BlockRemoved(block_hashes=found[-1:], medium="GPU"), stored(PROMPT, 16, begin=80)
    known = told(stored(PROMPT, 16), again, again, last, last)
    assert tokens_known(known) == 96
    known.apply("a", last)
    assert tokens_known(known) == 80
    for event in (last, last, again, again, last):  # what is not there cannot be removed, nor counted below
        known.apply("a", event)
    assert tokens_known(known) == 96
    known.apply("a", AllBlocksCleared())
    for event in (stored(PROMPT, 16), last):  # copies from before the clearing do not count
        known.apply("a", event)
    assert tokens_known(known) == 80


def test_copies_do_not_outlive_their_blocks() -> None:
    known = told(stored(PROMPT[:16], 16, block_hashes=[1]), stored(PROMPT[:16], 16, block_hashes=[1]), blocks_max=1)
    known.apply("a", stored(PROMPT[16:32], 16, block_hashes=[2]))  # the first block is forgotten
    known.apply("a", stored(PROMPT[:16], 16, block_hashes=[1]))
    known.apply("a", BlockRemoved(block_hashes=[1], medium="GPU"))
    assert known.blocks == 0
    twice = told(*[stored(PROMPT[:16], 16, block_hashes=[1])] * 2, stored(PROMPT[16:32], 16, block_hashes=[1]))
    twice.apply("a", BlockRemoved(block_hashes=[1], medium="GPU"))
    assert twice.blocks == 0, "two copies of a block whose name is another's now"


def test_media_are_counted_apart_and_cleared_apart() -> None:
    every = {"media": (None, "GPU", "CPU")}
    moved = [stored(PROMPT, 16), stored(PROMPT, 16, medium="CPU"), BlockRemoved(block_hashes=names(PROMPT, 16))]
    known = told(*moved, **every)
    assert tokens_known(known) == 96, "on the CPU still"
    for cleared, tokens in (("DISK", 96), ("GPU", 96), ("CPU", 0)):
        known.apply("a", AllBlocksCleared(medium=cleared))
        assert tokens_known(known) == tokens
    assert tokens_known(told(stored(PROMPT, 16), AllBlocksCleared(medium="CPU"))) == 96
    assert tokens_known(told(stored(PROMPT, 16), AllBlocksCleared(medium="GPU"))) == 0


@each(("stored_on", "removed_from"), [(None, "GPU"), ("GPU", None), (None, None)])
def test_no_medium_is_the_engines_own(stored_on: str | None, removed_from: str | None) -> None:
    gone = BlockRemoved(block_hashes=names(PROMPT, 16), medium=removed_from)
    assert told(stored(PROMPT, 16, medium=stored_on), gone).blocks == 0


def test_a_part_of_a_prompt_on_another_medium_follows_what_is_in_the_cache() -> None:
    """An engine that moves the end of a prompt to host memory names its parent, which stays where it was."""
    known = told(stored(PROMPT[:48], 16), stored(PROMPT, 16, begin=48, medium="CPU"), media=("GPU", "CPU"))
    assert tokens_known(known) == 96


UNKNOWN: dict[str, list[Any]] = {
    "medium": ["CPU", "DISK"],
    "kv_cache_spec_kind": ["sliding_window", "mamba"],
    "lora_id": [1],
    "lora_name": ["adapter"],
    "cache_salt": ["SGLang's"],
    "block_size": [1 << 20],
    "extra_keys": [[None] * 5, [[("picture", 16)], *[None] * 5]],
    "token_ids": [PROMPT[:-1], [1 << 63, *PROMPT[1:]]],
}


@each(("name", "value"), [(name, value) for name, values in UNKNOWN.items() for value in values])
def test_what_cannot_be_named_as_prompts_are_is_not_known(name: str, value: Any) -> None:
    assert told(stored(PROMPT, 16, **{name: value})).blocks == 0


@each(
    ("more", "tokens"),
    [
        ({"medium": None}, 96),
        ({"kv_cache_spec_kind": "mla_attention"}, 96),
        ({"extra_keys": [None] * 6}, 96),
        ({"extra_keys": [None, ["only the first block has a salt"], *[None] * 4]}, 16),
    ],
)
def test_how_much_of_others_is_known(more: dict[str, Any], tokens: int) -> None:
    assert tokens_known(told(stored(PROMPT, 16, **more))) == tokens


def test_salts_and_pictures_of_vllm_are_marked_as_in_its_prompts() -> None:
    extra = [[("one", 0), ("two", 7), "salt"], [("two", -9)], None, [("three", 15)], [("three", -1)], None]
    known = told(stored(PROMPT, 16, extra_keys=extra))
    keys = {0: [("cache_salt", "salt"), ("mm", "one")], 7: [("mm", "two")], 63: [("mm", "three")]}
    assert tokens_known(known, marked_by_keys(PROMPT, keys)) == 96
    assert tokens_known(known, marked_by_keys(PROMPT, {**keys, 63: [("mm", "four")]})) == 48
    assert tokens_known(known) == 0


def test_a_map_answers_for_its_salt() -> None:
    known = told(stored(PROMPT, 16), salt=b"tenant")
    assert [tokens_known(known, salt=salt) for salt in (b"tenant", b"another", b"")] == [96, 0, 0]


def test_what_the_engines_have_recorded_is_known() -> None:
    events = list(decode_batch(VLLM))
    prompt = marked_by_keys(range(100, 112), {0: [("cache_salt", "salt")], 9: [("mm", "picture")]})
    known = told(*events[:2])
    assert tokens_known(known, prompt, 4) == 12
    known.apply("a", events[3])
    assert tokens_known(known, prompt, 4) == 0
    assert tokens_known(told(*list(decode_batch(SGLANG))[:2]), range(100, 112), 4) == 8


def test_the_oldest_that_nothing_follows_is_forgotten_first() -> None:
    first, second = [*PROMPT[:32], *range(64)], [*PROMPT[:32], *range(64, 128)]
    known = told(stored(first, 16), stored(second, 16), blocks_max=10)
    assert [tokens_known(known, prompt) for prompt in (first, second)] == [96, 96]
    known.apply("a", stored(PROMPT[50:82], 16))
    assert [tokens_known(known, prompt) for prompt in (first, second, PROMPT[50:])] == [64, 96, 32]
    known.apply("a", stored(first[:64], 16))
    known.apply("a", stored(PROMPT[60:92], 16))
    assert [tokens_known(known, prompt) for prompt in (first, second)] == [64, 64], "the first was stored again since"


def test_a_prompt_longer_than_all_that_is_remembered_is_known_from_its_beginning() -> None:
    known = told(stored(range(16 * 500), 16), blocks_max=100)
    assert known.blocks == 100
    assert tokens_known(known, range(16 * 500)) == 1600


def test_a_holder_that_tells_much_makes_others_forget_nothing() -> None:
    known = PrefixMap(blocks_max=20)
    known.apply("quiet", stored(PROMPT, 16))
    for number in range(50):
        known.apply("loud", stored(range(number, number + 160), 16))
    assert known.blocks == 20
    assert ("quiet", 96) in known.holders(prefix_keys(PROMPT, 16), 16)
    known.forget("loud")
    known.forget("nobody")
    assert known.blocks == 6


def test_a_holder_that_is_forgotten_meanwhile_stays_forgotten() -> None:
    for event in (stored(range(16 * 500), 16), BlockRemoved(block_hashes=names(range(16 * 500), 16), medium="GPU")):
        known = told(stored(range(16 * 500), 16))
        steps = known.steps("a", event)
        next(steps)
        known.forget("a")
        assert len(list(steps)) < 2
        assert known.blocks == 0


WHAT = st.sampled_from(["stored", "removed", "cleared"])
STEP = st.tuples(st.sampled_from("ab"), WHAT, st.integers(0, 3), st.integers(0, 6), st.integers(1, 6))


@given(st.lists(STEP, max_size=25))
def test_what_is_known_is_what_a_model_counts(steps: list[tuple[str, str, int, int, int]]) -> None:
    """Prompts that share beginnings, blocks of 2; the model counts the names that each engine has."""
    known, model = PrefixMap(), {"a": Counter[int](), "b": Counter[int]()}
    prompts = [
        [kind, *range(5), *[kind] * 6] if kind % 2 else [*range(6 + kind), *[kind] * (6 - kind)] for kind in range(4)
    ]
    for holder, what, kind, begin, count in steps:
        found = names(prompts[kind], 2)[begin : begin + count]
        if what == "cleared":
            known.apply(holder, AllBlocksCleared())
            model[holder].clear()
        elif what == "removed":
            known.apply(holder, BlockRemoved(block_hashes=found, medium="GPU"))
            model[holder] -= Counter(found)
        elif begin == 0 or names(prompts[kind], 2)[begin - 1] in model[holder]:
            event = stored(prompts[kind][: 2 * (begin + count)], 2, begin=2 * begin)
            known.apply(holder, event)
            model[holder] += Counter(event.block_hashes)
    for prompt in prompts:
        expected = {}
        for holder, has in model.items():
            there = [name in has for name in names(prompt, 2)]
            expected[holder] = 2 * (there.index(False) if False in there else len(there))
        found_tokens = dict(known.holders(prefix_keys(prompt, 2), 2))
        assert {holder: found_tokens.get(holder, 0) for holder in model} == expected
    assert known.blocks == sum(len(has) for has in model.values())


@each(
    ("said", "ask"),
    [
        ("salt", lambda: PrefixMap(salt="tenant")),  # type: ignore[arg-type]
        ("blocks_max", lambda: PrefixMap(blocks_max=0)),
        ("media", lambda: PrefixMap(media="GPU")),
        ("media", lambda: PrefixMap(media=[7])),  # type: ignore[list-item]
        ("event", lambda: PrefixMap().apply("a", None)),  # type: ignore[arg-type]
        ("keys", lambda: PrefixMap().holders(7, 16)),  # type: ignore[arg-type]
        ("keys", lambda: PrefixMap().holders([[1]], 16)),  # type: ignore[list-item]
        ("key_tokens", lambda: PrefixMap().holders([], 0)),
    ],
)
def test_nonsense_is_refused_by_name(said: str, ask: Any) -> None:
    with pytest.raises(RequestError, match=f"^{said}: expected"):
        ask()


def test_keys_of_any_kind_are_a_miss() -> None:
    known = told(stored(PROMPT, 16))
    assert known.holders([b"", b"short", bytes(32)], 16) == []
