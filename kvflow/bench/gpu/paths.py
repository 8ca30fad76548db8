"""E1, E2 and E10: which way NIXL reads from one process's GPU memory to another's, and what a piece costs there."""

from __future__ import annotations

import statistics

from kvflow.bench.child import BenchError, Environment
from kvflow.bench.gpu.engine import engines, specs, ucx_log
from kvflow.bench.gpu.pool import PoolShape, scattered_ids
from kvflow.bench.gpu.raw import Moved, RawRank, raw_pair
from kvflow.bench.gpu.setting import Setting
from kvflow.device.cuda import DriverError, load_driver

MIB = 1 << 20
GET_ZCOPY = {"UCX_CUDA_IPC_ENABLE_GET_ZCOPY": "on"}
_SIZES = {"4K": 4 << 10, "32K": 32 << 10, "256K": 256 << 10, "2M": 2 << 20, "8M": 8 << 20}
_REPEATS = 5


def way_of_reads(setting: Setting) -> None:
    """E1: two processes, raw reads; with a CUDA context on the agent's thread and without, GET over cuda_ipc as it is
    by default and switched on."""
    cases: dict[str, Environment] = {"default": dict.fromkeys(GET_ZCOPY), "on": GET_ZCOPY}
    for zcopy, environment in cases.items():
        for context in (True, False):
            case = f"GET_ZCOPY {zcopy}, context {'set' if context else 'none'}"
            try:
                _read_one_way(setting, case, environment, context)
            except BenchError as error:  # one case that crashes is a result, and no reason to leave out the others
                setting.facts.add(f"{case}: failed", str(error).strip().splitlines()[-1])


def _read_one_way(setting: Setting, case: str, environment: Environment, context: bool) -> None:
    size_bytes, piece_bytes = setting.size(64, 4) * MIB, setting.size(8, 1) * MIB
    with ucx_log() as log:
        with raw_pair(setting.device, size_bytes, {**environment, **log.environment}, context=context) as (_, reader):
            pid = reader.pid
            moved = [reader.run(RawRank.move, piece_bytes, size_bytes, "READ", seed) for seed in range(_REPEATS)]
            right = reader.run(RawRank.count_value, 1)
        setting.facts.add(f"{case}: path", log.said(pid, piece_bytes))
    setting.facts.add(f"{case}: GB/s", _gb_per_s(size_bytes, moved))
    setting.facts.add(f"{case}: wrong bytes", size_bytes - right)


def cost_of_pieces(setting: Setting) -> None:
    """E2: reads of one amount in pieces of several sizes, and writes of small ones with NIXL's batched copies."""
    size_bytes = setting.size(64, 8) * MIB
    with raw_pair(setting.device, size_bytes, GET_ZCOPY) as (_, reader):
        for label, piece_bytes in _SIZES.items():
            reader.run(RawRank.move, piece_bytes, size_bytes, "READ", 0)  # the first opens memory handles
            moved = [reader.run(RawRank.move, piece_bytes, size_bytes, "READ", seed + 1) for seed in range(_REPEATS)]
            post_us = statistics.median(one.post_s for one in moved) * 1e6 / (size_bytes // piece_bytes)
            setting.facts.add(f"READ {label}: post us/piece", post_us)
            setting.facts.add(f"READ {label}: GB/s", _gb_per_s(size_bytes, moved))
    for batched in ("0", "1"):
        with raw_pair(setting.device, size_bytes, {**GET_ZCOPY, "NIXL_UCX_SGL_ENABLE": batched}) as (_, reader):
            reader.run(RawRank.move, _SIZES["32K"], size_bytes, "WRITE", 0)
            moved = [reader.run(RawRank.move, _SIZES["32K"], size_bytes, "WRITE", seed + 1) for seed in range(_REPEATS)]
        setting.facts.add(f"WRITE 32K, SGL {batched}: GB/s", _gb_per_s(size_bytes, moved))


def _gb_per_s(size_bytes: int, moved: list[Moved]) -> float:
    return size_bytes / statistics.median(one.seconds for one in moved) / 1e9


def mapped_memory(setting: Setting) -> None:
    """E10: what registering memory of torch's expandable segments does, and which way it is read if it is taken."""
    _say_whether_openable(setting)
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTORCH_ALLOC_CONF": None}
    pool = PoolShape(layers=4, blocks=64)
    with ucx_log() as log:
        try:
            with engines(*specs(setting.device, pool), {**environment, **log.environment}) as pair:
                pid = pair.reader.pid
                end = pair.hand_over("mapped", scattered_ids(1, 64, 32), scattered_ids(2, 64, 32))
        except BenchError as error:
            setting.facts.add("registering", str(error).strip().splitlines()[-1])
            return
        setting.facts.add("registering", "taken")
        setting.facts.add("load", end.error or f"{32 * pool.block_bytes / end.seconds / 1e9:.2f} GB/s")
        setting.facts.add("path", log.said(pid, pool.piece_bytes))


def _say_whether_openable(setting: Setting) -> None:
    import os

    os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"  # read when torch is loaded, or at first use
    import torch

    memory = torch.zeros(64 * MIB, dtype=torch.uint8, device=setting.device)
    try:
        setting.facts.add("cuda_ipc can open it", load_driver().is_shareable(memory.data_ptr()))
    except DriverError as error:
        setting.facts.add("cuda_ipc can open it", str(error))
