"""KVFlowManager: one rank of a prefill or decode server, with its pools, its requests, and messages between servers.

As in SGLang, a decode rank first sends a message about its request (`rooms.RoomMessage`) to the prefill ranks. The
message has no memory addresses, since the decode rank reads the blocks itself. It has the number of tokens that the
decode server already has, and the name of the lease for which it waits: the request's room, which routers see, and a
digest that only the two servers know.

The keys of SGLang's tables of requests are rooms, numbers that several requests may share. Here the keys are `Room`
objects, each unique to one request.
"""

from __future__ import annotations

import contextlib
import hmac
import itertools
import math
import secrets
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any, TypeAlias

import aiohttp
import torch.distributed
import zmq
from sglang.srt.configs.mamba_utils import mamba2_state_dtype
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_exec, get_memory, get_parallel
from sglang.srt.utils.network import get_local_ip_auto

from kvflow import threads
from kvflow.blocking import Load, Runtime
from kvflow.checks import error_text
from kvflow.connector.as_nixl import acts_as_nixl
from kvflow.connector.plugin_settings import refuse_options
from kvflow.core.policy.bounded_map import BoundedMap
from kvflow.errors import ConfigError, KVFlowError, PeerIncompatible, without_secrets
from kvflow.hosts import address_at
from kvflow.limits import GIVEN_PAYLOAD_BYTES_MAX
from kvflow.logs import logger_of
from kvflow.parts import preload
from kvflow.secret_ids import with_secret
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.hooks import hook_decode, hook_prefill
from kvflow.sglang.names import NIXL
from kvflow.sglang.pools import Buffers, aux_buffers, kv_buffers, state_buffers, transferred_items
from kvflow.sglang.rooms import MESSAGE_FRAME, Answer, Room, RoomMessage, RoomRequest, Rooms, decode_room_message
from kvflow.sglang.server_settings import REFUSED_OPTIONS, config_of, switch_warning

logger = logger_of(__name__)

_INCOMPATIBLE_S = 1.0
"""Seconds for which requests to an incompatible prefill server fail at once. Then SGLang asks for that server's
settings again."""
_RANKS_MAX = 64
_SERVERS_MAX = 256
_LOOK_UP_TIMEOUT_S = 2.0
_RANKS_KEPT_S = 5.0
"""Seconds for which the list of a prefill server's ranks is used before it is looked up again."""

Introduction: TypeAlias = "list[dict[str, Any]]"


class KVFlowManager(CommonKVManager):
    """kvflow's KV manager. SGLang creates one in each scheduler process of a server, that is, for each rank."""

    supports_deferred_decode_kv_release = True
    supports_role_switch = True
    """`/pd_role_switch`: SGLang tears this manager down once the server is idle, and makes one for the other role."""

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        preload("growing", "staging")  # import on SGLang's thread, not on an event loop
        self._prepare(args, mode, server_args, bool(is_mla_backend))
        super().__init__(args, mode, server_args, is_mla_backend)
        if mode == DisaggregationMode.PREFILL:
            self._rooms = Rooms(self.bootstrap_timeout)
            self.transfer_infos = self._rooms.requests
            hearing = threading.Thread(target=self._receive_messages, name="kvflow-sglang-hear", daemon=True)
            with threads.starting(hearing.name):
                hearing.start()
        else:
            self._start_heartbeat_checker_thread()

    def _prepare(self, args: Any, mode: Any, server_args: Any, is_mla: bool) -> None:
        """Check the server's settings, and create the pools and tables of this rank.

        SGLang's constructor, which registers this rank at the bootstrap server, needs the pools and tables. ConfigError
        if kvflow does not support a setting.
        """
        parallel = get_parallel()
        options = SimpleNamespace(parallel=parallel, disagg=get_disagg(), memory=get_memory(), exec=get_exec())
        refuse_options(REFUSED_OPTIONS, options, plugin="kvflow for SGLang")
        layout = envs.SGLANG_AITER_KV_CACHE_LAYOUT
        if layout.get().lower() != "nhd":
            raise ConfigError(f"kvflow for SGLang: {layout.name} is {layout.get()}, supported is nhd")
        if (staging := envs.SGLANG_DISAGG_STAGING_BUFFER).get():  # SGLang refuses it only for names of other backends
            raise ConfigError(f"kvflow for SGLang: {staging.name} is on, supported is off: heads are read from pages")
        deferred = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
        if mode == DisaggregationMode.DECODE and not deferred.get():
            raise ConfigError(
                f"kvflow for SGLang: {deferred.name} is off: pages of a failed request would be reused while they "
                "are still read into"
            )
        if acts_as_nixl() and get_disagg().disaggregation_transfer_backend == NIXL and args.engine_rank == 0:
            logger.warning("%s", switch_warning(args.ib_device))
        self.aux = aux_buffers(args)
        self.aux_moves = self.aux.row_bytes > GIVEN_PAYLOAD_BYTES_MAX
        """True if SGLang's metadata of a request, for example with hidden states, is too large for the payload of a
        lease (`Lease.complete`). Then the last of `pools` holds the metadata, and readers load it from there."""
        self.state_kinds = [kind.value for kind in args.state_types]
        self.secret = _broadcast(secrets.token_hex(16))
        self.public_id = self._digest("public id")[:8].hex()
        """Id of this server in names that others see, from which nobody can compute `secret`."""
        self.serials = itertools.count()
        self.senders: weakref.WeakValueDictionary[Room, Any] = weakref.WeakValueDictionary()
        self.receivers: weakref.WeakValueDictionary[Room, Any] = weakref.WeakValueDictionary()
        self._rooms_lock = threading.RLock()  # reentrant: finalizers of requests may run while it is held
        self._held: dict[int, list[Load]] = {}
        """Loads of failed requests that may still write to this server's pages, by SGLang's bootstrap room."""
        self._incompatible: dict[str, tuple[str, float]] = {}
        """For each incompatible prefill server, by address: the reason, and the time at which the server was found
        incompatible."""
        self._ranks: BoundedMap[str, tuple[float, list[dict[str, Any]]]] = BoundedMap(_SERVERS_MAX)
        """For each prefill server, by address: the time at which its ranks were looked up, and the bootstrap server's
        description of each rank. Used only on the event loop of `pools[0].runtime`."""
        self._unanswered: set[str] = set()
        """Addresses of prefill servers that did not answer when SGLang last asked for their parallelism."""
        producer = mode == DisaggregationMode.PREFILL
        latent = is_mla or args.is_hybrid_mla_backend
        model_heads = 0 if latent else _model_heads(args, server_args)
        heads = max(1, model_heads // parallel.attn_tp_size) if model_heads else 0
        states = state_buffers(args, heads=heads, dtypes=_state_dtypes(args, server_args))
        pools = [kv_buffers(args, heads=heads), *states]
        if self.aux_moves:
            pools.append(self.aux)
        self.pools = [_Pool(buffers, model_heads, producer, self.public_id) for buffers in pools]
        hook_prefill(KVFlowManager) if producer else hook_decode(KVFlowManager)

    # --- what both sides have

    def check_status(self, bootstrap_room: int) -> Any:
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def forget(self, room: Room) -> None:
        for table in (self.request_status, self.failure_records, self.senders, self.receivers):
            table.pop(room, None)

    def fail(self, room: Room, reason: str) -> None:
        """Mark the request of `room` as failed. SGLang's client gets `reason` as the error message."""
        self.record_failure(room, f"kvflow: {without_secrets(reason)}")
        self.update_status(room, KVPoll.Failed)

    def new_request_name(self, room: int) -> str:
        """Return a secret name for a new request of `room`: the decode server waits for the lease of that name.

        The name is a digest of the server's secret, the room and a count of requests. All ranks of the decode server
        make the same name, because they have the same secret and see requests in the same order.
        """
        serial = next(self.serials)
        return with_secret(f"sglang-{room}", self._digest(f"{room}:{serial}")[:16].hex())

    def _digest(self, text: str) -> bytes:
        return hmac.digest(bytes.fromhex(self.secret), text.encode(), "sha256")

    def teardown(self) -> None:
        """Close the runtimes of all pools, and end this manager's threads."""
        for pool in self.pools:
            pool.runtime.close()
        if self.disaggregation_mode == DisaggregationMode.DECODE:
            self._heartbeat_shutdown.set()
            self.server_socket.close(0)  # on the prefill side the thread `kvflow-sglang-hear` closes it
        self._zmq_ctx.term()

    def _register_topology_row(self, url: str, payload: dict[str, Any]) -> None:
        introduction: Introduction = [pool.introduction for pool in self.pools]
        super()._register_topology_row(url, {**payload, INTRODUCTION: introduction})

    def items_of(self, pages: Any, state_indices: Any, aux_index: int, decode_prefix_len: int) -> list[Any]:
        """Return one list for each of `pools`: indexes of a request's items in that pool, or None if SGLang gave none.

        `pages` are the pages of the KV pool, `state_indices` the indexes for each component of state, and `aux_index`
        the row of SGLang's metadata. The decode server already has the first `decode_prefix_len` tokens, so components
        that have an item for each page begin after the pages of these tokens.
        """
        aux = [[aux_index]] if self.aux_moves else []
        prefix_pages = decode_prefix_len // self.kv_args.page_size
        states = zip(self.state_kinds, state_indices or [None] * len(self.state_kinds), strict=True)
        return [pages, *(transferred_items(kind, indices, prefix_pages) for kind, indices in states), *aux]

    # --- decode

    def build_receiver_registration_message(self) -> list[bytes]:
        """Return an empty message: prefill servers need no memory addresses of a decode server."""
        return []

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Look up the parallelism of the prefill server at `bootstrap_addr`. Return True if the server can be read.

        If the server is incompatible, fail the requests that read from it, and raise nothing in the scheduler's loop.
        """
        try:
            known: bool = super().try_ensure_parallel_info(bootstrap_addr)
        except Exception as error:  # noqa: BLE001 - SGLang's own checks, of many kinds
            self._refuse_server(bootstrap_addr, error_text(error))
            return False
        self._unanswered.discard(bootstrap_addr) if known else self._unanswered.add(bootstrap_addr)
        if known:
            self._incompatible.pop(bootstrap_addr, None)
        return known

    def _refuse_server(self, address: str, reason: str) -> None:
        self._unanswered.discard(address)
        before, _ = self._incompatible.get(address, ("", 0.0))
        self._incompatible[address] = (reason, time.monotonic())
        if before != reason:
            logger.error("prefill server %s cannot be read from, its requests fail: %s", address, reason)
        for room in tuple(self.addr_to_rooms_tracker.get(address, ())):
            receiver = self.receivers.get(room)
            if receiver is not None and self.check_status(room) != KVPoll.Failed:
                receiver.refuse(_incompatible_error(address, reason))

    def has_not_answered(self, address: str) -> bool:
        """Return True if the prefill server at `address` did not answer when SGLang last asked for its parallelism."""
        return address in self._unanswered

    def notify_given_up(self, address: str, ranks: list[dict[str, Any]] | None, message: RoomMessage) -> None:
        """Notify prefill ranks that the decode server has given up the request in `message`. Skip unreachable ranks.

        `address` is the prefill server's address. `ranks` has the bootstrap server's description of each rank to
        notify. If None, the ranks are looked up in the background.
        """
        if ranks is None:
            with contextlib.suppress(KVFlowError):
                self.pools[0].runtime.start(lambda _: self._look_up_and_notify(address, message))
            return
        for rank in ranks:
            with contextlib.suppress(zmq.ZMQError, LookupError, TypeError, ValueError):
                socket, lock = CommonKVReceiver._connect_to_bootstrap_server(rank)
                with lock:
                    socket.send_multipart(message.frames(), zmq.NOBLOCK)

    async def _look_up_and_notify(self, address: str, message: RoomMessage) -> None:
        since_s, ranks = self._ranks.get(address, (-math.inf, []))
        if time.monotonic() - since_s > _RANKS_KEPT_S:
            ranks = await _look_up_ranks(address)
            self._ranks[address] = (time.monotonic(), ranks)
        self.notify_given_up(address, ranks, message)

    def incompatible_error(self, address: str) -> PeerIncompatible | None:
        """Return the error for a new request to the prefill server at `address`; None if the request may be tried.

        There is an error for a second after the server was found incompatible.
        """
        reason, since_s = self._incompatible.get(address, ("", 0.0))
        return _incompatible_error(address, reason) if reason and time.monotonic() - since_s < _INCOMPATIBLE_S else None

    def hold(self, room: int, address: str, loads: list[Load]) -> None:
        """Keep the pages of a failed request until `loads`, which may still write to them, have stopped.

        `room` is the request's room, and `address` the address of its prefill server.
        """
        self._held.setdefault(int(room), []).extend(loads)
        logger.warning(
            "prefill server %s: reads of its memory have not stopped. The request of room %s has failed, and its "
            "pages are not reused until the reads have stopped",
            address,
            int(room),
        )

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return True if no byte can land in the pages of failed requests in the room `bootstrap_room`.

        SGLang calls this before it frees these pages.
        """
        room = int(bootstrap_room)
        held = [load for load in self._held.pop(room, ()) if not load.safe]
        if held:
            self._held[room] = held
        return not held

    # --- prefill

    def refuse(self, room: int, reason: str) -> None:
        """Refuse the prefill server's side of a request in `room`. SGLang has created no sender for it.

        The decode server is notified now, or when that server's message about the request arrives.
        """
        with self._rooms_lock:
            answer = self._rooms.add_answer(int(room), time.monotonic())
        self.refuse_answer(answer, reason)
        self.remove_answer(answer)

    def add_sender(self, room: Room, sender: Any) -> Answer:
        """Add the prefill server's side of a new request, with its sender, and return that side: an `Answer`.

        The `Answer` is paired with the first unpaired request of a decode server in the same room. If there is none,
        the `Answer` waits until one arrives.
        """
        with self._rooms_lock:
            self.senders[room] = sender
            answer = self._rooms.add_answer(int(room), time.monotonic())
        self._decline_expired()
        return answer

    def remove_answer(self, answer: Answer) -> None:
        """Forget the prefill server's side of a request that has ended. `answer` is what `add_sender` returned."""
        with self._rooms_lock:
            self._rooms.close(answer, time.monotonic())

    def refuse_answer(self, answer: Answer, reason: str) -> None:
        """Mark a request of the prefill server as refused for this `reason`: it will not be computed.

        The decode server is notified now, or when that server's message about the request arrives.
        """
        with self._rooms_lock:
            request = self._rooms.refuse(answer, reason, time.monotonic())
        if request is not None:
            self._decline(request, reason)

    def _decline(self, request: RoomRequest, reason: str) -> None:
        for pool in self.pools:
            with contextlib.suppress(KVFlowError, TimeoutError):  # the request is served, or the runtime is closed
                pool.runtime.decline(request.name, reason)

    def _decline_expired(self) -> None:
        with self._rooms_lock:
            expired = self._rooms.pop_expired(time.monotonic())
        for request in expired:
            self._decline(request, "no request of its room has arrived at the prefill server")

    def _receive_messages(self) -> None:
        """Handle messages of decode servers, as the body of a thread. Drop invalid messages: any process can send some.

        Thread `kvflow-sglang-hear`: begun by SGLang's manager of a prefill rank. It ends at teardown, or with the
        process. If it dies, messages of decode servers are lost, and their requests end by SGLang's timeouts.
        """
        while True:
            try:
                frames = self.server_socket.recv_multipart()
            except zmq.ContextTerminated:
                self.server_socket.close(0)
                return
            try:
                if frames[0] == MESSAGE_FRAME:
                    self._handle_message(decode_room_message(frames[1]))
            except Exception:
                logger.exception("a message of a decode server was dropped")

    def _handle_message(self, message: RoomMessage) -> None:
        with self._rooms_lock:
            refused = self._rooms.handle(message, time.monotonic())
        if refused is not None:
            self._decline(*refused)
        self._decline_expired()


def _incompatible_error(address: str, reason: str) -> PeerIncompatible:
    return PeerIncompatible(f"prefill server {address}: {reason}", peer=address)


async def _look_up_ranks(address: str) -> list[dict[str, Any]]:
    """Return the bootstrap server's description of each rank of the prefill server at `address`.

    Empty if the bootstrap server does not answer.
    """
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    with contextlib.suppress(Exception):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_LOOK_UP_TIMEOUT_S)) as session:

            async def ask(*place: int) -> dict[str, Any]:
                async with session.get(f"http://{address}/route", params=dict(zip(names, place, strict=True))) as reply:
                    answer: dict[str, Any] = await reply.json()
                    return answer

            info = await ask(-1, -1, -1, -1)
            ranks = itertools.product(range(info["dp_size"]), range(info["attn_tp_size"]))
            return [await ask(dp, 0, tp, 0) for dp, tp in itertools.islice(ranks, _RANKS_MAX)]
    return []


class _Pool:
    """One of a rank's memory pools, and the kvflow runtime that transfers the pool's items, such as pages.

    If servers may have different tensor-parallel sizes for this pool (`Buffers.cut`), all ranks of a server form one
    kvflow engine, and a reader may read some heads of an item. Otherwise each rank is an engine of its own, and a
    reader reads all bytes of an item from that rank.
    """

    def __init__(self, buffers: Buffers, model_heads: int, producer: bool, server_id: str) -> None:
        parallel, cut = get_parallel(), buffers.cut
        self.buffers = buffers
        place = f"dp{parallel.attn_dp_rank}" if cut else f"dp{parallel.attn_dp_rank}-tp{parallel.attn_tp_rank}"
        settings: dict[str, Any] = {
            "engine_id": f"sglang-{server_id}-{place}-{buffers.name}",
            "model": buffers.format,
            "listen": address_at(get_local_ip_auto(), 0),
            "tp_rank": parallel.attn_tp_rank if cut else 0,
            "tp_size": parallel.attn_tp_size if cut else 1,
            "num_kv_heads": model_heads if buffers.heads else None,
            "role": "producer" if producer else "consumer",
        }
        self.runtime = Runtime(config_of(settings))
        self.runtime.open()
        self.runtime.register_kv_caches([buffers.group("cpu" if buffers.host else get_device().device)])
        self.introduction: dict[str, Any] = self.runtime.introduce().to_params() if producer else {}


def _broadcast(value: str) -> str:
    """Send the `value` of rank 0 to all ranks of the server, and return it on each rank."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    agreed: str = get_parallel().world_group.broadcast_object(value, src=0)
    return agreed


def _model_heads(args: Any, server_args: Any) -> int:
    """Return the number of KV heads of the whole model.

    SGLang passes it in `args` to prefill servers only; on decode servers it comes from the model's config.
    """
    known = getattr(args, "total_kv_head_num", None)
    return int(_model_config(server_args).get_total_num_kv_heads() if known is None else known)


def _state_dtypes(args: Any, server_args: Any) -> str:
    """Return the dtypes of recurrent state, which servers may set and buffers do not show; "" if there is none."""
    if not any(kind.value == "mamba" for kind in args.state_types):
        return ""
    dtypes = mamba2_state_dtype(_model_config(server_args).hf_config)
    return f".{dtypes.conv}.{dtypes.temporal}".replace("torch.", "")


def _model_config(server_args: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    return ModelConfig.from_server_args(server_args)
