"""Two processes that hand blocks over between caches on one GPU: how fast, and which way."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping

from kvflow.bench.child import BenchError
from kvflow.bench.gpu.engine import PRODUCER_VALUE, Engine, Pair, engines, specs, ucx_log
from kvflow.bench.gpu.pool import PoolShape
from kvflow.doctor.cuda.checks import judge_path
from kvflow.doctor.cuda.facts import Cuda
from kvflow.doctor.findings import Finding, fail, ok

_NAME = "self-transfer on GPUs"
_REPEATS = 5
_POOL = PoolShape(layers=8, blocks=256)


def check_gpu_transfer(cuda: Cuda, device: str = "cuda", pool: PoolShape = _POOL) -> Iterator[Finding]:
    """The blocks of the last load of each size are compared in full; registering GPU memory is part of it.

    UCX's settings are those of the environment. A test gives another device.
    """
    try:
        with ucx_log() as log:
            environment: Mapping[str, str] = log.environment
            with engines(*specs(device, pool), environment) as pair:
                pid = pair.reader.pid
                block_s, large_s = _median_s(pair, "block", 1), _median_s(pair, "large", pool.blocks // 2)
            path = log.path(pid, pool.piece_bytes)
    except (BenchError, RuntimeError) as error:
        fix = "the findings above may say why; with UCX_LOG_LEVEL=info UCX says what it tries"
        yield fail(_NAME, str(error).strip().splitlines()[-1], fix)
        return
    size_bytes = pool.blocks // 2 * pool.block_bytes
    yield ok(
        _NAME,
        f"{size_bytes / large_s / 1e9:.2f} GB/s ({size_bytes >> 20} MB a load), {block_s * 1e6:.0f} us for one block; "
        "the last load compared in full",
    )
    yield judge_path(path, cuda)


def _median_s(pair: Pair, name: str, count: int) -> float:
    """Of some loads of so many blocks; the first, which connects, is not counted."""
    blocks = range(pair.pool.blocks)
    ids = [(blocks[turn : turn + count], blocks[turn + 1 : turn + 1 + count]) for turn in range(_REPEATS + 1)]
    ends = pair.must_hand_over_all(name, ids)
    if wrong := pair.reader.run(Engine.count_other, ids[-1][1], PRODUCER_VALUE):
        raise RuntimeError(f"{wrong} of {count} blocks do not hold what the producer has")
    return statistics.median(end.seconds for end in ends[1:])
