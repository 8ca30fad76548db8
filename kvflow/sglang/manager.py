"""One rank of a prefill or decode server, for all of its requests: pools, rooms, and who hears from decode servers.

SGLang's order is kept: a decode rank tells the prefill ranks of a room (`rooms.Wanted`), and then they begin to send.
The message names no addresses. A decode rank reads, so it only has to say how much it has already, and the name under
which it waits for the offer. That name is a secret of the two servers, made by the decode server; the room, which
routers see in clear, is only part of it.

SGLang's tables have the state of a request by its room. Here the key is a `Room`, which no other request has.
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
from typing import Any, TypeAlias

import aiohttp
import msgspec
import torch.distributed
import zmq
from sglang.srt.disaggregation.base.conn import KVPoll
from sglang.srt.disaggregation.common.conn import CommonKVManager, CommonKVReceiver
from sglang.srt.disaggregation.utils import DisaggregationMode
from sglang.srt.environ import envs
from sglang.srt.runtime_context import get_device, get_disagg, get_parallel
from sglang.srt.utils.network import get_local_ip_auto

from kvflow.blocking import Load, Runtime
from kvflow.checks import said
from kvflow.core.policy.latest import Latest
from kvflow.errors import ConfigError, KVFlowError, PeerIncompatible
from kvflow.hosts import address_at
from kvflow.limits import GIVEN_PAYLOAD_BYTES_MAX
from kvflow.logs import logger_of
from kvflow.parts import preload
from kvflow.sglang.bootstrap import INTRODUCTION
from kvflow.sglang.hooks import hook_decode, hook_prefill
from kvflow.sglang.pools import Buffers, aux_buffers, items_named, kv_buffers, state_buffers
from kvflow.sglang.rooms import WANTED, Answer, Room, RoomRequest, Rooms, Wanted
from kvflow.sglang.settings import config_of

logger = logger_of(__name__)

_CARRIED = {"attn_cp_size": 1, "pp_size": 1, "attn_dcp_size": 1, "enable_kv_cache_sharding": False}
"""Divisions of a server beside tensor and data parallelism that can be carried."""
_UNFIT_S = 1.0
"""Time that SGLang lets pass before it asks a prefill server again."""
_RANKS_MAX = 64
_SERVERS_MAX = 256
_ASK_S = 2.0
_KNOWN_S = 5.0
"""Time for which a prefill server is not asked again where its ranks hear."""

Introduction: TypeAlias = "list[dict[str, Any]]"


class KVFlowManager(CommonKVManager):
    """The manager that SGLang makes in each scheduler process."""

    supports_deferred_decode_kv_release = True

    def __init__(self, args: Any, mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        preload("growing", "staging")  # on SGLang's thread, not on a loop
        self._prepare(args, mode, server_args, bool(is_mla_backend))
        super().__init__(args, mode, server_args, is_mla_backend)
        if mode == DisaggregationMode.PREFILL:
            self._rooms = Rooms(self.bootstrap_timeout)
            self.transfer_infos = self._rooms.asked
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
        deferred = envs.SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE
        if mode == DisaggregationMode.DECODE and not deferred.get():
            raise ConfigError(
                f"kvflow for SGLang: {deferred.name} is off: pages of a failed request would be used again while they "
                "are still read into"
            )
        self.aux = aux_buffers(args)
        self.aux_moves = self.aux.row_bytes > GIVEN_PAYLOAD_BYTES_MAX
        """True if metadata is too much for a payload, as with hidden states: then it is the last of the pools."""
        self.state_kinds = [kind.value for kind in args.state_types]
        self.secret = _agreed(secrets.token_hex(16))
        self.serials = itertools.count()
        self.senders: weakref.WeakValueDictionary[Room, Any] = weakref.WeakValueDictionary()
        self.receivers: weakref.WeakValueDictionary[Room, Any] = weakref.WeakValueDictionary()
        self._rooms_lock = threading.RLock()  # requests may be collected, and forgotten, while it is held
        self._held: dict[int, list[Load]] = {}
        """What the decode server's pages wait for, by room as routers see it: reads of failed requests that have not
        stopped."""
        self._unfit: dict[str, tuple[str, float]] = {}
        """Why prefill servers cannot be read from, by address, and when SGLang has found out."""
        self._ranks: Latest[str, tuple[float, list[dict[str, Any]]]] = Latest(_SERVERS_MAX)
        """Where the ranks of prefill servers hear, and when they were asked; on the loop of the first pool."""
        self._silent: set[str] = set()
        """Addresses of prefill servers that did not answer when they were asked last."""
        producer = mode == DisaggregationMode.PREFILL
        latent = is_mla or args.is_hybrid_mla_backend
        model_heads = 0 if latent else _model_heads(args, server_args)
        heads = max(1, model_heads // parallel.attn_tp_size) if model_heads else 0
        found = [kv_buffers(args, heads=heads), *state_buffers(args, heads=heads)]
        if self.aux_moves:
            found.append(self.aux)
        self.pools = [_Pool(one, model_heads, producer, self.secret) for one in found]
        hook_prefill(KVFlowManager) if producer else hook_decode(KVFlowManager)

    # --- what both sides have

    def check_status(self, bootstrap_room: int) -> Any:
        """Return the state of a request. One that is forgotten has failed."""
        return self.request_status.get(bootstrap_room, KVPoll.Failed)

    def forget(self, room: Room) -> None:
        """Forget the state of a request that is over."""
        for table in (self.request_status, self.failure_records, self.senders, self.receivers):
            table.pop(room, None)

    def fail(self, room: Room, reason: str) -> None:
        """Note that a request has failed, and why, for SGLang's client."""
        self.record_failure(room, f"kvflow: {reason}")
        self.update_status(room, KVPoll.Failed)

    def name_of(self, room: int) -> str:
        """A name for the next request of a room. Ranks see requests in one order, so theirs are the same."""
        serial = next(self.serials)
        digest = hmac.digest(bytes.fromhex(self.secret), f"{room}:{serial}".encode(), "sha256")
        return f"sglang-{room}-{digest[:16].hex()}"

    def teardown(self) -> None:
        """Close all runtimes, and end the threads."""
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

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        """Learn of a prefill server, as SGLang has it; its requests fail if the two servers do not go together.

        SGLang raises then, in the scheduler's loop, which would end the decode server for all others.
        """
        try:
            known: bool = super().try_ensure_parallel_info(bootstrap_addr)
        except Exception as error:  # noqa: BLE001 - SGLang's own checks, of many kinds
            self._refuse_server(bootstrap_addr, said(error))
            return False
        self._silent.discard(bootstrap_addr) if known else self._silent.add(bootstrap_addr)
        if known:
            self._unfit.pop(bootstrap_addr, None)
        return known

    def _refuse_server(self, address: str, reason: str) -> None:
        self._silent.discard(address)
        before, _ = self._unfit.get(address, ("", 0.0))
        self._unfit[address] = (reason, time.monotonic())
        if before != reason:
            logger.error("prefill server %s cannot be read from, its requests fail: %s", address, reason)
        for room in tuple(self.addr_to_rooms_tracker.get(address, ())):
            receiver = self.receivers.get(room)
            if receiver is not None and self.check_status(room) != KVPoll.Failed:
                receiver.refuse(_unfit_error(address, reason))

    def is_silent(self, address: str) -> bool:
        """Return True if a prefill server did not answer when it was asked last."""
        return address in self._silent

    def tell(self, address: str, ranks: list[dict[str, Any]] | None, wanted: Wanted) -> None:
        """Tell prefill ranks that a request was given up, as far as they can be reached.

        Args:
            address: the prefill server's.
            ranks: where its ranks hear; None if that is not known: then the server is asked, in the background.
            wanted: the message.
        """
        if ranks is None:
            with contextlib.suppress(KVFlowError):
                self.pools[0].runtime.start(lambda _: self._ask_and_tell(address, wanted))
            return
        for rank in ranks:
            with contextlib.suppress(zmq.ZMQError, LookupError, TypeError, ValueError):
                socket, lock = CommonKVReceiver._connect_to_bootstrap_server(rank)
                with lock:
                    socket.send_multipart(wanted.frames(), zmq.NOBLOCK)

    async def _ask_and_tell(self, address: str, wanted: Wanted) -> None:
        since_s, ranks = self._ranks.get(address, (-math.inf, []))
        if time.monotonic() - since_s > _KNOWN_S:
            ranks = await _ranks_of(address)
            self._ranks[address] = (time.monotonic(), ranks)
        self.tell(address, ranks, wanted)

    def unfit(self, address: str) -> PeerIncompatible | None:
        """Return why a prefill server cannot be read from, if that was found out just now."""
        reason, since_s = self._unfit.get(address, ("", 0.0))
        return _unfit_error(address, reason) if reason and time.monotonic() - since_s < _UNFIT_S else None

    def hold(self, room: int, address: str, loads: list[Load]) -> None:
        """Keep the pages of a failed request until no byte can land in them."""
        self._held.setdefault(int(room), []).extend(loads)
        logger.warning(
            "prefill server %s stands still: reads of its memory have not stopped; the request of room %s that they "
            "are of has failed, and its pages are not used again before they have",
            address,
            int(room),
        )

    def is_abort_release_safe(self, bootstrap_room: int, required_acks: int) -> bool:
        """Return True once no byte can land in the pages of failed requests of a room."""
        room = int(bootstrap_room)
        held = [load for load in self._held.pop(room, ()) if not load.safe]
        if held:
            self._held[room] = held
        return not held

    # --- prefill

    def refuse(self, room: int, reason: str) -> None:
        """Refuse a request that has no sender: its decode server is told, or will be when it asks."""
        with self._rooms_lock:
            answer = self._rooms.answer(int(room), time.monotonic())
        self.refuse_answer(answer, reason)
        self.closes(answer)

    def opens(self, room: Room, sender: Any) -> Answer:
        """Take the sender of a request: it answers the next one that is asked for in its room."""
        with self._rooms_lock:
            self.senders[room] = sender
            answer = self._rooms.answer(int(room), time.monotonic())
        self._decline_expired()
        return answer

    def closes(self, answer: Answer) -> None:
        """Forget a request of the prefill server."""
        with self._rooms_lock:
            self._rooms.close(answer, time.monotonic())

    def refuse_answer(self, answer: Answer, reason: str) -> None:
        """Say that a request will not be computed, to who asks for it, or will."""
        with self._rooms_lock:
            asked = self._rooms.refuse(answer, reason, time.monotonic())
        if asked is not None:
            self._decline(asked, reason)

    def _decline(self, asked: RoomRequest, reason: str) -> None:
        for pool in self.pools:
            with contextlib.suppress(KVFlowError, TimeoutError):  # it is served, or the runtime is gone
                pool.runtime.decline(asked.name, reason)

    def _decline_expired(self) -> None:
        with self._rooms_lock:
            expired = self._rooms.expired(time.monotonic())
        for asked in expired:
            self._decline(asked, "no request of its room has come to the prefill server")

    def _hear(self) -> None:
        """Hear messages: the thread's body. Unreadable ones are dropped, as anybody can connect to the socket.

        Thread `kvflow-sglang-hear`: begun by SGLang's manager of a prefill rank. Ends with the process. If it
        dies decode servers are not heard, and their requests end by SGLang's timeouts.
        """
        while True:
            try:
                frames = self.server_socket.recv_multipart()
            except zmq.ContextTerminated:
                self.server_socket.close(0)
                return
            try:
                if frames[0] == WANTED:
                    self._want(msgspec.json.decode(frames[1], type=Wanted))
            except Exception:
                logger.exception("a message of a decode server was dropped")

    def _want(self, wanted: Wanted) -> None:
        with self._rooms_lock:
            refused = self._rooms.hear(wanted, time.monotonic())
        if refused is not None:
            self._decline(*refused)
        self._decline_expired()


def _unfit_error(address: str, reason: str) -> PeerIncompatible:
    """Error of a request to a prefill server that cannot be read from."""
    return PeerIncompatible(f"prefill server {address}: {reason}", peer=address)


async def _ranks_of(address: str) -> list[dict[str, Any]]:
    """Ask a prefill server where its ranks hear; none if it does not say."""
    names = ("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank")
    with contextlib.suppress(Exception):
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(_ASK_S)) as session:

            async def ask(*place: int) -> dict[str, Any]:
                async with session.get(f"http://{address}/route", params=dict(zip(names, place, strict=True))) as found:
                    answer: dict[str, Any] = await found.json()
                    return answer

            info = await ask(-1, -1, -1, -1)
            ranks = itertools.product(range(info["dp_size"]), range(info["attn_tp_size"]))
            return [await ask(dp, 0, tp, 0) for dp, tp in itertools.islice(ranks, _RANKS_MAX)]
    return []


class _Pool:
    """One pool and the runtime that moves its items. If it is cut the ranks of a server are one engine of kvflow's;
    else each is one by itself, and is read whole.
    """

    def __init__(self, buffers: Buffers, model_heads: int, producer: bool, secret: str) -> None:
        parallel, cut = get_parallel(), buffers.cut
        self.buffers = buffers
        place = f"dp{parallel.attn_dp_rank}" if cut else f"dp{parallel.attn_dp_rank}-tp{parallel.attn_tp_rank}"
        settings: dict[str, Any] = {
            "engine_id": f"sglang-{secret[:16]}-{place}-{buffers.name}",
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
