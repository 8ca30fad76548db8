"""The connector on a device that is neither the CPU nor CUDA, the stand-in accelerator: copies behind vLLM's steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kvflow import CacheGroup, LoadRequest, ServeRequest
from kvflow.blocking import Runtime
from kvflow.config import Config
from kvflow.connector.step import Step
from kvflow.vllm import worker_side as module
from kvflow.vllm.messages import KVFlowMetadata
from kvflow.vllm.worker_side import WorkerSide
from tests.accelerator.sides import HERE, OURS, THEIRS, THERE, TOKENS, Engine, Side, assert_right, moved
from tests.accelerator.standin import NotBuilt, StandIn, load


@pytest.fixture
def standin() -> Iterator[StandIn]:
    try:
        found = load()
    except NotBuilt as error:
        pytest.skip(f"needs the stand-in accelerator: {error}")
    found.reset()
    yield found
    found.reset()


class Worker:
    """A worker's connector, as far as registering, copying and events go."""

    def __init__(self, engine_id: str, side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
        host, layout = side.make(engine_id)
        self.kv_caches = moved(host, side.device)
        monkeypatch.setattr(module, "cache_groups", lambda caches, *_, **__: [CacheGroup("kv", caches, layout)])
        self.runtime = Runtime(Config(engine_id=engine_id, listen="tcp://127.0.0.1:0", transport="inproc"))
        transfer = SimpleNamespace(kv_buffer_device="cpu")
        model = SimpleNamespace(enable_sleep_mode=False)
        config: Any = SimpleNamespace(kv_transfer_config=transfer, model_config=model)
        self.side = WorkerSide(config, self.runtime, ())
        self.side.register_kv_caches(self.kv_caches)
        self.engine = Engine(
            engine_id=engine_id,
            runtime=self.runtime,  # type: ignore[arg-type]
            kv_caches=self.kv_caches,
            layout=layout,
            device=side.device,
        )


def test_copies_run_behind_vllms_steps(standin: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    sides = Side(device=HERE, style="blocks_first"), Side(device=THERE, style="blocks_first")
    producer, consumer = (
        Worker(name, side, monkeypatch) for name, side in zip(("producer", "consumer"), sides, strict=True)
    )
    with contextlib.closing(producer.runtime), contextlib.closing(consumer.runtime):
        with standin.held():
            for tensor in producer.kv_caches.values():
                tensor.mul_(3.0)  # the step
            torch.accelerator.set_device_index(0)
            ready: Any = producer.side._record_event()
            assert not ready.query()
            lease = producer.runtime.serve_blocks(ServeRequest("req", THEIRS, num_tokens=TOKENS, ready=ready))
            consumer.side.begin_step(KVFlowMetadata(Step()))
            after = consumer.side._before_step
            assert after is not None
            request = LoadRequest("req", lease.ticket.to_params(), OURS, after=after)
            started = consumer.runtime.start_load(request)
        started.result(60.0)
        assert_right(producer.engine, consumer.engine)
