"""SGLang's pools that hold more than pages of KV: recurrent state, indexes, scales. Where they can be made on the CPU.

What a request has in a component is named as `send_kv_chunk` of SGLang's prefill server does it, by its own functions.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sglang.srt.configs.mamba_utils import (
    KimiLinearCacheParams,
    KimiLinearStateShape,
    Mamba2CacheParams,
    Mamba2StateShape,
)
from sglang.srt.disaggregation.base.conn import KVArgs, StateType
from sglang.srt.disaggregation.utils import (
    append_state_component,
    build_dsa_tail_transfer_blocks,
    get_dsa_tail_state_indices,
    get_qsa_pending_state_indices,
)
from sglang.srt.mem_cache.deepseek_v4_memory_pool import DeepSeekV4TokenToKVPool
from sglang.srt.mem_cache.memory_pool import (
    DSATokenToKVPool,
    HybridLinearKVPool,
    HybridReqToTokenPool,
    MHATokenToKVPoolMXFP8,
    MiniMaxSparseKVPool,
    MLATokenToKVPool,
)
from sglang.srt.mem_cache.qsa_kv_pool import QSATokenToKVPool

from tests.sglang.sides import HEADS, LAYERS, Rank, Request, Server, arguments, current

REQUESTS = 8
ALL_PAGES = 12
_COMMON: dict[str, Any] = {"dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8}
_INDEX = {"index_head_dim": 128, "kv_cache_dim": 32}
_TAIL = {"index_kpool": 4, "index_kpool_compress": True, "tail_extra_slots": 2, "max_running_requests": REQUESTS}
_HYBRID = {"full_attention_layer_ids": [1, 3]}
WITH_EACH_PAGE = (StateType.BLOCK_SCALE, StateType.MINIMAX_DENSE_KV, StateType.QSA_COMPRESSED)
"""Of which SGLang names all pages of a prompt, whatever of it decode has."""
RING = 5
"""Rows of a request, where a window's ring has an item for each of its tokens."""


@dataclass
class Made:
    """Pools of a rank as SGLang makes them."""

    pool: Any
    page_size: int = 16
    latent: bool = False
    """Whether SGLang calls it an MLA backend; hybrids are none."""
    slots: Any = None
    more: Callable[[KVArgs], None] = lambda args: None


def gdn(tp_size: int, **more: Any) -> Any:
    """Requests and their recurrent state, as of Qwen3-Next."""
    shape = Mamba2StateShape.create(
        tp_world_size=tp_size,
        **{"intermediate_size": 64, "n_groups": 2, "num_heads": 4, "head_dim": 16, "state_size": 8},
        conv_kernel=4,
        conv_shard_groups=[16, 16, 64],
    )
    return _slots(Mamba2CacheParams(shape=shape, layers=[0, 2]), **more)


def kda(tp_size: int) -> Any:
    """Requests and their recurrent state, as of Kimi-Linear: its convolutions are transposed."""
    shape = KimiLinearStateShape.create(tp_world_size=tp_size, num_heads=4, head_dim=16)
    return _slots(KimiLinearCacheParams(shape=shape, layers=[0, 2]))


def _slots(cache_params: Any, **more: Any) -> HybridReqToTokenPool:
    sizes = {"size": REQUESTS, "mamba_size": REQUESTS, "mamba_spec_state_size": REQUESTS, "max_context_len": 64}
    options = {"enable_memory_saver": False, "enable_mamba_extra_buffer": False}
    return HybridReqToTokenPool(
        **sizes, **options, device="cpu", cache_params=cache_params, mamba_layer_ids=[0, 2], **more
    )


def hybrid(slots: Any, tp_size: int, page_size: int = 16, kind: type = HybridLinearKVPool, **more: Any) -> Made:
    heads = {"head_num": max(1, HEADS // tp_size), "head_dim": 8}
    common = {**_COMMON, **_HYBRID, "mamba_pool": slots.mamba_pool}
    pool = kind(size=(ALL_PAGES - 1) * page_size, page_size=page_size, **heads, **common, **more)
    return Made(pool, page_size, slots=slots)


def dsa(page_size: int, **more: Any) -> Made:
    """Latents and their index; the second layer uses the first one's choice, so it has no index."""
    layers = {"layer_num": LAYERS, "skip_topk_layers": [False, True, False]}
    size = (ALL_PAGES - 1) * page_size
    return Made(DSATokenToKVPool(size, page_size, **_COMMON, **_LATENT, **_INDEX, **layers, **more), page_size, True)


def qsa(tp_size: int) -> Made:
    index = {"qsa_index_kv_heads": 1, "qsa_index_head_dim": 16, "qsa_compress_ratio": 4, "qsa_token_topk": 8}
    return hybrid(gdn(tp_size), tp_size, kind=QSATokenToKVPool, num_request_slots=REQUESTS + 1, **index)


def mxfp8(tp_size: int) -> Made:
    shape = {"head_num": HEADS // tp_size, "head_dim": 32, "layer_num": LAYERS}
    common = {**_COMMON, "dtype": torch.float8_e4m3fn}
    return Made(MHATokenToKVPoolMXFP8((ALL_PAGES - 1) * 16, page_size=16, **common, **shape))


def minimax(tp_size: int) -> Made:
    shape = {"head_num": HEADS // tp_size, "head_dim": 8, "idx_head_dim": 16}
    layers = {"dense_layer_ids": [0], "sparse_layer_ids": [1, 2], "disable_value_sparse_layer_ids": [1, 2]}
    size = (ALL_PAGES - 1) * 16
    return Made(MiniMaxSparseKVPool(size, 16, **_COMMON, **shape, **layers, start_layer=0, end_layer=LAYERS))


def deepseek_v4() -> Made:
    """Compressed latents, windows with buffers of unlike items and unlike numbers of items, and state of a request."""
    sizes = {"swa_size": (ALL_PAGES - 1) * 256, "c4_size": 1024, "c128_size": 64, "c4_state_pool_size": 96}
    heads = {"qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": 128}
    states = {"c128_state_pool_size": 64, "c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32}
    pages = {"page_size": 256, "swa_page_size": 256, "layer_num": 4, "compression_ratios": [0, 4, 128, 4]}
    common = {**_COMMON, "dtype": torch.float8_e4m3fn, "max_num_reqs": REQUESTS}
    return Made(DeepSeekV4TokenToKVPool(**sizes, **heads, **states, **pages, **common), 256, True)


def rows() -> Made:
    """Latents with two more components of DeepSeek-V4, as plain tensors in the shape that `setup_state_kv_args` gives.

    SGLang has the ring only with the attention kernels of ROCm, and the row only with a draft model.
    """
    size = (ALL_PAGES - 1) * 16
    pool = MLATokenToKVPool(size, page_size=16, **_COMMON, **_LATENT, layer_num=LAYERS)
    shapes = {StateType.SWA_RING: (REQUESTS * RING, 40), StateType.REQUEST_ROW: (REQUESTS,)}
    held = {kind: [torch.zeros(shape, dtype=torch.float32) for _ in range(LAYERS)] for kind, shape in shapes.items()}
    pool.held_by_the_test = held

    def more(args: KVArgs) -> None:
        for kind, tensors in held.items():
            pointers, sizes = [one.data_ptr() for one in tensors], [one.nbytes for one in tensors]
            append_state_component(args, kind, pointers, sizes, [one[0].nbytes for one in tensors])

    return Made(pool, latent=True, more=more)


KINDS: dict[str, Callable[[int], Made]] = {
    "gdn": lambda tp: hybrid(gdn(tp), tp),
    "ple": lambda tp: hybrid(
        gdn(tp, short_conv_layer_ids=[0, 2], short_conv_state_shape=(12, 3), ngram_context_len=4), tp
    ),
    "kda": lambda tp: hybrid(kda(tp), tp, use_mla=True, **_LATENT),
    "kda-dsa": lambda tp: hybrid(kda(tp), tp, 256, use_mla=True, use_dsa=True, **_LATENT, **_INDEX, **_TAIL),
    "dsa": lambda tp: dsa(64),
    "dsa-tail": lambda tp: dsa(256, **_TAIL),
    "dsa-tail-longer": lambda tp: dsa(256, **{**_TAIL, "tail_extra_slots": 4}),
    "qsa": qsa,
    "mxfp8": mxfp8,
    "minimax": minimax,
    "v4": lambda tp: deepseek_v4(),
    "rows": lambda tp: rows(),
}


@dataclass(eq=False)
class StateServer(Server):
    """A server with a cache of this `kind`."""

    def make_rank(self, tp_rank: int) -> Rank:
        made, aux = KINDS[self.kind](self.tp_size), self.make_aux()
        heads = 1 if made.latent else HEADS
        args = arguments(made.pool, tp_rank, aux, heads=heads, page_size=made.page_size, slots=made.slots)
        made.more(args)
        return Rank(made.pool, aux, self.make_manager(args, made.latent), current(), made.slots)

    def fill(self, seed: int) -> None:
        """Random bytes, other ones in each rank but for latents, and for what goes with nothing but latents."""
        for at, rank in enumerate(self.ranks):
            latent, hybrid = rank.manager.is_mla_backend, rank.manager.kv_args.is_hybrid_mla_backend
            for number, buffers in enumerate(components(rank)):
                alike = latent or (hybrid and number == 0)
                generator = torch.Generator().manual_seed(seed * 1000 + number * 10 + (0 if alike else at))
                for buffer in buffers:
                    buffer.copy_(torch.randint(256, buffer.shape, dtype=torch.uint8, generator=generator))


def components(rank: Rank) -> list[list[torch.Tensor]]:
    """The KV pool and each component of state: buffers as (items, bytes)."""
    args = rank.manager.kv_args
    lists = [(args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens)]
    lists += zip(args.state_data_ptrs, args.state_data_lens, args.state_item_lens, strict=True)
    return [[_view(*one) for one in zip(*three, strict=True) if one[2]] for three in lists]


def _view(pointer: int, size: int, item: int) -> torch.Tensor:
    whole = torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    return whole[: size // item * item].view(-1, item)


@dataclass(eq=False)
class StateRequest(Request):
    """`slot` is the request's row on the prefill server, `target_slot` on the decode server."""

    slot: int = 3
    target_slot: int = 5
    tokens: int = 43
    prefix: Sequence[int] = ()
    """Pages of the prompt that decode has already, on either side."""
    alone: bool = True
    """Whether no other request moves bytes."""
    before: dict[Rank, list[list[torch.Tensor]]] = field(default_factory=dict)

    def send_metadata(self, prefix: int = 0) -> None:
        for rank in self.decode.ranks:
            self.before[rank] = [[one.clone() for one in buffers] for buffers in components(rank)]
        super().send_metadata(prefix)

    def sent_state(self, rank: Rank) -> list[Any]:
        return self._named(rank, self.slot, self.pages)

    def wanted_state(self, rank: Rank) -> list[Any]:
        return self._named(rank, self.target_slot, self.targets)

    def _named(self, rank: Rank, slot: int, pages: Any) -> list[Any]:
        """As the two servers compute it, by the kind of the component."""
        request = SimpleNamespace(kv=SimpleNamespace(req_pool_idx=slot))
        positions = np.arange(self.tokens - RING, self.tokens, dtype=np.int64)
        named: dict[StateType, Callable[[], Any]] = {
            StateType.MAMBA: lambda: [_recurrent(rank, slot).cpu().numpy()],
            StateType.QSA_PENDING: lambda: get_qsa_pending_state_indices(request),
            StateType.DSA_TAIL: lambda: get_dsa_tail_state_indices(_hybrid_of(rank.pool), slot, self.tokens),
            StateType.SWA_RING: lambda: (slot * RING + positions % RING).astype(np.int32),
            StateType.DSV4_REQUEST_STATE: lambda: rank.pool.request_state_transfer_indices(slot, self.tokens),
            StateType.REQUEST_ROW: lambda: np.array([slot], np.int32),
        }
        suffix, all_pages = (np.array(places, np.int32) for places in (pages, [*self.prefix, *pages]))
        named |= dict.fromkeys(WITH_EACH_PAGE, lambda: all_pages)
        return [named.get(kind, lambda: suffix)() for kind in rank.manager.kv_args.state_types]

    def check_bytes(self) -> None:
        """Each item of the request is what the prefill rank has, and no other byte has changed."""
        for at, rank in enumerate(self.decode.ranks):
            source = self.prefill.ranks[at if len(self.prefill.ranks) == len(self.decode.ranks) else 0]
            names = ["kv", *(kind.value for kind in rank.manager.kv_args.state_types)]
            ours, theirs = [self.targets, *self.wanted_state(rank)], [self.pages, *self.sent_state(source)]
            four = (names, components(rank), components(source), self.before[rank])
            for name, has, there, before, items, named in zip(*four, ours, theirs, strict=True):
                moved = slice(0, 1) if name == "dsa_tail" else slice(None)  # then what part of it is live
                if name in WITH_EACH_PAGE:
                    moved = slice(len(self.prefix), None)
                places, origins = [int(one) for one in items[moved]], [int(one) for one in named[moved]]
                looked_at = slice(None) if self.alone else [*self.prefix, *places]
                assert has, name
                for number, (buffer, origin, expected) in enumerate(zip(has, there, before, strict=True)):
                    expected[places] = origin[origins]
                    assert torch.equal(buffer[looked_at], expected[looked_at]), f"{name}: buffer {number}"
            assert rank.aux.output_ids[self.target_row, 0] == 1000 + self.room
            self._check_tail(rank, source)

    def _check_tail(self, rank: Rank, source: Rank) -> None:
        """The live part of a tail is what SGLang itself would have copied, and where."""
        kinds = rank.manager.kv_args.state_types
        for at in (at for at, kind in enumerate(kinds) if kind == StateType.DSA_TAIL):
            ours, theirs = rank.manager.kv_args, source.manager.kv_args
            copies = build_dsa_tail_transfer_blocks(
                theirs.state_data_ptrs[at],
                theirs.state_item_lens[at],
                ours.state_data_ptrs[at],
                self.sent_state(source)[at],
                self.wanted_state(rank)[at],
                ours.state_item_lens[at],
            )
            assert copies
            assert all(ctypes.string_at(here, size) == ctypes.string_at(there, size) for there, here, size in copies)


def _hybrid_of(pool: Any) -> Any:
    """The tail's indices can be had of a hybrid pool only: of a DSA pool by itself, SGLang 0.5.23 fails at it."""
    return pool if hasattr(pool, "full_kv_pool") else SimpleNamespace(use_dsa=True, full_kv_pool=pool)


def _recurrent(rank: Rank, slot: int) -> torch.Tensor:
    """The request's recurrent state, which is not at its row."""
    rank.slots.req_index_to_mamba_index_mapping[slot] = (slot * 3) % REQUESTS + 1
    index: torch.Tensor = rank.slots.translate_mamba_indices(rank.slots.req_index_to_mamba_index_mapping[slot])
    return index
