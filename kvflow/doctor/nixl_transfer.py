"""Checks of NIXL, and of loads between two processes of `kvflow bench` with a small cache.

All checks run in child processes, so a library that crashes only leads to a finding.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version

from kvflow.bench.cache import CacheShape
from kvflow.bench.child import QUIET_ENVIRONMENT, BenchError, ChildCaller, RankProcess, open_caller, open_children
from kvflow.bench.engine import EngineConsumer, EngineProducer, Pair, hand_over, open_pair
from kvflow.bench.loads import scattered_loads
from kvflow.bench.ucx import ReadPath, ucx_log
from kvflow.doctor.findings import Finding, fail, ok, warn
from kvflow.transport.nixl.native import VERBS, plugin_dir_note, start_agent

_BACKEND = "UCX"
_INSTALL = "pip install 'nixl>=1.4.1'"
_SHARED_MEMORY = ("cma/", "xpmem/", "knem/", "posix/", "sysv/")
_SHAPE = CacheShape(layers=8, blocks=256)
_REPEATS = 3


def check_nixl() -> tuple[Finding, Sequence[str]]:
    """Check that a NIXL agent starts in a child process, and that the process ends without an error.

    Return the finding, and the names of NIXL's plugins.
    """
    try:
        installed = version("nixl")
    except PackageNotFoundError:
        return fail("NIXL", "not installed", _INSTALL), ()
    try:
        with open_children([RankProcess("NIXL", open_caller)], QUIET_ENVIRONMENT) as children:
            plugins, verbs, note = children["NIXL"].run(ChildCaller.call, start_agent, _BACKEND)
    except BenchError as error:
        return judge_plugins(installed, (), problem=error.reason, note=plugin_dir_note()), ()
    return judge_plugins(installed, plugins, verbs=verbs, exit_code=children["NIXL"].exit_code, note=note), plugins


def judge_plugins(
    installed: str,
    plugins: Sequence[str],
    problem: str = "",
    *,
    verbs: bool = False,
    exit_code: int | None = 0,
    note: str = "",
) -> Finding:
    """Return the finding about a child process that has tried to start a NIXL agent.

    `installed`: version of NIXL. `plugins`: names of NIXL's plugins. `problem`: reason why no agent started, or "".
    `verbs`: whether the system's libibverbs was loaded before NIXL. `exit_code`: the process's `exitcode`. `note`: what
    `plugin_dir_note` returned.
    """
    unset = "unset NIXL_PLUGIN_DIR, unless its plugins were built with this NIXL"
    if problem:
        fix = f"unset UCX_ variables that do not fit this host, or reinstall it: {_INSTALL} --force-reinstall"
        return fail("NIXL", f"{installed} does not start: {problem}{note}", unset if note else fix)
    found = f"{installed}, plugins: {', '.join(plugins) or 'none'}{note}"
    if verbs:
        found += f"; the system's {VERBS} is loaded first"
    if _BACKEND not in plugins:
        return fail("NIXL", found, f"the plugin {_BACKEND} is needed; {unset if note else 'reinstall it'}")
    if exit_code:
        how = f"by signal {-exit_code}" if exit_code < 0 else f"with exit code {exit_code}"
        return fail(
            "NIXL",
            f"{found}; a process with an agent ends {how}",
            "libraries of the system and of NIXL's wheel are incompatible: docs/troubleshooting.md, signal 11",
        )
    return warn("NIXL", found, unset) if note else ok("NIXL", found)


def check_self_transfer(
    judge_path: Callable[[str, ReadPath | None], Finding], *, where: str = "", device: str | None = None
) -> Iterator[Finding]:
    """Load blocks between two processes of this machine. Yield a finding about the speed, and one about UCX's path.

    `judge_path(name, path)` returns the finding about the path. The caches are in host memory, or on `device`. UCX runs
    with the settings of the environment, except for its log. `where` is appended to the names of the findings.
    """
    name = f"self-transfer{where}"
    try:
        with ucx_log() as log:
            with open_pair(_SHAPE, log.environment, device) as pair:
                pid = pair[1].pid
                block_s, large_s = (_median_s(pair, count) for count in (1, _SHAPE.blocks // 2))
            path = log.read_path(pid, _SHAPE.region_block_size_bytes)
    except BenchError as error:
        yield fail(name, error.reason, "see the findings above; with UCX_LOG_LEVEL=info UCX logs what it tries")
        return
    size_bytes = _SHAPE.blocks // 2 * _SHAPE.block_size_bytes
    yield ok(
        name,
        f"{size_bytes / large_s / 1e9:.2f} GB/s ({size_bytes >> 20} MB a load), {block_s * 1e6:.0f} us for one "
        "block; every byte compared",
    )
    yield judge_path(f"path of the bytes{where}", path)


def check_mapped_transfer(name: str, device: str | None) -> Finding:
    """Load blocks between two processes of this machine that map each other's memory on `device` (Config.cuda_ipc)."""
    try:
        with open_pair(_SHAPE, QUIET_ENVIRONMENT, device, cuda_ipc=True) as pair:
            large_s = _median_s(pair, _SHAPE.blocks // 2)
            shared, mapped = pair[0].run(EngineProducer.mapping), pair[1].run(EngineConsumer.mapping)
    except BenchError as error:
        return warn(name, error.reason, "leave out Config.cuda_ipc, and please report it")
    size_bytes = _SHAPE.blocks // 2 * _SHAPE.block_size_bytes
    return judge_mapping(name, mapped.peers > 0, mapped.problem or shared.problem, size_bytes / large_s)


def judge_mapping(name: str, mapped: bool, problem: str, bytes_per_s: float) -> Finding:
    """Return the finding `name` about two processes with `Config.cuda_ipc`.

    `mapped`: the consumer has mapped the producer's memory. `problem`: why it has not, or "".
    """
    if mapped:
        return ok(name, f"mapped: {bytes_per_s / 1e9:.2f} GB/s; every byte compared")
    why = problem or "there is no device memory"
    return warn(name, f"not mapped: {why}", "Config.cuda_ipc has no effect here: NIXL reads the blocks")


def _median_s(pair: Pair, count: int) -> float:
    """Return the median number of seconds of a load of `count` blocks.

    The first load, which connects, is not counted.
    """
    turns = [scattered_loads(f"doctor {count} {turn}", _SHAPE.blocks, [count]) for turn in range(_REPEATS + 1)]
    return statistics.median([hand_over(pair, loads)[0].seconds for loads in turns][1:])


def judge_host_path(ucx_tls: str | None, name: str, path: ReadPath | None) -> Finding:
    """Return the finding `name` about `path`, the UCX path of reads between two local processes.

    The path should be shared memory. tcp is accepted if UCX_TLS is set; `ucx_tls` is its value or None. `path` is None
    if UCX did not log it.
    """
    if path is None:
        return path_not_logged(name)
    if path.transport.startswith(_SHARED_MEMORY):
        return ok(name, f"shared memory: {path}")
    if "tcp/" not in path.transport:
        return ok(name, str(path))
    if ucx_tls is not None:
        return ok(name, f"tcp: {path}; UCX_TLS={ucx_tls} is set")
    fix = "see /dev/shm and reading other processes; without them engines of one machine talk over tcp"
    return warn(name, f"tcp, on one machine: {path}", fix)


def path_not_logged(name: str) -> Finding:
    """Return the finding `name`, which says that UCX has not logged the path of the reads."""
    return warn(name, "UCX did not log the path", "look at UCX's log: UCX_PROTO_INFO=y UCX_LOG_LEVEL=info")
