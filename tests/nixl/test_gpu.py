"""Caches in the memory of a CUDA device, over real NIXL, between two processes: UCX does not use cuda_ipc within one.

What can run on a CPU does so too, where a thread stands for the device's stream: so the code of the tests has run. How
fast copies are on a busy device is measured, not tested: `python3 dev.py gpu --only E5`.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch

from kvflow.bench.ucx import ucx_log
from tests.gpu.pair import engines, specs
from tests.nixl.hand_over import BLOCKS, hand_over, how_it_ended, start_load
from tests.nixl.test_stale import load_around_their_leases_ends
from tests.support.engine import EngineSetup, small
from tests.support.engine_process import EngineProcess, Engines
from tests.support.pools import PoolShape, scattered_ids
from tests.support.verbs import EngineError

pytestmark = [pytest.mark.nixl, pytest.mark.timeout(300)]

ON_CUDA = (
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none"),
)
DEVICES = ["cpu", pytest.param("cuda", marks=ON_CUDA)]
MOSTLY_CUDA = [pytest.param("cpu", marks=pytest.mark.thorough), DEVICES[1]]
"""Marks of tests of processes and of events, which show the same on a CPU."""
STAGING = ["auto", pytest.param("always", marks=pytest.mark.thorough)]
LATE_S = 0.2
MIB = 1 << 20


@pytest.fixture
def started(device: str) -> Iterator[Engines]:
    with Engines({}) as started:
        yield started


def pair(started: Engines, device: str, **others: Any) -> list[EngineProcess]:
    return started.pair(device=device, **others)


@pytest.mark.parametrize("device", MOSTLY_CUDA)
def test_blocks_move_and_nothing_else_does(started: Engines, device: str) -> None:
    producer, consumer = pair(started, device)
    remote, local = [3, 7, 9, 20, 21, 22], [0, 5, 6, 40, 1, 63]
    producer.call("write_pattern", block_ids=remote)
    ticket = producer.call("offer", request_id="r", block_ids=remote)
    consumer.call("load", request_id="r", ticket=ticket, block_ids=local)
    assert producer.call("outcome", request_id="r") == "read"
    assert consumer.call("count_wrong", block_ids=local) == 0
    others = [block for block in range(64) if block not in local]
    assert consumer.call("values", block_ids=others) == [-1.0] * len(others)


@pytest.mark.parametrize("device", MOSTLY_CUDA)
def test_the_way_is_what_a_device_allows(device: str) -> None:
    """On one GPU cuda_ipc; the cache is read back in full."""
    pool = PoolShape(layers=2, blocks=16)
    local = scattered_ids(2, 16, 8)
    with ucx_log() as log:
        with engines(*specs(device, pool), log.environment) as both:
            pid = both.reader.pid
            both.hand_over("r", scattered_ids(1, 16, 8), local).succeeded()
            assert both.reader.call("count_other", block_ids=local, value=1.0) == 0
        path = log.read_path(pid, pool.piece_bytes)
    assert path is not None
    assert device == "cpu" or path.transport.startswith("cuda_ipc"), path


@pytest.mark.parametrize("device", MOSTLY_CUDA)
def test_a_cache_is_mapped_until_its_peer_is_forgotten(device: str) -> None:
    """One batch of copies on a GPU; elsewhere the setting changes nothing."""
    remote, local = scattered_ids(1, 16, 8), scattered_ids(2, 16, 8)
    with engines(*specs(device, PoolShape(layers=2, blocks=16), cuda_ipc=True)) as both:
        both.hand_over("r", remote, local).succeeded()
        assert both.reader.call("count_other", block_ids=local, value=1.0) == 0
        for mapped in (device == "cuda", False):
            transport = both.reader.call("statistics")["transport"]
            assert (transport["mapped_peers"], transport["mapping_problem"]) == (mapped, "")
            assert both.reader.call("forget", engine_id="producer")


class Cut(NamedTuple):
    """Differences between the producer and the consumer. `tp`: the one with tensor parallelism 2."""

    id: str
    producer: dict[str, Any] = {}  # noqa: RUF012 - read only
    consumer: dict[str, Any] = {}  # noqa: RUF012 - read only
    local_blocks: int = 8


NHD, HND = {"pool": small(order="NHD")}, {}
SCRATCH = {"config": {"scratch": "always"}}
STAGED = {"config": {"staging": "always"}}
SECOND_HALF = {"first_head": 2, "config": {"tp_rank": 1, "tp_size": 2}}
CUTS = [
    Cut("NHD to HND, straight", NHD, {"config": {"scratch": "never"}}),
    Cut("NHD to HND, scratch", NHD, SCRATCH),
    Cut("HND to NHD, scratch", HND, NHD | SCRATCH),
    Cut("blocks of 32 to blocks of 16", {"pool": small(block_size=32)}, HND, 16),
    Cut("half of the heads, HND", HND, SECOND_HALF | {"pool": small(kv_heads=2)}),
    Cut("half of the heads, NHD", NHD, SECOND_HALF | {"pool": small(kv_heads=2, order="NHD")}),
    Cut("staged at the producer", STAGED, {}),
    Cut("staged at the consumer", {}, STAGED),
    Cut("staged on both sides", STAGED, STAGED),
]
FAST_CUT = "NHD to HND, scratch"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "cut",
    [pytest.param(cut, id=cut.id, marks=() if cut.id == FAST_CUT else pytest.mark.thorough) for cut in CUTS],
)
def test_every_byte_has_its_place_between_caches_that_differ(started: Engines, device: str, cut: Cut) -> None:
    producer, consumer = started.start(
        EngineSetup(**{"engine_id": "producer", "device": device, "fill": 1.0, **cut.producer}),
        EngineSetup(**{"engine_id": "consumer", "device": device, "fill": -1.0, **cut.consumer}),
    )
    remote, local = [17, 3, 9, 20, 40, 22, 8, 1], [0, 5, 6, 40, 1, 63, 30, 31, *range(8, 16)][: cut.local_blocks]
    producer.call("write_pattern", block_ids=remote)
    ticket = producer.call("offer", request_id="r", block_ids=remote)
    consumer.call("load", request_id="r", ticket=ticket, block_ids=local)
    assert consumer.call("count_wrong", block_ids=local) == 0
    producer.call("revoke", request_id="r")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("staging", STAGING)
@pytest.mark.parametrize(
    "own_stream", [False, pytest.param(True, marks=pytest.mark.thorough)], ids=["default_stream", "own_stream"]
)
def test_blocks_that_are_computed_late_are_not_read_early(
    started: Engines, device: str, staging: str, own_stream: bool
) -> None:
    producer, consumer = pair(started, device, own_stream=own_stream, config={"staging": staging})
    hand_over(producer, consumer, "connects")
    for turn, value in enumerate((5.0, 6.0, 7.0)):
        offer = {"request_id": f"r{turn}", "block_ids": BLOCKS, "value": value, "delay_s": LATE_S}
        ticket = producer.call("compute_and_offer", **offer)
        consumer.call("load", request_id=f"r{turn}", ticket=ticket, block_ids=BLOCKS)
        assert consumer.call("values", block_ids=BLOCKS) == [value] * len(BLOCKS)
        assert producer.call("outcome", request_id=f"r{turn}") == "read"


@pytest.mark.parametrize("device", MOSTLY_CUDA)
@pytest.mark.parametrize("staging", STAGING)
def test_bytes_do_not_land_before_the_last_owner_has_written(started: Engines, device: str, staging: str) -> None:
    producer, consumer = pair(started, device, own_stream=True, config={"staging": staging})
    hand_over(producer, consumer, "connects")
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    consumer.call("load_behind", request_id="r", ticket=ticket, block_ids=BLOCKS, delay_s=LATE_S)
    assert consumer.call("values", block_ids=BLOCKS) == [1.0] * len(BLOCKS)
    assert producer.call("outcome", request_id="r") == "read"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_no_load_succeeds_with_bytes_that_a_device_has_overwritten(started: Engines, device: str) -> None:
    """On a CPU this is all of `test_stale`."""
    load_around_their_leases_ends(started, device=device)


@pytest.mark.parametrize("device", MOSTLY_CUDA)
def test_a_consumer_outlives_its_producer_and_works_with_the_next(started: Engines, device: str) -> None:
    producer, consumer = pair(started, device)
    hand_over(producer, consumer, "before")
    ticket = producer.call("offer", request_id="late", block_ids=BLOCKS)
    producer.kill()
    with pytest.raises(EngineError) as error:
        consumer.call("load", request_id="late", ticket=ticket, block_ids=BLOCKS)
    assert error.value.kind in ("TransferFailed", "PeerUnreachable", "LoadTimeout"), error.value
    (again,) = started.start(EngineSetup(engine_id="producer-2", fill=3.0, device=device))
    consumer.call("safe")
    hand_over(again, consumer, "after", value=3.0)


# --- what only CUDA has


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_a_device_without_room_for_scratch_memory_fails_a_load_at_most(started: Engines, device: str) -> None:
    producer, consumer = started.start(
        EngineSetup(engine_id="producer", fill=1.0, device=device, **NHD),
        EngineSetup(engine_id="consumer", fill=-1.0, device=device, **SCRATCH),
    )
    consumer.call("take_memory", left_bytes=16 * MIB)
    ticket = producer.call("offer", request_id="r", block_ids=BLOCKS)
    ended = how_it_ended(start_load(consumer, "r", ticket))
    assert ended in ("loaded", "TransferFailed")
    if ended == "loaded":
        assert consumer.call("values", block_ids=BLOCKS) == [1.0] * len(BLOCKS)
    consumer.call("give_memory_back")
    producer.call("revoke", request_id="r")
    hand_over(producer, consumer, "afterwards")


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_scratch_memory_is_none_that_kernels_of_the_engine_still_write(started: Engines, device: str) -> None:
    producer, consumer = started.start(
        EngineSetup(engine_id="producer", device=device, **NHD),
        EngineSetup(engine_id="consumer", device=device, **SCRATCH),
    )
    producer.call("write_pattern", block_ids=BLOCKS)
    for turn in range(5):
        consumer.call("dirty_memory", size_bytes=32 * MIB, delay_s=LATE_S)
        ticket = producer.call("offer", request_id=f"r{turn}", block_ids=BLOCKS)
        consumer.call("load", request_id=f"r{turn}", ticket=ticket, block_ids=BLOCKS)
        assert consumer.call("count_wrong", block_ids=BLOCKS) == 0
        assert producer.call("outcome", request_id=f"r{turn}") == "read"


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
@pytest.mark.parametrize("staging", ["auto", "always"])
def test_an_engine_may_capture_graphs_while_loads_run(started: Engines, device: str, staging: str) -> None:
    producer, consumer = pair(started, device, config={"staging": staging})
    hand_over(producer, consumer, "connects")
    producer.call("fill", block_ids=BLOCKS, value=2.0)
    loads = []
    for name in (names := [f"r{turn}" for turn in range(4)]):  # staged, as many as host blocks are there for
        ticket = producer.call("offer", request_id=name, block_ids=BLOCKS[:16])
        loads.append({"request_id": name, "ticket": ticket, "block_ids": BLOCKS[:16]})
    assert consumer.call("load_while_capturing", loads=loads) > 0
    assert [producer.call("outcome", request_id=name) for name in names] == ["read"] * len(names)
    assert consumer.call("values", block_ids=BLOCKS[:16]) == [2.0] * 16


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_CUDA)])
def test_memory_that_cuda_ipc_cannot_open_is_refused_when_it_is_registered(device: str) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    with (
        pytest.raises(EngineError, match="PYTORCH_CUDA_ALLOC_CONF"),
        engines(*specs(device, PoolShape(layers=2, blocks=16)), environment),
    ):
        pass


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices, and torch sees fewer")
def test_a_rank_on_the_second_device_takes_nothing_of_the_first() -> None:
    before = memory_used_mib(0)
    with engines(*specs("cuda:1", PoolShape(layers=2, blocks=16))) as both:
        both.hand_over("r", range(8), range(8)).succeeded()
        assert memory_used_mib(0) - before < 100, "a CUDA context takes several hundred MiB"


def memory_used_mib(device: int) -> int:
    command = ["nvidia-smi", f"--id={device}", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
