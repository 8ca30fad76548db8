"""Caches of several groups: every byte of every window arrives, and no byte that was not requested.

Random engines of an in-process cluster, judged token by token, as `test_topologies` does it for one group.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvflow import CacheGroup, CacheLayout, Config, LoadRequest, Runtime, ServeRequest, merge_tickets
from kvflow.attention_backends import layout_for_backend
from kvflow.errors import LayoutError, RequestError
from kvflow.runtime.memory import CopyDirection
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, run_virtual
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.runtime.test_topologies import buffers, looks, scattered, slices
from tests.support.budgets import examples
from tests.support.hand_overs import FULL, Attention, HandOver, LayerPart, Paths, run
from tests.support.reference_model import Engine, Look, Model
from tests.support.tests_support import PATIENT, WAIT_S, limited, until

pytestmark = pytest.mark.timeout(600)
family = examples(12, 55, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)

attentions = st.one_of(
    st.just(FULL),
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
    given: LayerPart | None = None,
) -> LayerPart:
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
        if side == 1 and attention.window is not None:
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
                states_heads=draw(st.booleans()),
            )
        )
    return LayerPart(producer=sides[0], consumer=sides[1], attention=attention, offered=tables[0], wanted=tables[1])


def cached_tokens(parts: Sequence[LayerPart], num_tokens: int) -> st.SearchStrategy[int]:
    """Tokens that a consumer may have: full blocks of one of its groups, or all that there are."""
    sizes = [part.consumer.block_size for part in parts if part.attention.window is None] or [1]
    full = [count * size for size in sizes for count in range(num_tokens // size + 1)]
    return st.sampled_from([*full, num_tokens])


def behind(part: LayerPart, cached: int, num_tokens: int) -> int:
    """Blocks of a consumer's table that are cached already; those of a window were drawn for themselves."""
    if part.attention.window is not None:
        return 0
    return len(part.wanted) if cached >= num_tokens else cached // part.consumer.block_size


@st.composite
def group_hand_overs(
    draw: st.DrawFn,
    *,
    tp_sizes: Sequence[tuple[int, int]] = ((1, 1),),
    pp_sizes: Sequence[int] = (1,),
    paths: st.SearchStrategy[Paths] = slices,
) -> HandOver:
    count, num_tokens, merged = draw(st.integers(1, 3)), draw(st.integers(1, 40)), draw(st.booleans())
    sizes, stages = draw(st.sampled_from(tp_sizes)), [draw(st.sampled_from(pp_sizes)) for _ in range(2)]
    found: list[LayerPart] = []
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
    cached = draw(st.just(0) | cached_tokens(found, num_tokens))
    return HandOver(
        parts=tuple(replace(part, wanted=part.wanted[behind(part, cached, num_tokens) :]) for part in found),
        num_tokens=num_tokens,
        cached_tokens=cached,
        one_pool=draw(st.tuples(st.booleans(), st.booleans())),
        by_name=draw(st.booleans()) and not merged,
        merged=(merged, False),
        paths=draw(paths),
    )


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


FAMILIES = {
    "windows of any kind": group_hand_overs(),
    "ranks share heads and layers": group_hand_overs(tp_sizes=((1, 2), (2, 1), (2, 4), (4, 2)), pp_sizes=(1, 2)),
    "through buffers": group_hand_overs(tp_sizes=((1, 1), (1, 2), (2, 1)), paths=buffers),
}


def test_layers_of_a_group_that_look_different_go_through_scratch_memory_each_its_own_way() -> None:
    """Both sides have one group, with layers of four heads and of two, of another order on each side."""
    block_ids = (3, 0, 2)
    parts = []
    for numbers, kv_heads in (((0, 2), 4), ((1,), 2)):
        model = Model(layers=len(numbers), kv_heads=kv_heads, head_size=4)
        engine = Engine(model=model, stages=(numbers,), block_size=8, num_blocks=5)
        turned = replace(engine, looks=(Look(order="HND", hnd_in_memory=True),))
        part = LayerPart(producer=engine, consumer=turned, offered=block_ids, wanted=block_ids)
        parts.append(part)
    case = HandOver(parts=tuple(parts), num_tokens=21, merged=(True, True), paths=Paths(scratch="always"))
    run_virtual(run(case, InprocCluster().world()))


@pytest.mark.parametrize("drawn", FAMILIES.values(), ids=FAMILIES)
@family
@given(data=st.data())
def test_every_token_of_every_window_arrives(drawn: st.SearchStrategy[HandOver], data: st.DataObject) -> None:
    run_virtual(run(data.draw(drawn), InprocCluster().world()))


def quantized(heads: int) -> tuple[dict[str, torch.Tensor], list[CacheLayout]]:
    """Two layers of bytes, and beside each the scale of each head of each token, as docs/groups.md has it."""
    values = {f"layers.{at}": torch.randint(-99, 99, (2, 6, 4, heads, 8), dtype=torch.int8) for at in range(2)}
    scales = {f"scales.{at}": torch.rand(2, 6, 4, heads).unsqueeze(-1) for at in range(2)}
    layouts = [
        CacheLayout.infer(values, order="NHD", block_size=4),
        CacheLayout.infer(scales, order="NHD", block_size=4, layer_indices=[1000, 1001]),
    ]
    return {**values, **scales}, layouts


async def test_scales_of_a_quantized_cache_are_layers_of_their_own() -> None:
    """Read from two ranks of two heads each: every value arrives with its scale."""
    config = replace(PATIENT, engine_id="prefill", listen="tcp://127.0.0.1:0", tp_size=2)
    cluster, parts, whole = InprocCluster(), [quantized(2) for _ in range(2)], quantized(4)
    async with (
        Runtime(config, world=cluster.world()) as first,
        Runtime(replace(config, tp_rank=1), world=cluster.world()) as second,
        Runtime(replace(config, engine_id="decode", tp_size=1), world=cluster.world()) as consumer,
    ):
        for runtime, (layers, layouts) in zip((first, second, consumer), (*parts, whole), strict=True):
            await runtime.register_kv_caches([CacheGroup("full", layers, layouts)])
        leases = [runtime.serve_blocks(ServeRequest("req", [1, 2], num_tokens=8)) for runtime in (first, second)]
        ticket = merge_tickets([lease.ticket for lease in leases])
        await consumer.load_blocks(LoadRequest("req", ticket, [5, 0]))
        for lease in leases:
            await lease
    for name, tensor in whole[0].items():
        assert torch.equal(tensor[:, [5, 0]], torch.cat([layers[name][:, [1, 2]] for layers, _ in parts], dim=3))


@pytest.mark.parametrize("heads", [1, 4])
async def test_nvfp4_blocks_of_each_rank_arrive_as_they_are(heads: int) -> None:
    """vLLM's FLASHINFER, on two ranks each: a head has two slots in a block, one for K and one for V."""
    held = max(heads // 2, 1)

    def cache(fill: int) -> dict[str, torch.Tensor]:
        return {"layers.0": torch.full((6, 2 * held, 16, 72), fill, dtype=torch.uint8)}

    cluster, config = InprocCluster(), replace(PATIENT, listen="tcp://127.0.0.1:0", tp_size=2, num_kv_heads=heads)
    ranks = [replace(config, engine_id=name, tp_rank=rank) for name in ("prefill", "decode") for rank in range(2)]
    caches = [cache(fill) for fill in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        runtimes = [await stack.enter_async_context(Runtime(one, world=cluster.world())) for one in ranks]
        for runtime, layers in zip(runtimes, caches, strict=True):
            layout = layout_for_backend(
                layers, backend="FLASHINFER", block_size=16, num_kv_heads=held, kv_format="nvfp4"
            )
            await runtime.register_kv_caches(layers, layout)
        leases = [runtime.serve_blocks(ServeRequest("req", [1, 2], num_tokens=20)) for runtime in runtimes[:2]]
        ticket = merge_tickets([lease.ticket for lease in leases])
        for reader in runtimes[2:]:
            await reader.load_blocks(LoadRequest("req", ticket, [5, 0]))
    for rank in range(2):
        assert [int(block[0, 0, 0]) for block in caches[2 + rank]["layers.0"]] == [rank, *[2 + rank] * 4, rank]


async def test_a_rank_with_another_number_of_heads_than_its_share_is_not_registered() -> None:
    """No engine could load from it."""
    layers = {"layers.0": torch.zeros(2, 6, 16, 4, 8)}
    config = replace(PATIENT, engine_id="e", listen="tcp://127.0.0.1:0", tp_size=2, num_kv_heads=4)
    async with Runtime(config, world=InprocCluster().world()) as runtime:
        with pytest.raises(LayoutError, match="num_kv_heads: 4 on each of 2 ranks, but the model has 4"):
            await runtime.register_kv_caches(layers, CacheLayout.infer(layers, order="NHD", block_size=16))


def split_groups(pool: torch.Tensor) -> list[CacheGroup]:
    """Two groups over the same pages: one with a block in each, one with two smaller ones, as its kernels like it."""
    pages = pool.view(8, 2, 4, 1, 8)
    halves = pool.view(8, 2, 2, 2, 1, 8).flatten(0, 1)
    local, full = {"layers.0": pages}, {"layers.1": halves}
    return [
        CacheGroup("local", local, CacheLayout.infer(local, order="NHD", block_size=4), window=4, pool="pages"),
        CacheGroup("full", full, CacheLayout.infer(full, order="NHD", block_size=2), pool="pages", split=2),
    ]


@pytest.mark.parametrize("staging", ["never", "always"])
async def test_blocks_of_a_group_may_be_parts_of_its_pools(staging: str) -> None:
    """7 tokens: one page of the window, and seven of eight places of two pages, each made of two blocks."""
    config, cluster = replace(PATIENT, listen="tcp://127.0.0.1:0"), InprocCluster()
    pools = [torch.rand(8, 64), torch.zeros(8, 64)]
    async with (
        Runtime(replace(config, engine_id="prefill", staging=staging), world=cluster.world()) as producer,
        Runtime(replace(config, engine_id="decode"), world=cluster.world()) as consumer,
    ):
        for runtime, pool in zip((producer, consumer), pools, strict=True):
            await runtime.register_kv_caches(split_groups(pool))
        lease = producer.serve_blocks(ServeRequest("req", {"local": [5, 1], "full": [6, 7, 4, 5]}, num_tokens=7))
        assert producer.statistics().blocks.leased == 4  # pages 5, 1, 3 and 2
        with pytest.raises(RequestError, match="block 2 of one pool is given for two groups"):
            producer.serve_blocks(ServeRequest("other", {"local": [2], "full": [4]}, num_tokens=2))
        report = await consumer.load_blocks(LoadRequest("req", lease.ticket, {"local": [0, 7], "full": [2, 3, 12, 13]}))
        assert report.blocks == 6
        await lease
    views = [(pool.view(8, 2, 4, 8), pool.view(8, 2, 2, 2, 8).flatten(0, 1)) for pool in pools]
    (ours, ours_full), (theirs, theirs_full) = views
    assert torch.equal(theirs[0, :, 3], ours[5, :, 3])
    assert torch.equal(theirs[7, :, :3], ours[1, :, :3])
    assert torch.equal(theirs_full[[2, 3, 12]], ours_full[[6, 7, 4]])
    assert torch.equal(theirs_full[13, :, 0], ours_full[5, :, 0])
    assert not pools[1][[2, 3, 4, 5]].any(), "pages that no group has named"


async def test_a_group_that_is_not_staged_yet_is_not_read_whatever_is_missing_of_the_others() -> None:
    """A seal has one count for all groups, which are staged one after the other."""
    gate, network = threading.Event(), InprocNetwork()
    made: list[InprocTransport] = []

    def make(_: Config, name: str) -> InprocTransport:
        made.append(InprocTransport(name, network))
        return made[-1]

    def copy(host_caches: Any, pairs: Sequence[tuple[int, int]], direction: CopyDirection) -> None:
        """Wait for the gate, then copy, block by block."""
        gate.wait(WAIT_S)
        for (name, host), (device_id, host_id) in itertools.product(host_caches.items(), pairs):
            assert direction is CopyDirection.TO_HOST
            host[:, host_id] = offered[name][:, device_id]

    offered, loaded = ({f"layers.{at}": torch.zeros(2, 6, 4, 1, 2) for at in range(2)} for _ in range(2))
    for tensor in offered.values():
        tensor.copy_(torch.arange(1, tensor.numel() + 1).view_as(tensor))
    staged = limited(
        replace(PATIENT, listen="tcp://127.0.0.1:0", staging="always"), slice_bytes_max=64, source_ranks_max=4
    )
    async with (
        Runtime(replace(staged, engine_id="prefill"), world=World(transport=make)) as producer,
        Runtime(replace(staged, engine_id="decode", staging="never"), world=World(transport=make)) as consumer,
    ):
        for runtime, caches, copier in ((producer, offered, copy), (consumer, loaded, None)):
            groups = [
                CacheGroup(name, {name: tensor}, CacheLayout.infer({name: tensor}, order="NHD", block_size=4))
                for name, tensor in caches.items()
            ]
            await runtime.register_kv_caches(groups, copy_blocks=copier)
        lease = producer.serve_blocks(ServeRequest("req", [[1, 2], [3, 4, 5]], num_tokens=8 + 4))
        load = consumer.start_load(LoadRequest("req", lease.ticket, [[0, 1], [2, 1]]))
        statistics = made[1].statistics
        await until(lambda: made[1].statistics.reads >= statistics.reads + 3)  # it looks at the seal again and again
        seen = made[1].statistics
        assert seen.bytes_read == 16 * (seen.reads - seen.open_reads), "seals, and nothing else"
        gate.set()
        await load
        await lease
    assert torch.equal(loaded["layers.0"][:, [0, 1]], offered["layers.0"][:, [1, 2]])
    assert torch.equal(loaded["layers.1"][:, [2, 1]], offered["layers.1"][:, [3, 4]])
