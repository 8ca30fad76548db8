"""A draft model on one side only: the layers that both sides have are loaded, and every lease ends."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest
import torch

from kvflow import CacheGroup, CacheLayout, LeaseOutcome, LoadRequest, Runtime, ServeRequest, merge_tickets
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER
from kvflow.errors import LayoutError, PeerIncompatible
from kvflow.runtime.world import World
from kvflow.transport.inproc import InprocNetwork, InprocTransport
from tests.support.tests_support import PATIENT, each

BLOCKS, TOKENS, HEADS, SIZE = 8, 4, 4, 8
MODEL = ("layers.0", "layers.1", "layers.2")
DRAFT = ("draft.0",)
OFFERED, WANTED = (1, 2), (5, 6)
FILL = -7.0

Caches = Mapping[str, torch.Tensor]


def cache(names: Sequence[str], *, seed: int, heads: int = HEADS, draft: tuple[int, int] = (HEADS, SIZE)) -> Caches:
    """A cache with values that tell layers and heads apart. `draft`: heads, and bytes of a head. Seed 0: empty."""
    found = {}
    for at, name in enumerate(names):
        of_draft = name.startswith("draft")
        shape = (2, BLOCKS, draft[0], TOKENS, draft[1]) if of_draft else (2, BLOCKS, heads, TOKENS, SIZE)
        values = torch.arange(2 * BLOCKS * shape[2] * TOKENS * shape[4], dtype=torch.float32).view(shape)
        found[name] = values + 1e5 * (seed + at) if seed else torch.full(shape, FILL)
    return found


def groups(caches: Caches) -> list[CacheGroup]:
    """One group, with a layout for the model and one for a draft of another shape."""
    shapes: dict[torch.Size, dict[str, torch.Tensor]] = {}
    for name, tensor in caches.items():
        shapes.setdefault(tensor.shape, {})[name] = tensor
    layouts = [CacheLayout.infer(some, order="HND", block_size=TOKENS) for some in shapes.values()]
    return [CacheGroup("kv", caches, layouts)]


class Home:
    """Engines of one network."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self._stack = stack
        self._network = InprocNetwork()

    async def open(self, name: str, caches: Caches, **changes: object) -> Runtime:
        config = replace(PATIENT, engine_id=name, listen="tcp://127.0.0.1:0", **changes)  # type: ignore[arg-type]
        world = World(transport=lambda _, agent: InprocTransport(agent, self._network))
        runtime = await self._stack.enter_async_context(Runtime(config, world=world))
        await runtime.register_kv_caches(groups(caches))
        return runtime


@pytest.fixture
async def home() -> AsyncIterator[Home]:
    async with AsyncExitStack() as stack:
        yield Home(stack)


def assert_loaded(theirs: Caches, ours: Caches, common: Sequence[str]) -> None:
    """The common layers are there, and the others, and all other blocks, are as they were."""
    for name, tensor in ours.items():
        expected = torch.full_like(tensor, FILL)
        if name in common:
            expected[:, list(WANTED)] = theirs[name][:, list(OFFERED)]
        assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("draft", [(HEADS, SIZE), (2, SIZE), (HEADS, 16)], ids=["alike", "of other heads", "wider"])
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("side", ["decode", "prefill", "both", "each another"])
async def test_what_both_have_is_loaded(home: Home, side: str, draft: tuple[int, int], verify: bool) -> None:
    """For any shape of the draft. The lease has been read."""
    theirs = cache(MODEL + DRAFT * (side in ("prefill", "both", "each another")), seed=1, draft=draft)
    other = {"each another": ("draft.5",), "prefill": ()}.get(side, DRAFT)
    ours = cache(MODEL + other, seed=0, draft=draft)
    prefill, decode = await home.open("prefill", theirs), await home.open("decode", ours)
    lease = prefill.serve_blocks(ServeRequest("r", OFFERED, 8))
    report = await decode.load_blocks(LoadRequest("r", lease.ticket.to_params(), WANTED, verify=verify))
    assert (report.tokens, report.blocks) == (8, 2)
    assert await lease is LeaseOutcome.READ
    assert_loaded(theirs, ours, [name for name in ours if name in theirs])


async def test_one_line_says_that_a_draft_is_on_one_side(home: Home, caplog: pytest.LogCaptureFixture) -> None:
    prefill = await home.open("prefill", cache(MODEL, seed=1))
    decode = await home.open("decode", cache(MODEL + DRAFT, seed=0))
    for name in ("a", "b"):
        lease = prefill.serve_blocks(ServeRequest(name, OFFERED, 8))
        await decode.load_blocks(LoadRequest(name, lease.ticket.to_params(), WANTED))
        await lease
    (line,) = [
        line
        for line in (one.getMessage() for one in caplog.records if one.levelno == logging.WARNING)
        if "draft" in line
    ]
    assert "engine 'prefill'" in line
    assert "(ours 1, theirs 0)" in line


@pytest.mark.parametrize(("more", "less"), [("decode", "prefill"), ("prefill", "decode")])
async def test_layers_that_are_not_marked_are_refused_with_what_to_set(home: Home, more: str, less: str) -> None:
    """They may as well be some that one engine has forgotten to register: its text would be wrong."""
    caches = {more: cache((*MODEL, "layers.3"), seed=1), less: cache(MODEL, seed=1)}
    runtimes = {name: await home.open(name, some) for name, some in caches.items()}
    lease = runtimes["prefill"].serve_blocks(ServeRequest("r", OFFERED, 8))
    with pytest.raises(PeerIncompatible) as caught:
        await runtimes["decode"].load_blocks(LoadRequest("r", lease.ticket.to_params(), WANTED))
    assert "(0, 1, 2, 3)" in str(caught.value)
    assert f"layer_indices from {FIRST_DRAFT_LAYER} on" in str(caught.value)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("side", ["decode", "prefill", "both"])
async def test_engines_of_another_tensor_parallelism(
    home: Home, side: str, prefill_tp: int, decode_tp: int, staged: bool
) -> None:
    """A draft of half as many heads as its model has, cut as that is."""

    def whole(names: Sequence[str], seed: int) -> Caches:
        return cache(names, seed=seed, draft=(HEADS // 2, SIZE))

    def cut(caches: Caches, rank: int, size: int) -> Caches:
        return {name: some.chunk(size, dim=2)[rank].contiguous() for name, some in caches.items()}

    theirs = whole(MODEL + DRAFT * (side != "decode"), 1)
    ours = whole(MODEL + DRAFT * (side != "prefill"), 0)
    leases, parts = [], []
    for rank in range(prefill_tp):
        config: dict[str, object] = {"tp_rank": rank, "tp_size": prefill_tp, "staging": "always" if staged else "never"}
        prefill = await home.open("prefill", cut(theirs, rank, prefill_tp), **config)
        leases.append(prefill.serve_blocks(ServeRequest("r", OFFERED, 8)))
    ticket = merge_tickets([lease.ticket for lease in leases]).to_params()
    for rank in range(decode_tp):
        parts.append(cut(ours, rank, decode_tp))
        decode = await home.open("decode", parts[-1], tp_rank=rank, tp_size=decode_tp)
        await decode.load_blocks(LoadRequest("r", ticket, WANTED))
    assert [await lease for lease in leases] == [LeaseOutcome.READ] * prefill_tp
    found = {name: torch.cat([part[name] for part in parts], dim=2) for name in ours}
    assert_loaded(theirs, found, [name for name in ours if name in theirs])


@pytest.mark.parametrize(
    ("prefill_stages", "decode_stages"),
    [
        ([MODEL[:2], MODEL[2:] + DRAFT], [MODEL + DRAFT]),
        ([MODEL[:2], MODEL[2:] + DRAFT], [MODEL]),
        ([MODEL[:2], MODEL[2:]], [MODEL + DRAFT]),
        ([MODEL], [MODEL[:1], MODEL[1:] + DRAFT]),
        ([MODEL + DRAFT], [MODEL[:1], MODEL[1:]]),
        ([MODEL[:1], MODEL[1:] + DRAFT], [MODEL[:2], MODEL[2:] + DRAFT]),
    ],
)
async def test_a_draft_on_the_last_stage_of_a_pipeline(
    home: Home, prefill_stages: Sequence[Sequence[str]], decode_stages: Sequence[Sequence[str]]
) -> None:
    """The draft has other heads, so that a stage's tickets are cut into other kinds of layers than another's."""
    theirs: dict[str, torch.Tensor] = {}
    ours: dict[str, torch.Tensor] = {}
    leases = []
    for stage, names in enumerate(prefill_stages):
        some = cache(names, seed=1 + 3 * stage, draft=(2, SIZE))
        theirs |= some
        prefill = await home.open("prefill", some, pp_rank=stage, pp_size=len(prefill_stages))
        leases.append(prefill.serve_blocks(ServeRequest("r", OFFERED, 8)))
    ticket = merge_tickets([lease.ticket for lease in leases]).to_params()
    for stage, names in enumerate(decode_stages):
        some = cache(names, seed=0, draft=(2, SIZE))
        ours |= some
        decode = await home.open("decode", some, pp_rank=stage, pp_size=len(decode_stages))
        await decode.load_blocks(LoadRequest("r", ticket, WANTED))
    assert [await lease for lease in leases] == [LeaseOutcome.READ] * len(prefill_stages)
    assert_loaded(theirs, ours, [name for name in ours if name in theirs])


async def test_a_lease_that_grows(home: Home) -> None:
    theirs, ours = cache(MODEL, seed=1), cache(MODEL + DRAFT, seed=0)
    prefill, decode = await home.open("prefill", theirs), await home.open("decode", ours)
    lease = prefill.serve_blocks(ServeRequest("r", OFFERED, 8, computed_tokens=0))
    load = decode.start_load(LoadRequest("r", lease.ticket.to_params(), WANTED))
    lease.advance(4)
    lease.complete()
    assert (await load).tokens == 8
    assert await lease is LeaseOutcome.READ
    assert_loaded(theirs, ours, MODEL)


async def test_a_draft_in_a_group_of_its_own_gets_no_blocks(home: Home) -> None:
    """Both sides have the group's block table, and one has nothing in it that the other has."""
    theirs, ours = cache(MODEL, seed=1), cache(MODEL + DRAFT, seed=0)
    prefill = await home.open("prefill", theirs)
    config = replace(PATIENT, engine_id="decode", listen="tcp://127.0.0.1:0")
    world = World(transport=lambda _, agent: InprocTransport(agent, home._network))
    async with Runtime(config, world=world) as decode:
        await decode.register_kv_caches([*groups({n: ours[n] for n in MODEL}), *draft_group(ours)])
        lease = prefill.serve_blocks(ServeRequest("r", OFFERED, 8))
        report = await decode.load_blocks(LoadRequest("r", lease.ticket.to_params(), [WANTED, (1, 2)]))
        assert report.tokens == 8
        assert await lease is LeaseOutcome.READ
    assert_loaded(theirs, ours, MODEL)


def draft_group(caches: Caches) -> list[CacheGroup]:
    some = {name: caches[name] for name in DRAFT}
    return [CacheGroup("drafts", some, CacheLayout.infer(some, order="HND", block_size=TOKENS))]


@each(("order"), [("draft.0", "layers.0"), ("layers.0", "draft.0")])
def test_memory_that_a_draft_shares_is_that_of_the_models_layer(order: tuple[str, ...]) -> None:
    """It is read once, for the first layer with it: the other side may have no draft."""
    tensor = torch.zeros(2, BLOCKS, HEADS, TOKENS, SIZE)
    caches = dict.fromkeys(order, tensor)
    layout = CacheLayout.infer(caches, order="HND", block_size=TOKENS)
    found = CacheGroup("kv", caches, layout)
    from kvflow.core.cache.groups import LayerSet

    def regions() -> object:
        return LayerSet(0, found.layers, layout).regions

    if order[0] == "layers.0":
        assert regions()
    else:
        with pytest.raises(LayoutError, match=r"'draft\.0' of a draft model comes before 'layers\.0'"):
            regions()
