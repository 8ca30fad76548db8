"""The experiments, the most valuable first, and what reading the sources of UCX, NIXL and CUDA lets one expect.

What is expected of speed is for one H100 or H200, both processes on it, and a cache in its memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvflow.bench.gpu.judging import Expected
from kvflow.bench.gpu.runner import Experiment

TOTAL_S = 570.0
"""All of them together: ten minutes less what installing takes."""

_STAGED = ("straight, own stream", "straight, default stream", "staged, own stream", "staged, default stream")

EXPERIMENTS: Sequence[Experiment] = (
    Experiment(
        name="E0",
        title="the machine",
        settles="what the doctor can know of it",
        run=f"{__package__}.machine:facts",
        limit_s=30,
        expected=[
            Expected(fact="GPUDirect RDMA writes ordering", least=100),
            Expected(fact="doctor fails", equals=0),
        ],
    ),
    Experiment(
        name="E1",
        title="the way of reads",
        settles="whether cuda_ipc needs GET_ZCOPY, and a context on the agent's thread",
        run=f"{__package__}.paths:way_of_reads",
        limit_s=50,
        expected=[
            Expected(fact="GET_ZCOPY on, context set: path", has="cuda_ipc"),
            Expected(fact="GET_ZCOPY on, context none: path", has="cuda_ipc"),
            Expected(fact="GET_ZCOPY on, context set: GB/s", least=200),
            Expected(fact="GET_ZCOPY default, context set: path", has="tcp"),
            Expected(fact="GET_ZCOPY default, context set: GB/s", least=0.3, most=2),
            *(
                Expected(fact=f"GET_ZCOPY {zcopy}, context {context}: wrong bytes", equals=0, always=True)
                for zcopy in ("default", "on")
                for context in ("set", "none")
            ),
        ],
    ),
    Experiment(
        name="E3",
        title="computed late, written late",
        settles="whether events keep loads from bytes of before",
        run=f"{__package__}.order:events",
        limit_s=60,
        expected=[
            *(
                Expected(fact=f"{what}, {case}, with event: wrong loads", equals=0, always=True)
                for case in _STAGED
                for what in ("served early", "loaded early")
            ),
            *(
                Expected(fact=f"{what}, {case}, without: wrong loads", least=1)
                for case in _STAGED[:2]
                for what in ("served early", "loaded early")
            ),
        ],
    ),
    Experiment(
        name="E6",
        title="leases that end under their loads",
        settles="whether seals hold where devices overwrite",
        run=f"{__package__}.order:stale",
        limit_s=40,
        expected=[
            Expected(fact="succeeded with other bytes", equals=0, always=True),
            Expected(fact="succeeded", least=1),
            Expected(fact="failed", least=1),
        ],
    ),
    Experiment(
        name="E2",
        title="the cost of a piece",
        settles="how large pieces and the window should be, and whether pushing is faster",
        run=f"{__package__}.paths:cost_of_pieces",
        limit_s=70,
        expected=[
            Expected(fact="READ 32K: post us/piece", least=1, most=6),
            Expected(fact="READ 32K: GB/s", least=8, most=32),
            Expected(fact="READ 2M: GB/s", least=400),
            Expected(fact="READ 8M: GB/s", least=1000),
            Expected(fact="WRITE 32K, SGL 1: GB/s", least=100),
        ],
    ),
    Experiment(
        name="E4",
        title="loads straight between devices",
        settles="what kvflow adds to NIXL, LBHNC against BLHNC, and the window",
        run=f"{__package__}.speed:straight",
        limit_s=80,
        expected=[
            Expected(fact="LBHNC: one block, us", most=250),
            Expected(fact="LBHNC: path", has="cuda_ipc"),
            Expected(fact="LBHNC 256 MB: GB/s", least=8, most=32),
            Expected(fact="BLHNC 256 MB: GB/s", least=200),
            Expected(fact="BLHNC, 256 MB in flight: GB/s", least=200),
        ],
    ),
    Experiment(
        name="E5",
        title="copies on idle and on busy devices",
        settles="whether copies wait for the engine's kernels",
        run=f"{__package__}.speed:copies",
        limit_s=70,
        expected=[
            Expected(fact="pinned, device to host: GB/s", least=25),
            Expected(fact="pinned, host to device: GB/s", least=25),
            Expected(fact="one process, staged: busy / idle", most=2),
        ],
    ),
    Experiment(
        name="E12",
        title="tests on the device, and the doctor",
        settles="regressions",
        run=f"{__package__}.machine:tests",
        limit_s=180,
        expected=[Expected(fact="doctor fails", equals=0), Expected(fact="tests: exit code", equals=0)],
        only_cuda=True,
    ),
    Experiment(
        name="E7",
        title="an engine's steps beside loads",
        settles="what polling costs an engine",
        run=f"{__package__}.company:steps_beside_loads",
        limit_s=60,
        expected=[
            Expected(fact="p50 beside / alone", most=1.02),
            Expected(fact="p99 beside - alone, ms", most=0.5),
            Expected(fact="loads that failed", equals=0, always=True),
        ],
    ),
    Experiment(
        name="E8",
        title="the death of a producer",
        settles="how soon readers know, and how long its memory stays taken",
        run=f"{__package__}.company:death_of_a_producer",
        limit_s=60,
        expected=[
            Expected(fact="load under the kill: s after it", most=1),
            Expected(fact="load from a new producer", equals="succeeded", always=True),
        ],
    ),
    Experiment(
        name="E9",
        title="reads over tcp",
        settles="whether the serving agent misses wake-ups when it copies for readers",
        run=f"{__package__}.speed:over_tcp",
        limit_s=40,
        expected=[
            Expected(fact="one block: p50 ms", most=1),
            Expected(fact="steps of 100 ms", equals=0),
            Expected(fact="bulk: GB/s", least=0.3, most=1),
            Expected(fact="ended in order", equals=True, always=True),
        ],
    ),
    Experiment(
        name="E10",
        title="memory that is mapped by hand",
        settles="whether expandable segments are noticed",
        run=f"{__package__}.paths:mapped_memory",
        limit_s=30,
        expected=[
            Expected(fact="cuda_ipc can open it", equals=False),
            Expected(fact="registering", has="PYTORCH_CUDA_ALLOC_CONF"),
        ],
        only_cuda=True,
    ),
    Experiment(
        name="E11",
        title="host buffers, large caches, little memory",
        settles="defaults of staging, and whether scratch memory can fail safely",
        run=f"{__package__}.speed:memory",
        limit_s=60,
        expected=[
            Expected(fact="staged 64 MB: GB/s", least=5),
            Expected(fact="registering: s", most=0.1),
            Expected(fact="little memory: load afterwards", equals="succeeded"),
        ],
    ),
)


def chosen(only: str) -> list[Experiment]:
    """Those that are named, in the order of their value; all without names. ValueError for one that does not exist."""
    names = [name.strip().upper() for name in only.split(",") if name.strip()]
    known = [experiment.name for experiment in EXPERIMENTS]
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"--only: no experiment {', '.join(unknown)}; there are {', '.join(known)}")
    return [experiment for experiment in EXPERIMENTS if not names or experiment.name in names]
