"""Prefill and decode servers without their schedulers: SGLang's pools on the CPU, its metadata buffers, our classes.

A rank is a manager in this process. What SGLang reads of its configuration is given by a namespace, and SGLang's own
code does the rest: bootstrap server, registration, rooms, states.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang.srt.disaggregation.utils  # noqa: F401 - first: its modules import each other
import torch
from sglang.srt.disaggregation.base.conn import KVArgs, KVPoll
from sglang.srt.disaggregation.common import conn
from sglang.srt.disaggregation.utils import DisaggregationMode, MetadataBuffers, setup_state_kv_args
from sglang.srt.mem_cache import deepseek_v4_memory_pool, memory_pool
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

from kvflow.sglang import manager as manager_module
from kvflow.sglang.bootstrap import KVFlowBootstrapServer
from kvflow.sglang.manager import KVFlowManager
from kvflow.sglang.receiver import KVFlowReceiver
from kvflow.sglang.sender import KVFlowSender
from tests.support.ports import free_port

PAGE = 16
PAGES = 32
HEADS = 4
LAYERS = 3
ROWS = 8
_now: list[SimpleNamespace] = [SimpleNamespace()]


def current() -> SimpleNamespace:
    """Return SGLang's current configuration."""
    return _now[0]


@contextlib.contextmanager
def use(rank: Rank) -> Iterator[None]:
    """SGLang's configuration is that of a rank."""
    _now[0] = rank.configuration
    yield


@contextlib.contextmanager
def configured() -> Iterator[None]:
    """SGLang's configuration is `current()`, wherever the classes read it."""
    kept = {}
    spaces = ("parallel", "disagg", "serving", "observability", "device", "exec", "spec", "memory")
    for module in (conn, manager_module, memory_pool, deepseek_v4_memory_pool):
        for name in (f"get_{space}" for space in spaces):
            if hasattr(module, name):
                kept[module, name] = getattr(module, name)
                setattr(module, name, current)
    kept[manager_module, "_broadcast"] = manager_module._broadcast
    manager_module._broadcast = lambda _: current().secret  # type: ignore[assignment]
    kept[manager_module, "_model_config"] = manager_module._model_config
    manager_module._model_config = lambda _: SimpleNamespace(hf_config=None)
    kept[conn, "linear_attn_tp_size"] = conn.linear_attn_tp_size
    conn.linear_attn_tp_size = lambda: current().attn_tp_size
    try:
        yield
    finally:
        for (module, name), value in kept.items():
            setattr(module, name, value)


def configuration(tp_rank: int, tp_size: int, port: int, secret: str) -> SimpleNamespace:
    return SimpleNamespace(
        **dict.fromkeys(("attn_cp_size", "pp_size", "attn_dcp_size", "attn_dp_size", "dp_size", "num_dp_ranks"), 1),
        **dict.fromkeys(("attn_cp_rank", "attn_dcp_rank", "attn_dp_rank"), 0),
        **dict.fromkeys(("enable_kv_cache_sharding", "enable_cp_tp_group_sharing", "enable_trace"), False),
        **dict.fromkeys(("enable_dsa_cache_layer_split", "enable_hisparse", "enable_unified_memory"), False),
        kernel=SimpleNamespace(dsv4_attn_backend="flashmla", enable_deepseek_v4_fp4_indexer=False),
        features=SimpleNamespace(enable_encoder_swa_bounded_replay=False, enable_memory_saver=False),
        speculative_algorithm=None,
        dist_init_addr=None,
        pp_group=None,
        nnodes=1,
        load_balance_method="follow_bootstrap_room",
        host="127.0.0.1",
        port=1,
        device="cpu",
        disaggregation_bootstrap_port=port,
        disaggregation_decode_allocation_policy="early",
        attn_tp_rank=tp_rank,
        attn_tp_size=tp_size,
        secret=secret,
    )


def pool_of(kind: str, tp_size: int) -> Any:
    """One of SGLang's pools, as a rank has it."""
    common = {"page_size": PAGE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    heads = max(1, HEADS // tp_size)
    size = (PAGES - 1) * PAGE
    if kind == "mla":
        return MLATokenToKVPool(size, **common, kv_lora_rank=24, qk_rope_head_dim=8, layer_num=LAYERS)
    if kind == "swa":
        layers = {"swa_attention_layer_ids": [0, 2], "full_attention_layer_ids": [1]}
        return SWAKVPool(size, size, **common, head_num=heads, head_dim=8, **layers)
    head_dim = 512 if kind == "wide" else 8
    return MHATokenToKVPool(size, **common, head_num=heads, head_dim=head_dim, layer_num=LAYERS)


def draft_pool(tp_size: int) -> Any:
    common = {"page_size": PAGE, "dtype": torch.float32, "device": "cpu", "enable_memory_saver": False}
    return MHATokenToKVPool((PAGES - 1) * PAGE, **common, head_num=HEADS // 2 // tp_size, head_dim=8, layer_num=1)


def add_draft(args: KVArgs, pool: Any) -> None:
    """As `PrefillBootstrapQueue._init_kv_manager` adds the buffers of a draft model: behind the model's own."""
    pointers, sizes, items = pool.get_contiguous_buf_infos()
    args.kv_data_ptrs, args.kv_data_lens = [*args.kv_data_ptrs, *pointers], [*args.kv_data_lens, *sizes]
    args.kv_item_lens, args.num_draft_entries = [*args.kv_item_lens, *items], len(pointers)


def arguments(
    pool: Any, tp_rank: int, aux: MetadataBuffers, *, heads: int = HEADS, page_size: int = PAGE, slots: Any = None
) -> KVArgs:
    """As `PrefillBootstrapQueue._init_kv_manager` fills them in. `heads` are the model's."""
    args = KVArgs()
    args.engine_rank, args.pp_rank, args.system_dp_rank, args.rust_http_port = tp_rank, 0, 0, None
    args.kv_cache_dtype_str, args.kv_layout, args.page_size = "float32", None, page_size
    args.kv_data_ptrs, args.kv_data_lens, args.kv_item_lens = pool.get_contiguous_buf_infos()
    args.kv_layer_ids, args.num_draft_entries = getattr(pool, "get_kv_layer_ids", list)(), 0
    args.prefill_start_layer, args.prefill_end_layer = 0, LAYERS
    args.aux_data_ptrs, args.aux_data_lens, args.aux_item_lens = aux.get_buf_infos()
    args.ib_device, args.gpu_id = "", 0
    args.total_kv_head_num = heads
    setup_state_kv_args(args, pool, None, LAYERS, req_to_token_pool=slots)
    return args


def tensors(pool: Any) -> list[torch.Tensor]:
    """The pool's buffers by page: (pages, tokens, ...)."""
    found = []
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for buffer in getattr(pool, name, None) or ():
            found.append(buffer.view(PAGES, PAGE, *buffer.shape[1:]))
    return found


@dataclass(eq=False)
class Rank:
    """One rank of a server."""

    pool: Any
    aux: MetadataBuffers
    manager: Any
    configuration: SimpleNamespace
    slots: Any = None
    """Of requests and their recurrent state, where there is some."""
    draft: Any = None
    """Pool of a draft model."""


@dataclass(eq=False)
class Server:
    """All ranks of a prefill or a decode server."""

    mode: DisaggregationMode
    kind: str = "mha"
    tp_size: int = 1
    port: int = 0
    hidden: int = 16
    """Of the hidden states that go with the first token."""
    speculates: bool = False
    """True if it has a draft model, of one layer; it has half as many heads, so that items have another size."""
    ranks: list[Rank] = field(default_factory=list)
    bootstrap: Any = None

    def open(self) -> Server:
        if self.mode is DisaggregationMode.PREFILL:
            self.port = self.port or free_port()
            self.bootstrap = KVFlowBootstrapServer("127.0.0.1", self.port)
            wait_until(lambda: can_connect(self.port))
        secret = secrets.token_hex(16)
        for tp_rank in range(self.tp_size):
            _now[0] = configuration(tp_rank, self.tp_size, self.port, secret)
            self.ranks.append(self.make_rank(tp_rank))
        return self

    def make_rank(self, tp_rank: int) -> Rank:
        pool, aux = pool_of(self.kind, self.tp_size), self.make_aux()
        latent = self.kind == "mla"
        args = arguments(pool, tp_rank, aux, heads=1 if latent else HEADS)
        draft = draft_pool(self.tp_size) if self.speculates else None
        if draft is not None:
            add_draft(args, draft)
        return Rank(pool, aux, self.make_manager(args, latent), current(), draft=draft)

    def make_aux(self) -> MetadataBuffers:
        return MetadataBuffers(ROWS, self.hidden, torch.float32, 16)

    def make_manager(self, args: KVArgs, latent: bool) -> KVFlowManager:
        return KVFlowManager(args, self.mode, SimpleNamespace(enable_pd_role_switch=False), latent)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def close(self) -> None:
        for rank in self.ranks:
            rank.manager.teardown()
        if self.bootstrap is not None:
            self.bootstrap.close()

    def fill(self, seed: int) -> None:
        """Bytes that depend on the place in the model: what ranks hold alike, such as latents, is equal in all."""
        for at, rank in enumerate(self.ranks):
            for number, tensor in enumerate(pool_tensors(rank.pool, self.kind)):
                # (pages, tokens, heads of the model, bytes) cut to this rank's heads
                generator = torch.Generator().manual_seed(seed * 1000 + number)
                shape = (*tensor.shape[:2], HEADS, *tensor.shape[3:])
                whole = torch.rand(tensor.shape if self.kind == "mla" else shape, generator=generator)
                heads = tensor.shape[2]
                first = at * HEADS // self.tp_size
                tensor.copy_(whole if self.kind == "mla" else whole[:, :, first : first + heads])


def pool_tensors(pool: Any, kind: str) -> list[torch.Tensor]:
    if kind == "swa":
        return [*tensors(pool.full_kv_pool), *tensors(pool.swa_kv_pool)]
    return tensors(pool)


@dataclass(eq=False)
class Request:
    """One request on both servers, stepped by the test as schedulers do it."""

    prefill: Server
    decode: Server
    pages: Sequence[int]
    targets: Sequence[int]
    room: int = field(default_factory=itertools.count(1000).__next__)
    row: int = 1
    target_row: int = 2
    state: Sequence[int] | None = None
    target_state: Sequence[int] | None = None
    senders: list[Any] = field(default_factory=list)
    receivers: list[Any] = field(default_factory=list)

    def make_receivers(self) -> None:
        for rank in self.decode.ranks:
            _now[0] = rank.configuration
            assert rank.manager.try_ensure_parallel_info(self.prefill.address)
            self.receivers.append(KVFlowReceiver(rank.manager, self.prefill.address, self.room))
        for receiver in self.receivers:
            receiver.init(0)

    def make_senders(self) -> None:
        for rank in self.prefill.ranks:
            _now[0] = rank.configuration
            self.senders.append(KVFlowSender(rank.manager, self.prefill.address, self.room))

    def send_metadata(self, prefix: int = 0) -> None:
        """The decode server has pages."""
        for rank, receiver in zip(self.decode.ranks, self.receivers, strict=True):
            rank.aux.clear_slot(self.target_row)
            receiver.send_metadata(np.array(self.targets, np.int32), self.target_row, self.wanted_state(rank), prefix)

    def wanted_state(self, rank: Rank) -> list[Any] | None:
        return None if self.target_state is None else [np.array(self.target_state, np.int32)]

    def sent_state(self, rank: Rank) -> list[Any] | None:
        return None if self.state is None else [np.array(self.state, np.int32)]

    def begin(self, prefix: int = 0) -> None:
        """Both know of it, and the prefill may begin to send."""
        self.make_receivers()
        self.make_senders()
        self.send_metadata(prefix)
        self.until_senders(KVPoll.WaitingForInput)
        for sender in self.senders:
            assert sender.pop_decode_prefix_len() == prefix
            sender.init(len(self.pages), self.row)

    def send(self, start: int = 0, end: int | None = None) -> None:
        """Send computed pages. The last pages carry the state and the other data of the prompt's end."""
        end = len(self.pages) if end is None else end
        for rank, sender in zip(self.prefill.ranks, self.senders, strict=True):
            last = end == len(self.pages)
            if last:
                rank.aux.output_ids[self.row, 0] = 1000 + self.room
                rank.aux.bootstrap_room[self.row, 0] = self.room
            state = self.sent_state(rank) if last else None
            sender.send(np.array(self.pages[start:end], np.int32), state, num_kv_tokens=(end - start) * PAGE)

    def until_senders(self, *wanted: int) -> None:
        wait_until(lambda: all(stands(sender, *wanted) for sender in self.senders))

    def until_receivers(self, *wanted: int) -> None:
        wait_until(lambda: all(stands(receiver, *wanted) for receiver in self.receivers))

    def clear(self) -> None:
        for one in (*self.senders, *self.receivers):
            one.clear()

    def check_bytes(self) -> None:
        """Every page of every decode rank is what the model has there, and so is the first token."""
        for at, rank in enumerate(self.decode.ranks):
            pairs = zip(self._model(), pool_tensors(rank.pool, self.decode.kind), strict=True)
            for number, (model, tensor) in enumerate(pairs):
                if self.decode.kind != "mla":
                    first = at * HEADS // self.decode.tp_size
                    model = model[:, :, first : first + tensor.shape[2]]
                windowed = self.decode.kind == "swa" and number >= 2
                source, target = (self.state, self.target_state) if windowed else (self.pages, self.targets)
                assert torch.equal(tensor[list(target or ())], model[list(source or ())]), f"buffer {number}"
            assert rank.aux.output_ids[self.target_row, 0] == 1000 + self.room
            assert rank.aux.bootstrap_room[self.target_row, 0] == self.room

    def _model(self) -> list[torch.Tensor]:
        ranks = [pool_tensors(rank.pool, self.prefill.kind) for rank in self.prefill.ranks]
        if self.prefill.kind == "mla":
            return ranks[0]
        return [torch.cat(parts, dim=2) for parts in zip(*ranks, strict=True)]


def stands(one: Any, *wanted: int) -> bool:
    """Whether a sender or receiver has reached one of these states. If it has failed instead, fail with its error."""
    state = one.poll()
    if state == KVPoll.Failed and state not in wanted:
        one.failure_exception()
    return state in wanted


def can_connect(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
        return True
    return False


_PAUSE = threading.Event()


def wait_until(condition: Any, within_s: float = 30.0) -> None:
    deadline_s = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come to that"
        _PAUSE.wait(0.002)
