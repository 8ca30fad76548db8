"""Parameters and shapes: made for stock readers, read from stock producers, with few imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from stock_engines import LAYERS, MODEL_HEADS, TOKENS, layout_of, stock_cache
from tests_support import any_ticket, each

from kvflow.attention_backends import layout_for_backend
from kvflow.core.cache.groups import GroupFacts, GroupKind
from kvflow.core.cache.layout import CacheLayout
from kvflow.core.cache.regions import map_regions
from kvflow.core.cache.tensors import FIRST_DRAFT_LAYER, NAMED_LAYERS_MAX
from kvflow.core.plan.topology import CacheShare, Rank
from kvflow.core.protocol.addresses import Address
from kvflow.core.protocol.claims import all_regions_from_wire
from kvflow.core.protocol.ticket import Ticket
from kvflow.doctor.stock_engine import describe_cache
from kvflow.errors import ConfigError, PeerIncompatible, RequestError
from kvflow.runtime.peers.handshake import incompatibilities
from kvflow.stock.metadata_conversion import (
    OurCache,
    OurLayers,
    check_tp_size,
    metadata_of,
    our_cache,
    reasons_not_read,
)
from kvflow.stock.params import is_stock_params, make_stock_params, read_stock_params
from kvflow.stock.versions import LINES
from kvflow.stock.wire import METADATA, StockMetadata

ROOT = Path(__file__).parents[2]
CACHE = stock_cache(4)
SHARE = CacheShare(
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    layers=tuple(range(LAYERS)),
    kv_heads=MODEL_HEADS,
    model_kv_heads=MODEL_HEADS,
    latent=False,
    block_size=TOKENS,
)
REGIONS = map_regions(layout_of(CACHE), CACHE)
FULL = GroupFacts(name="all", block_size=TOKENS)
AT = Address("e", Rank(0, 0, 0), "stock+tcp://127.0.0.1:1/1/1")
OURS = OurCache((OurLayers(SHARE, REGIONS),), (FULL,))


def offered(num_tokens: int) -> Ticket:
    ticket = any_ticket()
    blocks = range(-(-num_tokens // ticket.block_size))
    return ticket.without_leases(request_id="secret", block_ids=blocks, num_tokens=num_tokens, ttl_s=9.0)


@pytest.mark.parametrize("line", LINES, ids=[line.version for line in LINES])
def test_params_have_what_their_line_has_and_ours(line: Any) -> None:
    ticket = offered(7)
    params = make_stock_params(ticket, f"{line.version}.0")
    assert set(params) == {*line.params, "kvflow"}
    assert params["remote_block_ids"] == [list(ticket.block_ids)]
    assert Ticket.from_params(params) == ticket
    assert not is_stock_params(params), "a reader of ours takes the seal"
    known = {key: value for key, value in params.items() if key != "kvflow"}
    assert not is_stock_params(known), "whatever a router drops"
    assert Ticket.from_params(known) == ticket
    assert not is_stock_params({**params, "kvflow": None})
    assert not is_stock_params({**known, "kvflow": None})
    foreign = {**known, "remote_request_id": "secret"}
    assert is_stock_params(foreign)
    assert is_stock_params({**foreign, "kvflow": None})
    read = read_stock_params(foreign, arrived=None, lease_s=30.0, block_ids_max=100)
    assert (read.block_ids, read.num_tokens, read.request_id) == (ticket.block_ids, 7, "secret")


def test_a_ticket_without_room_for_its_spare_is_no_stock_one() -> None:
    """Of very many ranks the first is named, which tells where the others are if they have fixed ports."""
    ticket = offered(7)
    ranks = tuple(msgspec.structs.replace(ticket.first, tp_rank=rank) for rank in range(64))
    wide = msgspec.structs.replace(ticket, tp_size=64, ranks=ranks, fixed_ports=True)
    params = make_stock_params(wide, "0.32.0")
    assert Ticket.from_params(params) == wide
    del params["kvflow"]
    assert not is_stock_params(params)
    assert Ticket.from_params(params) == msgspec.structs.replace(wide, ranks=ranks[:1])


def test_a_ticket_without_room_for_anything_is_refused_rather_than_believed() -> None:
    groups = tuple(GroupFacts(name=str(at) * 40, block_size=2) for at in range(64))
    tables = [(0,)] * len(groups)
    many = msgspec.structs.replace(any_ticket(block_size=2), groups=groups, more_block_ids=((),) * 63)
    params = make_stock_params(
        many.without_leases(request_id="secret", block_ids=tables, num_tokens=2, ttl_s=9.0), "0.32.0"
    )
    assert len(Ticket.from_params(params).groups) == 64
    del params["kvflow"]
    assert not is_stock_params(params)
    with pytest.raises(RequestError):
        Ticket.from_params(params)


def test_many_block_ids_are_refused_before_they_are_read() -> None:
    params = make_stock_params(offered(7), "0.32.0")
    foreign = {**params, "remote_request_id": "secret"}
    with pytest.raises(RequestError, match="at most 1"):
        read_stock_params(foreign, arrived=None, lease_s=30.0, block_ids_max=1)


def test_other_versions_are_refused_by_name() -> None:
    with pytest.raises(RequestError, match=r"0\.25"):
        make_stock_params(offered(7), "0.25.0")


@each(
    ("heads", "tp_size", "known", "fits"),
    [
        (4, 1, (), True),
        (2, 2, (), True),
        (1, 4, (), True),
        (1, 8, (), False),
        (1, 8, (8,), True),
        (4, 2, (), False),
        (2, 4, (), False),
        (1, 2, (), False),
    ],
)
def test_a_size_is_believed_where_heads_prove_it(heads: int, tp_size: int, known: tuple[int, ...], fits: bool) -> None:
    share = msgspec.structs.replace(SHARE, kv_heads=heads, tp_size=tp_size)
    if fits:
        check_tp_size(AT, share, OURS, known)
    else:
        with pytest.raises(PeerIncompatible, match="tp_size"):
            check_tp_size(AT, share, OURS, known)


def test_of_mla_no_head_proves_anything() -> None:
    share = msgspec.structs.replace(SHARE, latent=True, kv_heads=1, model_kv_heads=0)
    latent, two = OURS._replace(layer_sets=(OurLayers(share, REGIONS),)), msgspec.structs.replace(share, tp_size=2)
    check_tp_size(AT, share, latent, ())
    check_tp_size(AT, two, latent, (2,))
    with pytest.raises(PeerIncompatible):
        check_tp_size(AT, two, latent, ())


@pytest.mark.parametrize(
    "changes",
    [
        {"groups": (GroupFacts(name="s", block_size=1, kind=GroupKind.STATE),)},
        {"shares": (msgspec.structs.replace(SHARE, part="conv"),)},
        {"groups": (FULL, GroupFacts(name="w", block_size=8, kind=GroupKind.SLIDING, window=4))},
        {"shares": (msgspec.structs.replace(SHARE, pp_size=2),)},
    ],
)
def test_a_cache_that_is_not_exchanged_is_refused(changes: dict[str, Any]) -> None:
    values = {"shares": (SHARE,), "regions": (REGIONS,), "groups": (FULL,), **changes}
    with pytest.raises(ConfigError, match="our cache"):
        our_cache(**values)


def test_a_cache_whose_rows_hold_several_layers_is_refused() -> None:
    """vLLM's packed layouts; its NixlConnector reads whole rows of MLA models, and a kvflow rank has a region each."""
    rows = torch.zeros(4, LAYERS, TOKENS, 8)
    packed = {name: rows[:, layer] for layer, name in enumerate(CACHE)}
    regions = map_regions(CacheLayout.infer(packed, order="NHD", block_size=TOKENS), packed)
    with pytest.raises(ConfigError, match=r"our cache: .* holds several layers .* VLLM_KV_CACHE_LAYOUT=LBHNC"):
        our_cache([msgspec.structs.replace(SHARE, latent=True)], [regions], [FULL])
    assert our_cache([SHARE], [REGIONS], [FULL]).groups == (FULL,)


ROWS_OF_33: dict[str, Any] = {
    "kv_caches_base_addr": [4096],
    "block_lens": [4 * 73728],
    "block_strides": [4 * 73728],
    "kv_cache_layout": "BLHNC",
    "region_group_ids": [0],
    "packed_member_layouts": {f"model.layers.{layer}.self_attn.attn": [layer * 73728, 73728] for layer in range(4)},
}
STATE_OF_33: dict[str, Any] = {"block_lens": [73728] * 2, "ssm_sizes": [192, 256], "region_group_ids": [0, 1]}
"""As the worker of vLLM 0.33 registers the cache of an MLA model in packed rows, and of one with Mamba's state."""


@each(
    ("changes", "named"),
    [
        (ROWS_OF_33, ["packed layers", "theirs is 'BLHNC'"]),
        (STATE_OF_33, ["state per request (ssm_sizes (192, 256))"]),
        ({**STATE_OF_33, "physical_blocks_per_logical_kv_block": 4}, ["state per request", "4 blocks of its kernels"]),
        ({"ple_block_len": 4096}, ["state per request"]),
        ({"region_members": [["a", "b"], []]}, ["packed layers"]),
        ({}, []),
    ],
)
def test_what_is_not_read_from_stock_engines_is_named(changes: dict[str, Any], named: list[str]) -> None:
    plain = {
        "engine_id": "e",
        "agent_metadata": b"",
        "kv_caches_base_addr": [4096, 1 << 30],
        "device_id": 0,
        "num_blocks": 64,
        "block_lens": [73728] * 2,
        "kv_cache_layout": "LBHNC",
        "block_size": 32,
        "ssm_sizes": [0, 0],
        "attn_backend_name": "A",
        "physical_blocks_per_logical_kv_block": 1,
    }
    reasons = reasons_not_read(METADATA.decode(msgspec.msgpack.encode({**plain, **changes})))
    assert len(reasons) == len(named)
    assert all(any(words in reason for reason in reasons) for words in named)


def test_blocks_of_a_format_of_their_own_are_read_whole_between_equal_ranks() -> None:
    """NVFP4: a block has the values of all heads before the scales of all, so no head of it can be read."""
    cache = {name: torch.zeros(4, 2 * 2, 16, 72, dtype=torch.uint8) for name in CACHE}
    layout = layout_for_backend(cache, backend="FLASHINFER", block_size=16, num_kv_heads=2, kv_format="nvfp4")
    regions = map_regions(layout, cache)
    share = msgspec.structs.replace(SHARE, tp_size=2, kv_heads=2, kv_format="nvfp4", block_size=16)
    facts = msgspec.structs.replace(FULL, block_size=16)
    ours = our_cache([share], [regions], [facts])
    for tp_size, heads in ((2, 2), (1, 4), (4, 1)):
        size = heads * 2 * 16 * 72
        stock = StockMetadata(
            engine_id="e",
            agent_metadata=b"",
            kv_caches_base_addr=[1 << (30 + at) for at in range(LAYERS)],
            device_id=0,
            num_blocks=8,
            block_lens=[size] * LAYERS,
            kv_cache_layout="LBHNC",
            block_size=16,
            ssm_sizes=(0, 0),
            attn_backend_name="FLASHINFER",
            physical_blocks_per_logical_kv_block=1,
            region_group_ids=[0] * LAYERS,
        )
        found = metadata_of(AT, stock, "agent/1", ours, tp_size=tp_size)
        local: Any = SimpleNamespace(cache_shares=(share,), regions=(regions,))
        differ = incompatibilities(AT.rank, found, all_regions_from_wire(found.regions), local)
        assert [one for one in differ if "opaque blocks" in one] == ([] if tp_size == 2 else differ)
        assert bool(differ) == (tp_size != 2)


def test_a_cache_is_told_in_a_line() -> None:
    metadata = StockMetadata(
        engine_id="e",
        agent_metadata=b"",
        kv_caches_base_addr=[1],
        device_id=0,
        num_blocks=8,
        block_lens=[64],
        kv_cache_layout="HND",
        block_size=4,
        ssm_sizes=(0, 0),
        attn_backend_name="A",
        physical_blocks_per_logical_kv_block=2,
    )
    told = "1 region of 8 blocks of 4 tokens (2 are one block of vLLM's), 64 bytes each, HND, A, memory unknown"
    assert describe_cache(metadata) == told


WITHOUT = """
import asyncio, sys
import kvflow, kvflow.blocking, kvflow.connector.worker, kvflow.connector.scheduler

async def main():
    config = kvflow.Config(engine_id="e", listen="tcp://127.0.0.1:0", transport="inproc")
    async with kvflow.Runtime(config) as runtime:
        import torch
        cache = {"layers.0": torch.zeros(2, 4, 2, 4, 8)}
        layout = kvflow.CacheLayout.infer(cache, order="HND", block_size=4, style="kv_first")
        await runtime.register_kv_caches(cache, layout)
        try:
            await runtime.load_blocks(kvflow.LoadRequest("r", ticket={"remote_block_ids": [[1]]}, block_ids=[0]))
        except kvflow.errors.RequestError:
            print("refused")

asyncio.run(main())
print(*sorted(name for name in sys.modules if "stock" in name))
"""


def test_who_has_no_stock_peers_imports_nothing_of_them() -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"]


@each(
    ("layers", "order"),
    [
        ((2, 0, 1), (0, 1, 2)),
        ((NAMED_LAYERS_MAX, 0, 1), (0, NAMED_LAYERS_MAX, 1)),  # layer 0's attention and its indexer, and layer 1's
        ((FIRST_DRAFT_LAYER, 1, 0), (0, 1, FIRST_DRAFT_LAYER)),
    ],
)
def test_regions_are_in_a_stock_engines_order(layers: tuple[int, ...], order: tuple[int, ...]) -> None:
    """That of its layers, and a draft model's behind all others: engines before vLLM 0.30 name none."""
    ours = OurCache((OurLayers(msgspec.structs.replace(SHARE, layers=layers), REGIONS),), (FULL,))
    assert tuple(region.layer for region in ours.regions) == order
