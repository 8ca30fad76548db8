"""State per request between engines with other tensor-parallel sizes: exactly the slots, unit by unit.

The model is like Mamba 2: a convolution over x, B and C, and a recurrent state by heads; there may be fewer groups of B
and C than ranks. Torch indexing alone cuts the holding of a rank out of the model's state.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from kvflow import (
    CacheGroup,
    CacheLayout,
    Lease,
    LoadRequest,
    Runtime,
    Segment,
    ServeRequest,
    StateLayout,
    StateTensor,
    merge_tickets,
)
from kvflow.errors import PeerIncompatible, RequestError
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, assert_closed, assert_quiet, run_virtual
from tests.support.budgets import examples
from tests.support.tests_support import PATIENT, in_virtual_time, limited

BLOCK_SIZE, SENTINEL = 4, -7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    layers: int
    heads: int
    head_dim: int
    states: int
    groups: int
    width: int
    """Of the convolution's memory."""

    def conv(self, kind: str) -> torch.Tensor:
        """(layer, channel, place) of x, B or C: no two entries of the model are equal."""
        channels = self.heads * self.head_dim if kind == "x" else self.groups * self.states
        return numbered({"x": 1, "B": 2, "C": 3}[kind], self.layers, channels, self.width)

    @property
    def ssm(self) -> torch.Tensor:
        return numbered(4, self.layers, self.heads, self.head_dim, self.states)


def numbered(kind: int, *shape: int) -> torch.Tensor:
    found = torch.arange(torch.Size(shape).numel(), dtype=torch.float64).view(shape)
    return found + kind * 1e6


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    model: Model
    tp_size: int = 1
    transposed: bool = False
    """Whether the convolution's channels come last in a slot."""
    sliced: bool = True
    """Whether kvflow knows how slots are cut."""
    slots: int = 3
    packed: bool = False
    """Whether both tensors lie in the rows of one page, as engines lay them out that share pages with attention."""
    staged: bool = False

    def units(self, rank: int, count: int) -> range:
        """Return the units of a rank: a share of the model's units, or units that neighbours hold, too."""
        each = max(count // self.tp_size, 1)
        first = rank * count // self.tp_size
        return range(first, first + each)

    def slot(self, rank: int, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the content of a rank's slot after the prompt."""
        model = self.model
        channels = []
        of_group = (model.groups, model.states)
        for kind, (count, size) in {"x": (model.heads, model.head_dim), "B": of_group, "C": of_group}.items():
            units = self.units(rank, count)
            channels.append(model.conv(kind)[layer, units.start * size : units.stop * size])
        conv = torch.cat(channels)
        heads = self.units(rank, model.heads)
        return (conv.T if self.transposed else conv), model.ssm[layer, heads.start : heads.stop]

    def tensors(self) -> list[StateTensor]:
        """How slots are cut; the same for all ranks."""
        if not self.sliced:
            return [StateTensor(name="conv"), StateTensor(name="ssm")]

        def segment(name: str, count: int, size: int) -> Segment:
            units = len(self.units(0, count))
            return Segment(name=name, size=units * size, units=units, model_units=count)

        model = self.model
        parts = (
            segment("x", model.heads, model.head_dim),
            *(segment(kind, model.groups, model.states) for kind in "BC"),
        )
        conv = StateTensor(name="conv", axis=1 if self.transposed else 0, segments=parts)
        return [conv, StateTensor(name="ssm", segments=(segment("h", model.heads, 1),))]


class Rank:
    """One rank's memory: state of all layers, and K and V of one head per rank beside it."""

    def __init__(self, engine: Engine, rank: int) -> None:
        self.engine, self.rank = engine, rank
        self.state = {f"layers.{layer}.mixer": self._make(layer) for layer in range(engine.model.layers)}
        self.kv = torch.full((2, 6, BLOCK_SIZE, 1, 2), SENTINEL)
        """K and V of one head, which all ranks hold, of an attention layer beside the others."""

    def _make(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        shapes = [tensor.shape for tensor in self.engine.slot(self.rank, layer)]
        sizes = [shape.numel() for shape in shapes]
        if not self.engine.packed:
            conv, ssm = (torch.full((self.engine.slots, *shape), SENTINEL, dtype=torch.float64) for shape in shapes)
            return conv, ssm
        page = torch.full((self.engine.slots, sum(sizes) + 3), SENTINEL, dtype=torch.float64)
        strides = [torch.empty(shape).stride() for shape in shapes]
        conv, ssm = (
            page.as_strided((self.engine.slots, *shape), (page.shape[1], *stride), start)
            for shape, stride, start in zip(shapes, strides, (0, sizes[0]), strict=True)
        )
        return conv, ssm

    def fill(self, slot: int) -> None:
        for layer, (conv, ssm) in enumerate(self.state.values()):
            conv[slot], ssm[slot] = self.engine.slot(self.rank, layer)

    def wrong(self, slot: int | None) -> str:
        """Where it holds anything else than the state of the prompt in that slot, and nothing elsewhere."""
        for layer, pair in enumerate(self.state.values()):
            for name, tensor, right in zip(("conv", "ssm"), pair, self.engine.slot(self.rank, layer), strict=True):
                for at in range(self.engine.slots):
                    wanted = right if at == slot else torch.full_like(right, SENTINEL)
                    if not torch.equal(tensor[at], wanted):
                        return f"rank {self.rank} layer {layer} {name} slot {at}"
                base = tensor if tensor._base is None else tensor._base
                if self.engine.packed and not (base[:, -3:] == SENTINEL).all():
                    return f"rank {self.rank} layer {layer}: what lies between slots was written"
        return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    producer: Engine
    consumer: Engine
    num_tokens: int = 10


async def open_engine(stack: AsyncExitStack, engine: Engine, name: str, world: World) -> list[Any]:
    opened = []
    for number in range(engine.tp_size):
        rank = Rank(engine, number)
        config = replace(
            PATIENT,
            engine_id=name,
            listen="tcp://127.0.0.1:0",
            tp_rank=number,
            tp_size=engine.tp_size,
            num_kv_heads=1,
            staging="always" if engine.staged else "auto",
        )
        runtime = await stack.enter_async_context(
            Runtime(limited(config, seal_hold_s=0.004, leases_max=4), world=world)
        )
        attention = {"layers.0.attn": rank.kv}
        layout = CacheLayout.infer(attention, order="NHD", block_size=BLOCK_SIZE)
        state = CacheGroup("state", rank.state, StateLayout.infer(rank.state, engine.tensors()))
        await runtime.register_kv_caches([CacheGroup("full", attention, layout), state])
        opened.append((rank, runtime))
    return opened


def ticket_of(leases: list[Lease]) -> dict[str, Any]:
    ticket: dict[str, Any] = json.loads(json.dumps(merge_tickets([lease.ticket for lease in leases]).to_params()))
    return ticket


async def run(case: Case, world: World) -> None:
    blocks = -(-case.num_tokens // BLOCK_SIZE)
    offered, wanted = list(range(1, blocks + 1)), list(range(2, blocks + 2))
    async with AsyncExitStack() as stack:
        producers = await open_engine(stack, case.producer, "prefill", world)
        consumers = await open_engine(stack, case.consumer, "decode", world)
        for rank, _ in producers:
            rank.fill(0)
            rank.kv[:, offered] = torch.arange(rank.kv[:, offered].numel(), dtype=torch.float32).view_as(
                rank.kv[:, offered]
            )
        request = ServeRequest("req", {"full": offered, "state": [0]}, num_tokens=case.num_tokens)
        leases = [runtime.serve_blocks(request) for _, runtime in producers]
        load = LoadRequest("req", ticket_of(leases), {"full": wanted, "state": [2]}, verify=True)
        await asyncio.gather(*(runtime.load_blocks(load) for _, runtime in consumers))
        async with asyncio.timeout(60):
            for lease in leases:
                await lease
        for _, runtime in (*producers, *consumers):
            assert_quiet(runtime.statistics())
    for _, runtime in (*producers, *consumers):
        assert_closed(runtime.statistics())
    for ranks, slot in ((producers, 0), (consumers, 2)):
        assert [rank.wrong(slot) for rank, _ in ranks] == [""] * len(ranks)
    for rank, _ in consumers:
        filled = rank.kv[:, wanted].flatten(1, 2)[:, : case.num_tokens]
        assert torch.equal(filled, producers[0][0].kv[:, offered].flatten(1, 2)[:, : case.num_tokens])


engines = st.builds(
    Engine,
    model=st.just(None),
    transposed=st.booleans(),
    packed=st.booleans(),
    staged=st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    model = Model(
        layers=draw(st.integers(1, 2)),
        heads=draw(st.sampled_from([4, 8])),
        head_dim=draw(st.integers(1, 3)),
        states=draw(st.integers(1, 3)),
        groups=draw(st.sampled_from([1, 2, 4])),
        width=draw(st.integers(1, 3)),
    )
    transposed = draw(st.booleans())
    sides = [
        replace(draw(engines), model=model, transposed=transposed, tp_size=draw(st.sampled_from([1, 2, 4])))
        for _ in range(2)
    ]
    return Case(producer=sides[0], consumer=sides[1], num_tokens=draw(st.integers(1, 16)))


@examples(15, 40, suppress_health_check=list(HealthCheck), report_multiple_bugs=False)
@given(case=cases())
def test_every_unit_of_the_state_arrives_where_its_rank_has_it(case: Case) -> None:
    run_virtual(run(case, InprocCluster().world()))


MODEL = Model(layers=2, heads=4, head_dim=2, states=3, groups=1, width=3)


@pytest.mark.parametrize("tp_size", [1, 2])
def test_slots_that_kvflow_cannot_cut_move_whole_between_equal_engines(tp_size: int) -> None:
    engine = Engine(model=MODEL, tp_size=tp_size, sliced=False)
    run_virtual(run(Case(producer=engine, consumer=engine), InprocCluster().world()))


@pytest.mark.parametrize(
    ("producer", "consumer", "problems"),
    [
        (
            Engine(model=MODEL, tp_size=2, sliced=False),
            Engine(model=MODEL, tp_size=1, sliced=False),
            ["model's units of conv.all: ours 1, theirs 2", "model's units of ssm.all: ours 1, theirs 2"],
        ),
        (
            Engine(model=MODEL),
            Engine(model=replace(MODEL, heads=2)),
            ["model's units of conv.x: ours 2, theirs 4", "model's units of ssm.h: ours 2, theirs 4"],
        ),
        (Engine(model=MODEL), Engine(model=MODEL, transposed=True), ["rows of conv.x: ours 3, theirs 1"]),
        (
            Engine(model=MODEL),
            Engine(model=replace(MODEL, layers=3)),
            ["layers with conv.x: ours 3 (0, 1, 2), theirs 2"],
        ),
    ],
    ids=["cannot be cut", "other heads", "turned", "more layers"],
)
@in_virtual_time
async def test_what_does_not_go_together_is_one_error_that_names_all_of_it(
    producer: Engine, consumer: Engine, problems: list[str]
) -> None:
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        producers = await open_engine(stack, producer, "prefill", world)
        consumers = await open_engine(stack, consumer, "decode", world)
        leases = [runtime.serve_blocks(ServeRequest("req", [[1], [0]], num_tokens=4)) for _, runtime in producers]
        for rank, runtime in consumers:
            with pytest.raises(PeerIncompatible) as caught:
                await runtime.load_blocks(LoadRequest("req", ticket_of(leases), [[1], [0]]))
            assert [problem for problem in problems if problem not in str(caught.value)] == []
            assert rank.wrong(None) == ""
        for lease in leases:
            await lease.revoke()


@in_virtual_time
async def test_a_state_is_of_one_slot_and_of_the_whole_prompt() -> None:
    world = InprocCluster().world()
    async with AsyncExitStack() as stack:
        ((_, runtime),) = await open_engine(stack, Engine(model=MODEL), "prefill", world)
        for tables, num_tokens, problem in (
            ([[1], [0, 1]], 4, "2 block ids of group 'state': a state has one slot"),
            ([[1], [0]], 6, "for the whole prompt of 6 tokens; blocks of other groups hold 4"),
            ([[1], []], 4, "0 block ids of group 'state', expected 1 for 4 tokens"),
            ([[1], [3]], 4, "group 'state': block id 3 is not in 0..2"),
        ):
            with pytest.raises(RequestError, match=problem):
                runtime.serve_blocks(ServeRequest("req", tables, num_tokens=num_tokens))
        assert_quiet(runtime.statistics())
