"""A plugin of vLLM that stamps calls: when each of `CALLS` began and ended, in every process of a server."""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

VARIABLE = "KVFLOW_TEST_STAMPS"
"""The file that the stamps of all processes are appended to. Unset: nothing is stamped."""
_V1 = "vllm.v1"
_NIXL = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
CALLS = (
    f"{_V1}.engine.async_llm:AsyncLLM.add_request",
    f"{_V1}.engine.output_processor:OutputProcessor.process_outputs",
    f"{_V1}.engine.core:EngineCore.add_request",
    f"{_V1}.core.sched.scheduler:Scheduler.schedule",
    f"{_V1}.core.sched.scheduler:Scheduler.update_from_output",
    f"{_V1}.worker.gpu_worker:Worker.execute_model",
    f"{_V1}.worker.gpu_worker:Worker.sample_tokens",
    f"{_V1}.worker.gpu_model_runner:GPUModelRunner._model_forward",
    "kvflow.connector.worker:ConnectorWorker._report_load",
)
CONNECTORS = ("kvflow.vllm.connector:KVFlowConnector", f"{_NIXL}.connector:NixlPullConnector")
CONNECTOR_CALLS = (
    *("on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "handle_preemptions", "bind_connector_metadata", "start_load_kv", "wait_for_save"),
    *("get_finished", "get_transfer_results", "get_kv_connector_stats", "build_connector_worker_meta"),
)


@dataclass(frozen=True)
class Stamp:
    """One call: its method, the process and thread, the beginning and the end on the machine's monotonic clock."""

    name: str
    process: int
    thread: str
    begin_s: float
    end_s: float
    note: int
    """Tokens that a step computes, requests whose loads ended; 0 for other calls."""
    cpu_s: float
    """CPU time of the calling thread during the call."""
    beside_s: float
    """CPU time of the process's other threads during the call."""


def apply() -> None:
    """In every process of a server that has the variable set."""
    if VARIABLE not in os.environ:
        return
    sink = os.open(os.environ[VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for place in CALLS:
        _stamp(sink, place)
    for place in CONNECTORS:
        for name in CONNECTOR_CALLS:
            _stamp(sink, f"{place}.{name}")


def read(path: Path) -> list[Stamp]:
    """The stamps in order of their beginnings."""
    stamps = [Stamp(*json.loads(line)) for line in path.read_text().splitlines()]
    return sorted(stamps, key=lambda stamp: stamp.begin_s)


def leg_of(stamps: Sequence[Stamp], asked_s: float, first_s: float) -> dict[str, float]:
    """Seconds of each stretch of one request, from the question to the first token, alone at a decode server.

    `steps` is the number of steps that the engine began in between.
    """
    inside = [stamp for stamp in stamps if asked_s <= stamp.begin_s <= first_s]

    def first(name: str, after_s: float, noted: bool = False) -> Stamp:
        return next(
            stamp for stamp in inside if stamp.name == name and stamp.end_s >= after_s and (stamp.note or not noted)
        )

    frontend = first("AsyncLLM.add_request", asked_s)
    engine = first("EngineCore.add_request", frontend.begin_s)
    allocated = first("connector.update_state_after_alloc", engine.end_s)
    built = first("connector.build_connector_meta", allocated.end_s)
    started = first("connector.start_load_kv", built.end_s)
    loaded = first("connector.get_transfer_results", started.end_s, noted=True)
    scheduled = first("Scheduler.schedule", loaded.end_s, noted=True)
    forward = first("GPUModelRunner._model_forward", scheduled.end_s)
    computing = [s for s in inside if s.name == "Worker.execute_model" and s.begin_s <= forward.begin_s][-1]
    out = first("OutputProcessor.process_outputs", forward.end_s)
    reported = [s.begin_s for s in inside if s.name == "ConnectorWorker._report_load"] or [loaded.end_s]
    moments = {
        "HTTP, to the frontend's request": frontend.begin_s,
        "to the engine": engine.begin_s,
        "to the load's step: scheduled": built.end_s,
        "to the load's step: in the worker": started.begin_s,
        "load": reported[0],
        "from the load's end to its step's result": loaded.end_s,
        "to the step that computes": scheduled.begin_s,
        "to the worker": computing.begin_s,
        "to the model": forward.begin_s,
        "model": forward.end_s,
        "to the frontend": out.begin_s,
        "to the client": first_s,
    }
    spans, before_s = {}, asked_s
    for name, moment_s in moments.items():
        spans[name], before_s = moment_s - before_s, moment_s
    steps = [s for s in inside if s.name == "Scheduler.schedule" and engine.begin_s <= s.begin_s <= scheduled.begin_s]
    cpu = {"model: CPU of its thread": forward.cpu_s, "model: CPU of other threads": forward.beside_s}
    return {**spans, "whole": first_s - asked_s, **cpu, "steps": len(steps)}


class _Clocks(NamedTuple):
    now_s: float
    thread_s: float
    process_s: float


def _clocks() -> _Clocks:
    return _Clocks(time.perf_counter(), time.thread_time(), time.process_time())


def _stamp(sink: int, place: str) -> None:
    module, _, attribute = place.partition(":")
    owner_name, name = attribute.split(".")
    owner = getattr(importlib.import_module(module), owner_name)
    method = getattr(owner, name, None)
    if method is None:  # this version has no such method
        return
    label = f"connector.{name}" if name in CONNECTOR_CALLS else attribute

    def write(begin: _Clocks, result: Any) -> None:
        end = _clocks()
        cpu_s = end.thread_s - begin.thread_s
        beside_s = end.process_s - begin.process_s - cpu_s
        caller = (label, os.getpid(), threading.current_thread().name)
        stamp = (*caller, begin.now_s, end.now_s, _note(result), cpu_s, beside_s)
        os.write(sink, (json.dumps(stamp) + "\n").encode())

    setattr(owner, name, _stamped(method, write))


def _stamped(method: Callable[..., Any], write: Callable[[_Clocks, Any], None]) -> Callable[..., Any]:
    if inspect.iscoroutinefunction(method):

        @functools.wraps(method)
        async def stamped_coroutine(*args: Any, **kwargs: Any) -> Any:
            begin = _clocks()
            result = await method(*args, **kwargs)
            write(begin, result)
            return result

        return stamped_coroutine

    @functools.wraps(method)
    def stamped(*args: Any, **kwargs: Any) -> Any:
        begin = _clocks()
        result = method(*args, **kwargs)
        write(begin, result)
        return result

    return stamped


def _note(result: object) -> int:
    scheduled = getattr(result, "total_num_scheduled_tokens", None)
    if isinstance(scheduled, int):
        return scheduled
    received = getattr(result, "finished_recving", None)
    if received is None and isinstance(result, tuple) and len(result) == 2:
        received = result[1]
    return len(received) if isinstance(received, set | frozenset) else 0
