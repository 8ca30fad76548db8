"""Caches of several groups: every byte of every window arrives, and none that nobody asked for.

Random engines of an in-process cluster, judged token by token, as `test_topologies` does it for one group.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from group_hand_overs import Attention, GroupHandOver, Part, run
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvflow.testing import InprocCluster, run_virtual
from tests.budgets import examples
from tests.hand_overs import Paths
from tests.reference_model import Engine, Model
from tests.runtime.test_topologies import buffers, looks, scattered, slices

pytestmark = pytest.mark.timeout(600)
family = examples(60, 150, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)

attentions = st.one_of(
    st.just(Attention()),
    st.builds(Attention, window=st.integers(1, 24)),
    st.builds(Attention, window=st.integers(1, 24), chunked=st.just(True)),
)


@st.composite
def parts(
    draw: st.DrawFn,
    *,
    layers: Sequence[Sequence[tuple[int, ...]]],
    tp_sizes: tuple[int, int],
    num_tokens: int,
    given: Part | None = None,
) -> Part:
    """`layers` are those of each stage of the producer and of the consumer.

    With a part `given` the producer keeps the same blocks for both, and all of the prompt.
    """
    kv_heads = draw(st.sampled_from([heads for heads in (1, 2, 4) if all(_divides(heads, size) for size in tp_sizes)]))
    model = Model(layers=sum(map(len, layers[0])), kv_heads=kv_heads, head_size=draw(st.sampled_from([1, 2, 4])))
    small, factor = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3]))
    attention = draw(attentions)
    sides, tables = [], []
    sizes = draw(st.permutations([small, small * factor]))
    if given is not None:
        theirs = given.producer.block_size
        whole = [size for size in range(1, theirs + 1) if theirs % size == 0]
        sizes = [theirs, draw(st.sampled_from([*whole, theirs * factor]))]
    for side, size in enumerate(sizes):
        blocks = -(-num_tokens // size)
        first = draw(st.sampled_from([attention.first_block(num_tokens, size)]) | st.just(0))
        if side == 0 and attention.window is None:
            first = 0
        count = blocks - first
        if side == 1:
            count -= draw(st.sampled_from([0, 0, count // 2, count]))
        num_blocks = count + draw(st.integers(1, 3))
        tables.append(draw(scattered(count, num_blocks)))
        if given is not None and side == 0:
            num_blocks, tables = given.producer.num_blocks, [given.offered]
        sides.append(
            Engine(
                model=model,
                tp_size=tp_sizes[side],
                stages=tuple(map(tuple, layers[side])),
                block_size=size,
                num_blocks=num_blocks,
                looks=tuple(draw(st.lists(looks, min_size=1, max_size=2))),
                tells_heads=draw(st.booleans()),
            )
        )
    return Part(producer=sides[0], consumer=sides[1], attention=attention, offered=tables[0], wanted=tables[1])


@st.composite
def group_hand_overs(
    draw: st.DrawFn,
    *,
    tp_sizes: Sequence[tuple[int, int]] = ((1, 1),),
    pp_sizes: Sequence[int] = (1,),
    paths: st.SearchStrategy[Paths] = slices,
) -> GroupHandOver:
    count, num_tokens, merged = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.booleans())
    sizes, stages = draw(st.sampled_from(tp_sizes)), [draw(st.sampled_from(pp_sizes)) for _ in range(2)]
    found: list[Part] = []
    first = 0
    for _ in range(count):
        layers = draw(st.integers(max(stages), 3))
        numbers = tuple(range(first, first + layers))
        split = [[numbers[stage::pp] for stage in range(pp)] for pp in stages]
        given = found[0] if merged and found else None
        found.append(draw(parts(layers=split, tp_sizes=sizes, num_tokens=num_tokens, given=given)))
        if merged and len(found) == 1 and len(found[0].offered) < -(-num_tokens // found[0].producer.block_size):
            merged = False
        first += layers
    return GroupHandOver(
        parts=tuple(found),
        num_tokens=num_tokens,
        one_pool=draw(st.tuples(st.booleans(), st.booleans())),
        by_name=draw(st.booleans()) and not merged,
        merged=merged,
        paths=draw(paths),
    )


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


FAMILIES = {
    "windows of any kind": group_hand_overs(),
    "ranks share heads and layers": group_hand_overs(tp_sizes=((1, 2), (2, 1), (2, 4), (4, 2)), pp_sizes=(1, 2)),
    "through buffers": group_hand_overs(tp_sizes=((1, 1), (1, 2), (2, 1)), paths=buffers),
}


@pytest.mark.parametrize("drawn", FAMILIES.values(), ids=FAMILIES)
@family
@given(data=st.data())
def test_every_token_of_every_window_arrives(drawn: st.SearchStrategy[GroupHandOver], data: st.DataObject) -> None:
    run_virtual(run(data.draw(drawn), InprocCluster().world()))
