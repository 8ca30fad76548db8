"""Stock engines at the level of the wire: a producer and a consumer with real NIXL agents, as strict as vLLM's.

They handle messages as vLLM 0.32's NixlPullConnector does: `unexpected` is the error at the first message that a stock
engine does not expect. Their caches have one group of full attention, with heads first, and K and V in one tensor.
"""

from __future__ import annotations

import asyncio
import hashlib
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import torch
import zmq
import zmq.asyncio
from nixl import _bindings as nixl

from kvflow.core.cache.layout import CacheLayout

MODEL_HEADS, LAYERS, TOKENS, HEAD = 4, 3, 4, 8
HASH = hashlib.sha256(b"stock vLLM 0.32.0 of /m").hexdigest()
NAMES = tuple(f"model.layers.{layer}.self_attn.attn" for layer in range(LAYERS))


def stock_cache(num_blocks: int, heads: int = MODEL_HEADS, tokens: int = TOKENS) -> dict[str, torch.Tensor]:
    return {name: torch.zeros(num_blocks, heads, tokens, HEAD) for name in NAMES}


def layout_of(cache: dict[str, torch.Tensor]) -> CacheLayout:
    return CacheLayout.infer(cache, order="HND", block_size=next(iter(cache.values())).shape[2])


def value_of(layer: int, block: int, head: int) -> float:
    """Return the value of a block for one of the model's heads. Each token adds a hundredth."""
    return layer * 1000.0 + block * 10.0 + head


def fill(cache: dict[str, torch.Tensor], first_head: int = 0) -> None:
    for layer, tensor in enumerate(cache.values()):
        for block in range(tensor.shape[0]):
            for head in range(tensor.shape[1]):
                tokens = torch.arange(tensor.shape[2]).reshape(-1, 1) / 100.0
                tensor[block, head] = value_of(layer, block, first_head + head) + tokens


class Agent:
    """The NIXL agent of a worker, with one memory region registered for each layer of its cache."""

    def __init__(self, cache: dict[str, torch.Tensor]) -> None:
        self.name = str(uuid.uuid4())
        config = nixl.nixlAgentConfig()
        config.useProgThread = True
        config.useListenThread = False
        config.pthrDelay = 100_000  # the thread sleeps until something arrives; with 0 it would keep a core busy
        self.native = nixl.nixlAgent(self.name, config)
        self.backends = [self.native.createBackend("UCX", {})]
        self.register(cache)

    def register(self, cache: dict[str, torch.Tensor]) -> None:
        self._cache = cache
        rows = [(one.data_ptr(), one.nbytes, 0, "") for one in cache.values()]
        self._registered = nixl.nixlRegDList(nixl.DRAM_SEG, rows)
        self.native.registerMem(self._registered, self.backends)

    def take_notifications(self) -> list[bytes]:
        return [bytes(one) for some in self.native.getNotifs({}, []).values() for one in some]

    def close(self) -> None:
        self.native.deregisterMem(self._registered, self.backends)


class StockProducer:
    """A stock prefill engine: its listener, and the part of its workers' steps that handles notifications."""

    def __init__(
        self,
        engine_id: str = "stock-p",
        *,
        tp_size: int = 1,
        num_blocks: int = 16,
        split: int = 1,
        tokens: int = TOKENS,
        generation: int | None = None,
    ) -> None:
        """Make the ranks and their caches. With a `generation`, count registrations as vLLM 0.33 does."""
        heads = max(MODEL_HEADS // tp_size, 1)
        self.generation = generation
        self.engine_id, self.tp_size, self.split = engine_id, tp_size, split
        self.compatibility_hash = HASH
        self.caches = [stock_cache(num_blocks, heads, tokens) for _ in range(tp_size)]
        for rank, cache in enumerate(self.caches):
            fill(cache, rank * MODEL_HEADS // tp_size)
        self.agents = [Agent(cache) for cache in self.caches]
        self.held: list[Counter[str]] = [Counter() for _ in self.caches]
        """For each rank, the requests that hold blocks, and how many read notifications each has got."""
        self.freed: list[list[str]] = [[] for _ in self.caches]
        self.beats: list[str] = []
        self.unknown: list[str] = []
        self.asked: list[tuple[int, int]] = []
        self.unexpected: BaseException | None = None
        self.change: dict[str, Any] = {}
        """Changes to the fields of the metadata that the listener sends."""
        self.show: Callable[[int], int] = lambda rank: rank
        """Returns the rank to answer with, for the rank that was asked for."""
        self.twist: Callable[[list[bytes]], list[bytes]] | None = None
        """Changes the frames of an answer before it is sent."""
        self.port = 0
        self.given_up: list[dict[str, torch.Tensor]] = []
        """Memory of earlier registrations, which stays mapped for readers that still know it."""

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def offer(self, request_id: str, block_ids: Sequence[Any], num_tokens: int) -> dict[str, Any]:
        """Hold the blocks of a finished prefill, and return its transfer parameters.

        With several groups `block_ids` is a list of lists.
        """
        for held in self.held:
            held[request_id] = 0
        nested = bool(block_ids) and isinstance(block_ids[0], list)
        return {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": list(block_ids) if nested else [list(block_ids)],
            "remote_engine_id": self.engine_id,
            "remote_request_id": request_id,
            "remote_host": "127.0.0.1",
            "remote_port": self.port,
            "tp_size": self.tp_size,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": num_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
            **({} if self.generation is None else {"remote_registration_generation": self.generation}),
        }

    def metadata(self, rank: int) -> bytes:
        cache = list(self.caches[rank].values())
        block_bytes, count = cache[0].stride(0) * 4, len(cache)
        values: dict[str, Any] = {
            "engine_id": self.engine_id,
            "agent_metadata": bytes(self.agents[rank].native.getLocalMD()),
            "kv_caches_base_addr": [one.data_ptr() for one in cache],
            "device_id": 0,
            "num_blocks": cache[0].shape[0],
            "block_lens": [block_bytes] * count,
            "block_strides": [block_bytes] * count,
            "kv_cache_layout": "LBHNC",
            "block_size": cache[0].shape[2],
            "ssm_sizes": (0, 0),
            "attn_backend_name": "CPU_ATTN",
            "physical_blocks_per_logical_kv_block": self.split,
            "region_num_blocks": [cache[0].shape[0]] * count,
            "region_group_ids": [0] * count,
            "region_names": list(NAMES),
            "region_mem_types": ["DRAM"] * count,
            "dcp_size": 1,
            "pcp_size": 1,
            "ple_block_len": None,
            "region_members": [],
            "packed_member_layouts": {},
            **self.change,
        }
        return msgspec.msgpack.encode(values)

    async def listen(self) -> None:
        """Answer questions as vLLM's listener thread does, until one is unexpected."""
        with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            self.port = socket.bind_to_random_port("tcp://127.0.0.1")
            try:
                while True:
                    identity, _, message = await socket.recv_multipart()
                    _, pp_rank, tp_rank = msgspec.msgpack.decode(message)
                    self.asked.append((pp_rank, tp_rank))
                    payload = {
                        divmod(rank, self.tp_size): {
                            "compatibility_hash": self.compatibility_hash,
                            "agent_metadata_bytes": self.metadata(self.show(rank)),
                        }
                        for rank in range(len(self.caches))
                    }[pp_rank, tp_rank]
                    frames = [msgspec.msgpack.encode(payload), msgspec.msgpack.encode(1.5)]
                    frames = frames if self.twist is None else self.twist(frames)
                    await socket.send_multipart([identity, b"", *frames])
            except Exception as error:  # noqa: BLE001 - kept as `unexpected`
                self.unexpected = error

    def step(self) -> None:
        """Handle the notifications of all ranks, as in one step of the engine."""
        for rank, agent in enumerate(self.agents):
            for payload in agent.take_notifications():
                try:
                    self._handle_notification(rank, payload)
                except Exception as error:  # noqa: BLE001 - kept as `unexpected`
                    self.unexpected = error

    def _handle_notification(self, rank: int, payload: bytes) -> None:
        text = payload.decode("utf-8")
        if text.startswith("HB:"):
            self.beats += text[3:].split(",")
            return
        request_id, readers = text.rsplit(":", 1)
        if request_id not in self.held[rank]:
            self.unknown.append(request_id)
            return
        wanted = int(readers)
        self.held[rank][request_id] += 1
        if self.held[rank][request_id] == wanted:
            del self.held[rank][request_id]
            self.freed[rank].append(request_id)

    def restart(self) -> None:
        """Restart the engine under the same name: with new agents, and without held blocks."""
        for agent in self.agents:
            agent.close()
        self.agents = [Agent(cache) for cache in self.caches]
        self.held = [Counter() for _ in self.caches]

    def register_again(self, *ranks: int) -> None:
        """Register other memory for the caches of `ranks`, as after a sleep: with the same agents, without held blocks.

        The old memory is overwritten before it is given up, as by other owners.
        """
        for rank in ranks:
            old, agent = self.caches[rank], self.agents[rank]
            agent.close()
            self.caches[rank] = stock_cache(*next(iter(old.values())).shape[:3])
            fill(self.caches[rank], rank * MODEL_HEADS // self.tp_size)
            agent.register(self.caches[rank])
            for tensor in old.values():
                tensor.fill_(-1.0)
            self.given_up.append(old)
            self.held[rank] = Counter()
            if self.generation is not None:
                self.generation += 1

    async def until(self, done: Callable[[], bool]) -> None:
        """Run steps until `done()` is true."""
        async with asyncio.timeout(60):
            while not done():
                self.step()
                await asyncio.sleep(0)


@asynccontextmanager
async def stock_producer(**values: Any) -> AsyncIterator[StockProducer]:
    """Start a stock producer with a listener. By the end of the block it must have got no unexpected message."""
    made = StockProducer(**values)
    task = asyncio.create_task(made.listen())
    await asyncio.sleep(0)
    try:
        assert made.port
        yield made
        made.step()
        assert made.unexpected is None, f"a stock engine does not expect it: {made.unexpected!r}"
    finally:
        task.cancel()
        await asyncio.wait([task])
        for agent in made.agents:
            agent.close()


class StockConsumer:
    """One rank of a stock decode engine: its handshakes, reads and notifications."""

    def __init__(self, num_blocks: int = 16, tokens: int = TOKENS, *, tp_rank: int = 0, tp_size: int = 1) -> None:
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.cache = stock_cache(num_blocks, MODEL_HEADS // tp_size, tokens)
        self.agent = Agent(self.cache)
        self.remote: dict[int, dict[str, Any]] = {}
        """Metadata of each rank that it reads from, by rank."""

    async def handshake(self, params: dict[str, Any]) -> None:
        """Ask the producer's ranks for metadata, with the checks of vLLM's worker in their order."""
        context, theirs = zmq.asyncio.Context.instance(), params["tp_size"]
        more = max(theirs // self.tp_size, 1)
        first = self.tp_rank * theirs // self.tp_size
        with context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"tcp://{params['remote_host']}:{params['remote_port']}")
            for rank in range(first, first + more):
                await socket.send(msgspec.msgpack.encode((b"get_meta_msg", 0, rank)))
                async with asyncio.timeout(60):
                    parts = await socket.recv_multipart()
                self.remote[rank] = self._checked_metadata(parts, params)
        assert len({found["num_blocks"] for found in self.remote.values()}) == 1

    def _checked_metadata(self, parts: list[bytes], params: dict[str, Any]) -> dict[str, Any]:
        assert len(parts) == 2
        assert isinstance(msgspec.msgpack.decode(parts[1]), float)
        payload = msgspec.msgpack.decode(parts[0])
        assert payload["compatibility_hash"] == HASH
        found: dict[str, Any] = msgspec.msgpack.decode(payload["agent_metadata_bytes"])
        assert found["engine_id"] == params["remote_engine_id"]
        mine = [one.stride(0) * 4 for one in self.cache.values()]
        assert found["block_lens"] == [size * self.tp_size // params["tp_size"] for size in mine]
        assert len(found["kv_caches_base_addr"]) == LAYERS
        assert found["kv_cache_layout"] == "LBHNC"
        assert found["region_names"] in (None, list(NAMES))
        assert found["attn_backend_name"] == "CPU_ATTN"
        assert all(stride >= size for stride, size in zip(found["block_strides"], found["block_lens"], strict=True))
        name = self.agent.native.loadRemoteMD(found["agent_metadata"]).decode()
        return {**found, "agent": name}

    async def read(self, params: dict[str, Any], local_ids: Sequence[int], *, readers: int | None = None) -> None:
        """Read the last offered blocks into `local_ids`, and notify the producer.

        `readers` is the number of readers that the notification names.
        """
        (remote_ids,) = params["remote_block_ids"]
        assert len(local_ids) <= len(remote_ids)
        blocks = list(zip(local_ids, remote_ids[-len(local_ids) :], strict=True))
        told = max(self.tp_size // params["tp_size"], 1) if readers is None else readers
        for at, remote in enumerate(self.remote.values()):
            text = f"{params['remote_request_id']}:{told}"
            await self._read(remote, at, blocks, text.encode())

    async def _read(self, remote: dict[str, Any], at: int, blocks: list[tuple[int, int]], text: bytes) -> None:
        """Read from one rank: its whole blocks into parts of local blocks, or parts of its blocks into whole ones."""
        ours, theirs = [], []
        for layer, tensor in enumerate(self.cache.values()):
            base, stride = remote["kv_caches_base_addr"][layer], remote["block_strides"][layer]
            mine, other = tensor.stride(0) * 4, remote["block_lens"][layer]
            size = min(mine, other)
            offset = self.tp_rank % max(other // mine, 1) * size
            for block, their_block in blocks:
                assert their_block < remote["num_blocks"]
                ours.append((tensor.data_ptr() + block * mine + at * size, size, 0))
                theirs.append((base + their_block * stride + offset, size, 0))
        lists = [nixl.nixlXferDList(nixl.DRAM_SEG, rows) for rows in (ours, theirs)]
        native = self.agent.native
        handle = native.createXferReq(nixl.NIXL_READ, *lists, remote["agent"], text, self.agent.backends)
        status = native.postXferReq(handle, text)
        async with asyncio.timeout(60):
            while status != nixl.NIXL_SUCCESS:
                await asyncio.sleep(0)
                status = native.getXferStatus(handle)
        native.releaseXferReq(handle)

    def notify(self, text: bytes) -> None:
        """Send a notification to every rank of the producer."""
        for remote in self.remote.values():
            self.agent.native.genNotif(remote["agent"], text, self.agent.backends)

    def close(self) -> None:
        for remote in self.remote.values():
            self.agent.native.invalidateRemoteMD(remote["agent"])
        self.agent.close()
