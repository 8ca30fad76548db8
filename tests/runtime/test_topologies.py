"""Any prefill topology to any decode topology: random engines of an in-process cluster, judged by a reference model.

Every example opens a runtime for each rank of two engines, hands one prompt over, and compares every byte of every
cache. `hand_overs` draws from everything that may differ between two engines; each test below gives one family of
differences its share of the examples. Time is virtual: waiting for a lease's hold costs nothing.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvflow import LoadRequest, RuntimeState
from kvflow.core.cache.layout import KVStyle
from kvflow.errors import PeerIncompatible
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, run_virtual
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.core.caches import DTYPES
from tests.support.budgets import examples
from tests.support.hand_overs import (
    Arrival,
    HandOver,
    LayerPart,
    Paths,
    one_part,
    open_engine,
    open_producer,
    run,
    serve,
    ticket_of,
)
from tests.support.reference_model import Engine, Look, Model
from tests.support.tests_support import in_virtual_time

RANKS_MAX = 16  # of both engines together

# Passing takes seconds; finding a small counterexample may take the five minutes that Hypothesis gives itself.
pytestmark = pytest.mark.timeout(600)
family = examples(24, 95, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)

_STYLES = (KVStyle.KV_FIRST, KVStyle.BLOCKS_FIRST, KVStyle.APART, KVStyle.FUSED)


# --- what is drawn

looks = st.builds(
    Look,
    style=st.sampled_from(_STYLES),
    order=st.sampled_from(["NHD", "HND"]),
    hnd_in_memory=st.booleans(),
    outer=st.permutations(("layer", "kv", "block")).map(tuple),
    shared=st.booleans(),
    block_padding=st.sampled_from([0, 0, 0, 1, 5]),
    spare_blocks=st.sampled_from([0, 0, 1]),
    layers_reversed=st.booleans(),
    layers_named=st.booleans(),
)

slices = st.builds(
    Paths,
    slice_bytes_max=st.sampled_from([1 << 24, 1 << 24, 400, 33]),
    slice_descriptors_max=st.sampled_from([8192, 8192, 9, 2]),
)

buffers = st.builds(
    Paths,
    staged=st.tuples(st.booleans(), st.booleans()),
    scratch=st.sampled_from(["auto", "always", "always", "never"]),
    scratch_slot_bytes_max=st.sampled_from([1 << 16, 1 << 10, 200]),
    slice_bytes_max=st.sampled_from([1 << 24, 500]),
)


@st.composite
def models(draw: st.DrawFn, *, latent: bool, layers_min: int) -> Model:
    return Model(
        layers=draw(st.integers(layers_min, 4)),
        kv_heads=1 if latent else draw(st.sampled_from([1, 2, 3, 4, 6, 8])),
        head_size=draw(st.sampled_from([1, 2, 3, 4, 8])),
        dtype=draw(st.sampled_from(DTYPES)),
        latent=latent,
    )


@st.composite
def stages(draw: st.DrawFn, layers: int, pp_size: int) -> tuple[tuple[int, ...], ...]:
    """The layers split among stages: neighbours stay together, or are dealt out in turn."""
    if pp_size > 1 and draw(st.integers(0, 4)) == 0:
        return tuple(tuple(range(layers))[stage::pp_size] for stage in range(pp_size))
    cuts = st.lists(st.integers(1, max(layers - 1, 1)), min_size=pp_size - 1, max_size=pp_size - 1, unique=True)
    edges = [0, *sorted(draw(cuts)), layers]
    return tuple(tuple(range(start, stop)) for start, stop in itertools.pairwise(edges))


@st.composite
def scattered(draw: st.DrawFn, count: int, num_blocks: int) -> tuple[int, ...]:
    """Ids of `count` blocks: in order, or runs of neighbours shuffled."""
    seed = draw(st.integers(0, 99))
    if seed == 0:
        return tuple(range(count))
    random = Random(seed)
    cuts = sorted({0, num_blocks, *(random.randrange(num_blocks) for _ in range(seed % num_blocks))})
    runs = [list(range(start, stop)) for start, stop in itertools.pairwise(cuts)]
    random.shuffle(runs)
    return tuple(block for blocks in runs for block in blocks)[:count]


@st.composite
def engine_pairs(
    draw: st.DrawFn, tp_sizes: Sequence[int], pp_sizes: Sequence[int], latent: bool, sharded: bool
) -> tuple[Engine, Engine]:
    """Draw producer and consumer, one block each. `sharded`: the tokens of one or both are sharded."""
    pp_size, their_pp_size = draw(st.tuples(st.sampled_from(pp_sizes), st.sampled_from(pp_sizes)))
    model = draw(models(latent=latent, layers_min=max(pp_size, their_pp_size)))
    sizes = [
        (ours, theirs)
        for ours, theirs in itertools.product(tp_sizes, tp_sizes)
        if _divides(ours, theirs) and _divides(ours, model.kv_heads) and _divides(theirs, model.kv_heads)
        if ours * pp_size + theirs * their_pp_size <= RANKS_MAX
    ]
    tp_size, their_tp_size = draw(st.sampled_from(sizes))
    small, factor = draw(st.integers(1, 4)), draw(st.sampled_from([1, 1, 2, 3, 4]))
    block_size, their_block_size = draw(st.permutations([small, small * factor]))
    ours, theirs = draw(st.sampled_from([(True, True), (True, False), (False, True)])) if sharded else (False, False)
    return (
        replace(draw(engines(model, tp_size, pp_size, block_size)), sharded=ours),
        replace(draw(engines(model, their_tp_size, their_pp_size, their_block_size)), sharded=theirs),
    )


@st.composite
def engines(draw: st.DrawFn, model: Model, tp_size: int, pp_size: int, block_size: int) -> Engine:
    return Engine(
        model=model,
        tp_size=tp_size,
        stages=draw(stages(model.layers, pp_size)),
        block_size=block_size,
        num_blocks=1,
        looks=tuple(draw(st.lists(looks, min_size=1, max_size=3))),
        states_heads=draw(st.booleans()),
        dp_rank=draw(st.sampled_from([0, 0, 0, 0, 0, 1])),
    )


@st.composite
def prompts(draw: st.DrawFn, producer: Engine, consumer: Engine) -> tuple[int, int, int]:
    """(tokens, offered blocks, wanted blocks)."""
    size = producer.block_tokens
    larger = max(size, consumer.block_tokens)
    num_tokens = draw(st.integers(1, 4)) * larger - draw(st.integers(0, larger - 1))
    needed, full = -(-num_tokens // size), num_tokens // size
    offered = draw(st.sampled_from([needed, needed, needed, full]) | st.integers(1, needed))
    most = -(-min(num_tokens, offered * size) // consumer.block_tokens)
    cached = draw(st.sampled_from([0, 0, 0, most // 2]) | st.integers(0, most))
    return num_tokens, offered, most - cached


@st.composite
def hand_overs(
    draw: st.DrawFn,
    *,
    tp_sizes: Sequence[int] = (1, 2),
    pp_sizes: Sequence[int] = (1,),
    latent: bool = False,
    sharded: bool = False,
    paths: st.SearchStrategy[Paths] = slices,
) -> HandOver:
    producer, consumer = draw(engine_pairs(tp_sizes, pp_sizes, latent, sharded))
    num_tokens, offered, wanted = draw(prompts(producer, consumer))
    producer = replace(producer, num_blocks=max(offered, 1) + draw(st.integers(0, 3)))
    consumer = replace(consumer, num_blocks=max(wanted, 1) + draw(st.integers(0, 3)))
    ranks = range(len(producer.places))
    fixed_ports = draw(st.booleans())
    some = st.lists(st.sampled_from(ranks), min_size=1, max_size=2, unique=True).map(tuple)
    return one_part(
        producer,
        consumer,
        num_tokens=num_tokens,
        offered=draw(scattered(offered, producer.num_blocks)),
        wanted=draw(scattered(wanted, consumer.num_blocks)),
        named=draw(some if fixed_ports else st.permutations(ranks).map(tuple)),
        fixed_ports=fixed_ports,
        arrival=draw(st.sampled_from(Arrival)),
        paths=draw(paths),
    )


@st.composite
def of_whole_heads(draw: st.DrawFn) -> HandOver:
    """Draw blocks that may be cut only where heads begin, all of them filled."""
    case = draw(hand_overs(tp_sizes=(1, 2, 4), pp_sizes=(1, 2)))
    style = draw(st.sampled_from(_STYLES))
    kv_format = "cpu_fused_vec" if style is KVStyle.FUSED else "cpu_vec"
    (part,) = case.parts
    model, size = replace(part.producer.model, kv_format=kv_format), part.producer.block_size
    blocks = draw(st.integers(1, 4))

    def cut(side: Engine) -> Engine:
        looks = tuple(replace(look, style=style, hnd_in_memory=True) for look in side.looks)
        return replace(side, model=model, block_size=size, num_blocks=blocks, looks=looks)

    offered, wanted = draw(scattered(blocks, blocks)), draw(scattered(blocks, blocks))
    whole = LayerPart(producer=cut(part.producer), consumer=cut(part.consumer), offered=offered, wanted=wanted)
    return replace(case, parts=(whole,), num_tokens=blocks * size, cached_tokens=0)


def _divides(a: int, b: int) -> bool:
    return a % b == 0 or b % a == 0


# --- the right bytes

FAMILIES = {
    "tensor parallel ranks share heads in any ratio": hand_overs(tp_sizes=(1, 2, 3, 4, 6, 8)),
    "pipelines split layers anywhere": hand_overs(tp_sizes=(1, 2, 4), pp_sizes=(1, 2, 3)),
    "every rank holds the latent": hand_overs(tp_sizes=(1, 2, 4, 8), pp_sizes=(1, 2), latent=True),
    "ranks share the tokens of a latent in any ratio": hand_overs(
        tp_sizes=(1, 2, 3, 4, 6, 8), pp_sizes=(1, 2), latent=True, sharded=True
    ),
    "sharded tokens go through buffers": hand_overs(tp_sizes=(1, 2, 4), latent=True, sharded=True, paths=buffers),
    "any layout fills any other": hand_overs(),
    "whole heads of blocks that nobody can read": of_whole_heads(),
    "bytes that go through buffers are the same": hand_overs(pp_sizes=(1, 2), paths=buffers),
}


@pytest.mark.parametrize("drawn", FAMILIES.values(), ids=FAMILIES)
@family
@given(data=st.data())
def test_the_right_bytes_move(drawn: st.SearchStrategy[HandOver], data: st.DataObject) -> None:
    run_virtual(run(data.draw(drawn), InprocCluster().world()))


@examples(10, 40, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(case=hand_overs(tp_sizes=(1, 2, 4), pp_sizes=(1, 2), paths=buffers))
async def test_sockets_and_threads_change_nothing(case: HandOver) -> None:
    """The same in real time: a ZeroMQ listener for each rank, and copies in threads."""
    network = InprocNetwork()
    await run(case, World(transport=lambda _, name: InprocTransport(name, network)))


# --- what does not go together; all that does not is in `core/plan/test_topology`


def engine(kv_heads: int = 6, layers: int = 3, dtype: torch.dtype = torch.uint8, **changes: Any) -> Engine:
    """One rank of everything, unless told otherwise."""
    model = Model(layers=layers, kv_heads=kv_heads, head_size=4, dtype=dtype, latent=False)
    whole = Engine(model=model, stages=(tuple(range(layers)),), block_size=4, num_blocks=4)
    return replace(whole, **changes)


def opaque(kv_format: str, **changes: Any) -> Engine:
    """The same with heads before tokens, and a format."""
    whole = engine(**{"looks": (Look(hnd_in_memory=True),), **changes})
    return replace(whole, model=replace(whole.model, kv_format=kv_format))


def shards(**changes: Any) -> Engine:
    """Latents, with the tokens of a block on several ranks."""
    whole = engine(kv_heads=1, sharded=True, **changes)
    return replace(whole, model=replace(whole.model, latent=True))


@pytest.mark.parametrize(
    ("producer", "consumer", "message"),
    [
        (engine(tp_size=2), engine(tp_size=3), "tp_size: ours 3, theirs 2: neither divides the other"),
        (engine(), engine(block_size=6), "block_size: ours 6, theirs 4: neither divides the other"),
        (
            engine(kv_heads=8, tp_size=2, states_heads=False),
            engine(kv_heads=4, tp_size=2),
            "num_kv_heads: ours 2 on each of 2 ranks, theirs 4 on each of 2 ranks",
        ),
        (engine(stages=((0,), (2,))), engine(), "layers: ours 3 (0, 1, 2), theirs 2 (0, 2): no stage holds 1 (1)"),
        (
            opaque("cpu_vec", tp_size=2, looks=(Look(),)),
            opaque("cpu_vec"),
            "ours 4 tokens of any heads, 4 bytes of K and V each, theirs 4 tokens of 3 heads, 4 bytes of K and V",
        ),
        (
            opaque("scaled", tp_size=2),
            opaque("scaled"),
            "opaque blocks (kv_format): ours 4 tokens of 6 heads, 4 bytes of K and V each, strides [4, 16], theirs 4",
        ),
        (
            opaque("cpu_vec", block_size=8),
            opaque("cpu_vec"),
            "opaque blocks (kv_format): ours 4 tokens of any heads, 4 bytes of K and V each, theirs 8 tokens of any",
        ),
        (engine(dtype=torch.float16), engine(dtype=torch.bfloat16), "dtype: ours 'bfloat16', theirs 'float16'"),
        (shards(tp_size=2), shards(tp_size=3), "tp_size: ours 3, theirs 2: neither divides the other"),
        (shards(tp_size=2), shards(tp_size=2, block_size=6), "block_size: ours 6, theirs 4: neither divides the other"),
        (shards(tp_size=2), engine(kv_heads=1), "attention: ours 'K and V', theirs 'latent'"),
    ],
    ids=[
        *("tp sizes", "block sizes", "heads", "layers", "heads apart", "heads in one", "tokens of heads", "dtypes"),
        *("ranks with shards", "blocks of shards", "shards to heads"),
    ],
)
@in_virtual_time
async def test_what_does_not_go_together_is_named_and_nothing_is_written(
    producer: Engine, consumer: Engine, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    """No rank of the consumer loads anything, each says why and warns of it once, and the leases stand."""
    world = InprocCluster().world()
    case = one_part(producer, consumer, num_tokens=4, offered=(2,), wanted=(1,))
    async with AsyncExitStack() as stack:
        producers = (await open_producer(stack, case, world))[0]
        consumers = await open_engine(stack, case, 1, world)
        leases = serve(case, producers)
        request = LoadRequest("request", ticket=ticket_of(case, leases), block_ids=case.request_ids(1))
        for rank in consumers:
            for _ in range(3):
                with pytest.raises(PeerIncompatible, match=re.escape(message)):
                    await rank.runtime.load_blocks(request)
            told = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
            assert len(told) == len(set(told)), told
            assert any(message in text and "every load from it fails" in text for text in told)
            caplog.clear()
            assert rank.runtime.state is RuntimeState.OPEN
        assert not any(lease.done for lease in leases)
        for lease in leases:
            lease.revoke()
    for rank in consumers:
        assert not rank.caches[0].difference([], (), (), 0)
