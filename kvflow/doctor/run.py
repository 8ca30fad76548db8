"""Runs all checks of `kvflow doctor`. Later checks may depend on the findings of earlier checks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial

from kvflow.config import Config
from kvflow.doctor.backends import check_backends
from kvflow.doctor.engine_pair import examine_pair
from kvflow.doctor.findings import Finding, Status, ok, warn
from kvflow.doctor.host import Host, check_host, has_gpus, read_host
from kvflow.doctor.nixl_transfer import (
    check_mapped_transfer,
    check_nixl,
    check_self_transfer,
    judge_host_path,
)
from kvflow.doctor.peer_channel import examine_peer
from kvflow.doctor.version import versions


def examine(
    config: Config,
    *,
    peer: str | None,
    peer_engine: str,
    transfer: bool,
    note: Callable[[str], None],
    stock: str | None = None,
    pair: tuple[str, str] | None = None,
) -> Iterator[Finding]:
    """Run the checks one after another and yield their findings.

    Args:
        config: Timeouts and CURVE keys for asking peers, and the limits that decide how many open files are needed.
        peer: Address of a peer's side channel to check, if any.
        peer_engine: Engine id expected at `peer`; "" for any.
        transfer: True to move bytes: with each NIXL backend, between two processes, and on GPUs.
        note: Function that takes a line of progress, called before each slow check.
        stock: Address of a vLLM engine with its own NixlConnector, if any.
        pair: A prefill and a decode engine to compare, each as ENGINE_ID@tcp://host:port, if any.
    """
    host = read_host()
    yield ok("kvflow", ", ".join(f"{name} {number}" for name, number in versions().items()))
    yield from check_host(host, config)
    note("starting NIXL")
    nixl, plugins = check_nixl()
    yield nixl
    if transfer and plugins:
        note("starting NIXL's backends, and moving some bytes by each")
        yield check_backends(plugins)
    if transfer and nixl.status is not Status.FAIL:
        note("handing blocks over between two processes, some seconds")
        yield from check_self_transfer(partial(judge_host_path, host.environment.get("UCX_TLS")))
    elif transfer:
        yield warn("self-transfer", "not tried", "NIXL first")
    if has_gpus(host):
        note("looking at the GPUs")
        yield from _examine_gpus(host, transfer and nixl.status is not Status.FAIL, note)
    if peer is not None:
        note(f"asking {peer}")
        yield from asyncio.run(examine_peer(config, peer, peer_engine))
    if pair is not None:
        note(f"asking {' and '.join(pair)}")
        yield from asyncio.run(examine_pair(config, *pair))
    if stock is not None:
        note(f"asking {stock}")
        yield from _examine_stock(config, stock)


def _examine_stock(config: Config, address: str) -> Iterator[Finding]:
    """Check the vLLM engine at `address`, which runs vLLM's own NixlConnector."""
    from kvflow.doctor.stock_engine import examine_stock

    yield from asyncio.run(examine_stock(address, config.handshake_timeout_s))


def _examine_gpus(host: Host, transfer: bool, note: Callable[[str], None]) -> Iterator[Finding]:
    """Check the GPUs and, with `transfer`, loads between caches on GPUs."""
    from kvflow.doctor.cuda.cuda_checks import check_cuda, judge_gpu_path
    from kvflow.doctor.cuda.facts import read_cuda

    cuda = read_cuda()
    yield from check_cuda(host, cuda)
    if transfer and cuda.probe.devices:
        note("handing blocks over between two processes on a GPU, some seconds")
        yield from check_self_transfer(partial(judge_gpu_path, cuda), where=" on GPUs", device="cuda")
        note("the same with Config.cuda_ipc")
        yield check_mapped_transfer("memory mapped on GPUs", "cuda")
