"""One rank of a prefill or decode server, for all of its requests: pools, and who hears from decode servers.

SGLang's order is kept: a decode rank tells the prefill ranks of a room (`Wanted`), and then they begin to send. The
message names no addresses. A decode rank reads, so it only has to say how much it has already, and the name under which
it waits for the offer. That name is a secret of the two servers, made by the decode server; the room, which routers see
in clear, is only part of it.
"""

from __future__ import annotations

import hmac
import itertools
import json
import os
import secrets
import threading
from typing import Any, TypeAlias

import msgspec
import torch.distributed
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import AbortNotification, CommonKVManager
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel

from kvflow.blocking import Runtime
from kvflow.config import Config
from kvflow.core.policy.latest import Latest
from kvflow.errors import ConfigError
from kvflow.hosts import address_at
from kvflow.limits import GIVEN_PAYLOAD_BYTES_MAX
from kvflow.logs import logger_of
from kvflow.runtime.producer.lease import ServeRequest
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.pools import AuxRows, Buffers, aux_buffers, items_named, kv_buffers, state_buffers

logger = logger_of(__name__)

SETTINGS = "KVFLOW_SGLANG_CONFIG"
"""Fields of `kvflow.Config` as JSON, for all ranks of a server."""

_CARRIED = {"attn_cp_size": 1, "pp_size": 1, "attn_dcp_size": 1, "enable_kv_cache_sharding": False}
"""Divisions of a server beside tensor and data parallelism that can be carried."""
_WANTED = b"KVFLOW"
_REFUSED_MAX = 1 << 12

Introduction: TypeAlias = "list[dict[str, Any]]"


class Wanted(msgspec.Struct, frozen=True):
    """Message of a decode rank to a prefill rank about a room."""

    room: int
    name: str
    """The request id of its offers."""
    reader: str
    """Name of the reading rank."""
    readers: int
    """Number of ranks from which this prefill rank hears about the room."""
    decode_prefix_len: int
    is_dummy: bool = False
    """True if it reads from another rank what is not cut."""


class KVFlowManager(CommonKVManager):
    """The manager that SGLang makes in each scheduler process."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        self._prepare(args, mode, server_args, bool(is_mla_backend))
        super().__init__(args, mode, server_args, is_mla_backend)
        if mode == DisaggregationMode.PREFILL:
            threading.Thread(target=self._hear, name="kvflow-sglang-hear", daemon=True).start()
        else:
            self._start_heartbeat_checker_thread()

    def _prepare(self, args: Any, mode: Any, server_args: Any, is_mla: bool) -> None:
        """All that registering at the bootstrap server needs, which SGLang's constructor does."""
        parallel, policy = get_parallel(), get_disagg().disaggregation_decode_allocation_policy
        for name, carried in _CARRIED.items():
            if getattr(parallel, name) > carried:
                raise ConfigError(f"kvflow for SGLang: {name} is {getattr(parallel, name)}, carried is {carried}")
        if policy != "early":
            raise ConfigError(
                f"kvflow for SGLang: disaggregation_decode_allocation_policy is {policy}, carried is early"
            )
        self.aux = AuxRows(args.aux_data_ptrs, args.aux_item_lens)
        self.aux_moves = self.aux.row_bytes > GIVEN_PAYLOAD_BYTES_MAX
        """True if metadata is too much for a payload, as with hidden states: then it is the last of the pools."""
        self.state_kinds = [kind.value for kind in args.state_types]
        self.secret = _agreed(secrets.token_hex(16))
        self.serials = itertools.count()
        self.senders: dict[int, Any] = {}
        """Senders by the room that they serve."""
        self._refused = Latest[int, str](_REFUSED_MAX)
        self._rooms_lock = threading.Lock()
        producer = mode == DisaggregationMode.PREFILL
        latent = is_mla or args.is_hybrid_mla_backend
        model_heads = 0 if latent else _model_heads(args, server_args)
        heads = max(1, model_heads // parallel.attn_tp_size) if model_heads else 0
        found = [kv_buffers(args, heads=heads), *state_buffers(args, heads=heads)]
        if self.aux_moves:
            found.append(aux_buffers(args))
        self.pools = [_Pool(one, model_heads, producer, self.secret) for one in found]
        if producer:
            _hear_refusals()

    # --- what both sides have

    def name_of(self, room: int) -> str:
        """A name for the next request of a room. Ranks see requests in one order, so theirs are the same."""
        serial = next(self.serials)
        digest = hmac.digest(bytes.fromhex(self.secret), f"{room}:{serial}".encode(), "sha256")
        return f"sglang-{room}-{digest[:16].hex()}"

    def teardown(self) -> None:
        """Close all runtimes, and end the thread."""
        for pool in self.pools:
            pool.runtime.close()
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
            self.server_socket.close(0)  # of the prefill side the thread does it
        self._zmq_ctx.term()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        introduction: Introduction = [pool.introduction for pool in self.pools]
        super()._register_topology_row(url, {**payload, INTRODUCTION: introduction})

    def items_of(self, pages: Any, state_indices: Any, aux_index: int, decode_prefix_len: int) -> list[Any]:
        """Items that a request brings in each pool; None for a pool in which it has nothing."""
        aux = [[aux_index]] if self.aux_moves else []
        prefix_pages = decode_prefix_len // self.kv_args.page_size
        states = zip(self.state_kinds, state_indices or [None] * len(self.state_kinds), strict=True)
        return [pages, *(items_named(kind, indices, prefix_pages) for kind, indices in states), *aux]

    # --- decode

    def build_receiver_registration_message(self) -> list[bytes]:
        """Nothing: prefill servers need not know where a decode server's pools are."""
        return []

    # --- prefill

    def refuse(self, room: int, reason: str) -> None:
        """Refuse a request that will not be computed: whoever waits for it is told, or will be when it asks."""
        with self._rooms_lock:
            wanted = self.transfer_infos.get(room)
            if not wanted:
                self._refused[room] = reason
                return
        self._decline(next(iter(wanted.values())).name, reason)
        self._forget(room)

    def opens(self, room: int, sender: Any) -> None:
        """Take the sender of a room: an earlier request of the same room is over."""
        with self._rooms_lock:
            self._refused.pop(room, None)
            self.senders[room] = sender

    def closes(self, room: int, sender: Any) -> None:
        """Forget the sender of a room."""
        with self._rooms_lock:
            if self.senders.get(room) is sender:
                del self.senders[room]

    def _decline(self, name: str, reason: str) -> None:
        for pool in self.pools:
            pool.runtime.decline(name, reason)

    def _forget(self, room: int) -> None:
        for table in (self.transfer_infos, self.req_to_decode_prefix_len, self.request_status):
            table.pop(room, None)

    def _hear(self) -> None:
        """Hear messages: the thread's body. Unreadable ones are dropped, as anybody can connect to the socket."""
        while True:
            try:
                frames = self.server_socket.recv_multipart()
            except zmq.ContextTerminated:
                self.server_socket.close(0)
                return
            try:
                if frames[0] == _WANTED:
                    self._want(msgspec.json.decode(frames[1], type=Wanted))
                elif (told := AbortNotification.from_zmq(frames)) is not None:
                    self._abandon(told.room)
            except Exception:
                logger.exception("a message of a decode server was dropped")

    def _want(self, wanted: Wanted) -> None:
        with self._rooms_lock:
            reason = self._refused.pop(wanted.room, None)
        if reason is not None:
            self._decline(wanted.name, reason)
            return
        readers = dict(self.transfer_infos.get(wanted.room, ()))
        if any(other.name != wanted.name for other in readers.values()):
            readers = {}  # of an earlier request of the room, which never came
        readers[wanted.reader] = wanted
        self.transfer_infos[wanted.room] = readers
        if len(readers) == wanted.readers:
            self.req_to_decode_prefix_len[wanted.room] = wanted.decode_prefix_len
            self.update_status(wanted.room, KVPoll.WaitingForInput)

    def _abandon(self, room: int) -> None:
        """Give up a room that the decode server does not want any more."""
        sender = self.senders.get(room)
        if sender is None:
            self._forget(room)
        else:
            if room not in self.failure_records:  # else it has failed here, and that is why decode gives it up
                self.record_failure(room, "the decode server has aborted the request")
                self.update_status(room, KVPoll.Failed)
            sender.give_up("the decode server has aborted the request")


def wanted_message(wanted: Wanted) -> list[bytes]:
    """The frames that a decode rank sends."""
    return [_WANTED, msgspec.json.encode(wanted)]


class _Pool:
    """One pool and the runtime that moves its items."""

    def __init__(self, buffers: Buffers, model_heads: int, producer: bool, secret: str) -> None:
        parallel = get_parallel()
        self.name = buffers.name
        self.page_size = buffers.tokens
        self.cut = buffers.cut
        """True if the ranks of a server are one engine of kvflow's. Else each is one by itself, and is read whole."""
        self.shared_out = not (buffers.cut or buffers.alike)
        """True if a rank has a share that goes to no other tensor parallelism."""
        place = f"dp{parallel.attn_dp_rank}" if self.cut else f"dp{parallel.attn_dp_rank}-tp{parallel.attn_tp_rank}"
        settings: dict[str, Any] = {
            "engine_id": f"sglang-{secret[:16]}-{place}-{buffers.name}",
            "model": buffers.format,
            "listen": address_at(_own_ip(), 0),
            "tp_rank": parallel.attn_tp_rank if self.cut else 0,
            "tp_size": parallel.attn_tp_size if self.cut else 1,
            "num_kv_heads": model_heads if buffers.heads else None,
            "role": "producer" if producer else "consumer",
            **json.loads(os.environ.get(SETTINGS, "{}")),
        }
        self.runtime = Runtime(Config(**settings))
        self.runtime.open()
        self.runtime.register_kv_caches([buffers.group("cpu" if buffers.host else get_device().device)])
        self.introduction: dict[str, Any] = {}
        if producer:
            nothing = self.runtime.serve_blocks(ServeRequest("introduction", [], 0))
            self.introduction = nothing.ticket.to_params()


def _own_ip() -> str:
    from sglang.srt.utils.network import get_local_ip_auto

    address: str = get_local_ip_auto()
    return address


def _agreed(value: str) -> str:
    """Rank 0's value, on all ranks of the server."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    agreed: str = get_parallel().world_group.broadcast_object(value, src=0)
    return agreed


def _model_heads(args: Any, server_args: Any) -> int:
    """KV heads of the model. SGLang tells its prefill side only."""
    known = getattr(args, "total_kv_head_num", None)
    if known is None:
        from sglang.srt.configs.model_config import ModelConfig

        known = ModelConfig.from_server_args(server_args).get_total_num_kv_heads()
    return int(known)


def _hear_refusals() -> None:
    """Hook the prefill server's door: a prompt that it refuses gets no sender, and its decode server would wait."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.disaggregation.prefill.PrefillBootstrapQueue.add"
    if target not in HookRegistry._hooks:
        HookRegistry.register(target, _refused_at_the_door, HookType.AFTER)
        HookRegistry.apply_hooks()


def _refused_at_the_door(result: Any, queue: Any, req: Any, *_: Any, **__: Any) -> None:
    manager = queue.kv_manager
    if req.disagg_kv_sender is None and req.bootstrap_room is not None and isinstance(manager, KVFlowManager):
        reason = req.finished_reason or req.to_finish
        manager.refuse(req.bootstrap_room, getattr(reason, "message", None) or "the prefill server refused the prompt")
