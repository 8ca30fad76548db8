"""The names that the Python blocks of each page start with: real runtimes in one process, stubs of an engine's parts.

Each page has a context manager here. It yields the names that the page begins with, and checks the names that the
page's blocks have left. The page's text explains every name that it uses from here.
"""

from __future__ import annotations

import json
import types
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from doc_embedding import BLOCKS, SIZE, Names, embedded, kv_caches
from prometheus_client import CollectorRegistry

import kvflow
import kvflow.blocking
import kvflow.observe.prometheus as prometheus
from kvflow import Config, LeaseOutcome, LoadRequest, Runtime, ServeRequest
from kvflow.connector.step import Step
from kvflow.connector.worker import ConnectorWorker
from kvflow.prefix import Prefixes, prefix_keys
from kvflow.prefix.testing import FakePrefixCache
from kvflow.runtime.world import World
from kvflow.testing import InprocCluster, InprocNetwork, InprocTransport, TestEngine

ROOT = Path(__file__).parents[2]
TOKENS = 41

Surroundings = Callable[[InprocCluster, pytest.MonkeyPatch], AbstractAsyncContextManager[Names]]


def offer(engine: TestEngine, request_id: str = "req-1") -> kvflow.Lease:
    return engine.runtime.serve_blocks(ServeRequest(request_id, block_ids=BLOCKS, num_tokens=TOKENS))


def in_one_process(patch: pytest.MonkeyPatch) -> None:
    """Make blocking runtimes use the in-process transport, so that they read from each other without NIXL."""
    network = InprocNetwork()
    world = World(transport=lambda _, name: InprocTransport(name, network))
    patch.setattr(kvflow.blocking, "Runtime", partial(kvflow.blocking.Runtime, world=world))


@asynccontextmanager
async def nothing(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For pages without Python blocks, or with blocks that need no names."""
    yield {}


@asynccontextmanager
async def operations(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For operations.md: a new registry for the metrics, and an engine to take out of service."""
    metrics = partial(prometheus.PrometheusMetrics, CollectorRegistry())
    patch.setattr(prometheus, "PrometheusMetrics", metrics)
    async with kvflow.Runtime(Config(engine_id="decode-0", listen="tcp://127.0.0.1:0")) as runtime:
        names: Names = {"config": Config(engine_id="prefill-0"), "runtime": runtime}
        yield names
        assert names["finished"]


@asynccontextmanager
async def security(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For security.md: afterwards, a runtime opens with the page's config and the keys made by its commands."""
    names: Names = {}
    yield names
    async with Runtime(replace(names["config"], listen="tcp://127.0.0.1:0", transport="inproc")) as runtime:
        assert runtime.config.curve_peers_dir == "keys"


@asynccontextmanager
async def connectors(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For connectors.md: rank 0 of an engine of two ranks, and the introduction of rank 1."""
    in_one_process(patch)

    def opened(stack: ExitStack, engine_id: str, tp_rank: int) -> kvflow.blocking.Runtime:
        config = Config(engine_id=engine_id, listen="tcp://127.0.0.1:0", tp_rank=tp_rank, tp_size=2)
        runtime = stack.enter_context(kvflow.blocking.Runtime(config))
        layout = kvflow.CacheLayout.infer(kv_caches(), order="HND", block_size=SIZE.block_size)
        runtime.register_kv_caches(kv_caches(), layout)
        return runtime

    with ExitStack() as stack:
        other_rank, other_engine = opened(stack, "prefill-0", 1), opened(stack, "prefill-1", 0)
        offered = other_engine.serve_blocks(ServeRequest("request-2", block_ids=[5, 6], num_tokens=32))
        names: Names = {
            "rank": 0,
            "tp_size": 2,
            "kv_caches": kv_caches(),
            "step": Step(),
            "introductions_of_other_ranks": [ConnectorWorker(other_rank).introduction()],
            "params": offered.ticket.to_params(),
        }
        stack.callback(lambda: "runtime" in names and names["runtime"].close())
        yield names
        step = names["connector"].build_step({}, preempted=[], block_ids=lambda _: [])
        names["worker"].prepare(step)
        names["worker"].begin(step)
        assert names["report"].blocks == 2
        assert names["outcome"] is LeaseOutcome.REVOKED


@asynccontextmanager
async def asyncio_tutorial(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For tutorials/asyncio.md, which opens and closes its own runtimes."""
    names: Names = {}
    yield names
    assert names["outcome"] is LeaseOutcome.READ
    assert names["report"].tokens == TOKENS
    assert not names["refused"].retryable
    assert names["outcome_of_cancelled"] is LeaseOutcome.READ
    assert names["prefill"].state is names["decode"].state is kvflow.RuntimeState.CLOSED


@asynccontextmanager
async def synchronous_tutorial(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For tutorials/synchronous.md, which opens and closes its own blocking runtimes."""
    in_one_process(patch)
    names: Names = {}
    yield names
    assert names["outcome"] is LeaseOutcome.READ
    assert names["report"].tokens == TOKENS
    assert names["aborted"] is LeaseOutcome.READ


class PromptCache(FakePrefixCache):
    """The prefix cache of hand-on.md: blocks are given from the first one on, and never reused."""

    def __init__(self) -> None:
        super().__init__(16)
        self._given = 0
        self._prompts: list[list[bytes]] = []

    def count(self, keys: Sequence[bytes]) -> int:
        return next((at for at, key in enumerate(keys) if key not in self._blocks_of), len(keys))

    def free_blocks(self, count: int) -> list[int]:
        self._given += count
        return [*range(self._given - count, self._given)]

    def put_keys(self, keys: Sequence[bytes], block_ids: Sequence[int]) -> None:
        for at, key in enumerate(keys[: len(block_ids)]):
            self._blocks_of[key] = tuple(block_ids[: at + 1])
        self._prompts.append([*keys])

    def recent_keys(self) -> list[list[bytes]]:
        return self._prompts[::-1]


@asynccontextmanager
async def hand_on(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For hand-on.md: afterwards an engine leaves, and its successor has pulled its prompts."""
    names: Names = {"kvflow": kvflow, "PromptCache": PromptCache}
    yield names
    (old, old_cache), (new, new_cache) = [(Prefixes(), PromptCache()) for _ in range(2)]
    async with (
        cluster.engine("old", size=SIZE, parts=[old]) as leaving,
        cluster.engine("new", size=SIZE, parts=[new]) as successor,
    ):
        old.share(old_cache)
        keys = prefix_keys(range(2 * 16), 16)
        old_cache.put_keys(keys, old_cache.free_blocks(2))
        names["take_over"](new, new_cache, leaving.runtime.address)
        assert await names["leave"](leaving.runtime, old, old_cache, successor.runtime.address) == 2 * 16
        assert new_cache.recent_keys() == [keys]


@asynccontextmanager
async def vllm(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For vllm.md: HTTP clients of two servers, as a router has them, answered by real runtimes."""
    async with cluster.engine("prefill-0", size=SIZE) as prefill, cluster.engine("decode-0", size=SIZE) as decode:

        async def compute(path: str, json: Mapping[str, Any]) -> Any:
            assert (path, json["max_tokens"]) == ("/v1/completions", 1)
            assert json["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
            params = offer(prefill).ticket.to_params()
            return types.SimpleNamespace(json=lambda: {"kv_transfer_params": params})

        async def generate(path: str, json: Mapping[str, Any]) -> Any:
            assert (path, json["max_tokens"]) == ("/v1/completions", 16)
            return await decode.runtime.load_blocks(LoadRequest("r", json["kv_transfer_params"], block_ids=[0, 1, 2]))

        names: Names = {
            "prefill": types.SimpleNamespace(post=compute),
            "decode": types.SimpleNamespace(post=generate),
        }
        yield names
        report = await names["complete"]({"prompt": "Why is the sky blue?", "max_tokens": 16})
        assert report.tokens == TOKENS


@asynccontextmanager
async def server(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For server.md: the openai client, with a server at the page's address that answers one word."""
    patch.syspath_prepend(str(ROOT / "examples"))
    from openai_server.parameters import ChatRequest
    from openai_server.replies import Replies

    def one_word(request: httpx2.Request) -> httpx2.Response:
        assert request.url == "http://127.0.0.1:8000/v1/chat/completions"
        ChatRequest.model_validate_json(request.content)
        chat = Replies(chat=True)
        pieces = chat.piece("", first=True), chat.piece("Rayleigh"), chat.piece("", "stop")
        lines = [f"data: {said}\n\n" for said in (*map(json.dumps, pieces), "[DONE]")]
        return httpx2.Response(200, headers={"Content-Type": "text/event-stream"}, text="".join(lines))

    with httpx2.Client(transport=httpx2.MockTransport(one_word)) as client:
        patch.setattr(openai, "OpenAI", partial(openai.OpenAI, http_client=client))
        yield {}


@asynccontextmanager
async def embedding(cluster: InprocCluster, patch: pytest.MonkeyPatch) -> AsyncIterator[Names]:
    """For embedding.md. Its blocks only define a program, which test_embedding.py runs."""
    async with embedded(cluster) as engine:
        yield engine.names
        assert callable(engine.names["main"])


SURROUNDINGS: dict[str, Surroundings] = {
    "docs/connectors.md": connectors,
    "docs/embedding.md": embedding,
    "docs/hand-on.md": hand_on,
    "docs/operations.md": operations,
    "docs/security.md": security,
    "docs/tutorials/asyncio.md": asyncio_tutorial,
    "docs/server.md": server,
    "docs/tutorials/synchronous.md": synchronous_tutorial,
    "docs/vllm.md": vllm,
}
