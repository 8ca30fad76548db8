"""The bench `peers`: its options, the contenders that it leaves out, and its ratios and verdict."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from kvflow.bench.cache import BenchCache, CacheShape
from kvflow.bench.child import BenchError
from kvflow.bench.loads import MIB, Fabric, PlannedLoad, SettingsError, Ticket
from kvflow.bench.raw import AgentAddress
from tests.bench.peers import contenders, memory, scenario
from tests.bench.peers.contenders import Absent, Conditions, Peer, absent, measured_alone
from tests.bench.peers.memory import Run, local_rows, remote_rows, runs_of
from tests.bench.peers.ranks import BreakableReader, CancelResult, ColdResult
from tests.bench.peers.results import (
    CancelRow,
    ColdRow,
    FaultRow,
    GrowthRow,
    IdleRow,
    LagRow,
    LeftOut,
    PeerSpeed,
    Row,
    judge,
)
from tests.bench.peers.scenario import Peers
from tests.bench.peers.trials import FaultResult, GrowthResult, IdleResult
from tests.bench.scenario import Outcome, Samples, SpinningRank
from tests.bench.targets import Verdict
from tests.bench.transfer.ranks import Job, TurnResult
from tests.bench.transfer.sizes import LoadSize, loads_of_turn, parse_sizes

SPEED_ONLY = Row.SPEED.value
ONE, BULK, BURST = LoadSize("one block", 1, 20), LoadSize("16 MB", 32, 8), LoadSize("64 x 1 MB", 2, 128, 64)
BYTES = {ONE: MIB // 2, BULK: 16 * MIB, BURST: 64 * MIB}


# --- options


def test_raw_nixl_and_kvflow_always_run_and_the_others_are_chosen() -> None:
    assert Peers().chosen == tuple(Peer)
    assert Peers(contenders="mooncake_write, nixl_connect").chosen == (
        Peer.TUNED,
        Peer.KVFLOW,
        Peer.NIXL_CONNECT,
        Peer.MOONCAKE_WRITE,
    )
    assert Peers(contenders="").chosen == Peers(contenders="kvflow").chosen == (Peer.TUNED, Peer.KVFLOW)


def test_a_name_that_is_no_contender() -> None:
    with pytest.raises(SettingsError, match=r"--contenders: .*mooncake_read.* got 'mooncake'"):
        Peers(contenders="nixl_connect,mooncake").sets()


def test_mooncake_runs_over_tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "absent", lambda _: {})
    monkeypatch.setattr(scenario, "failing", lambda *_: {})
    shm, tcp = Peers(pairs=1, rounds=1, rows=SPEED_ONLY).sets()
    assert {rank.name.split()[0] for rank in shm.ranks} == set(Peer) - {Peer.MOONCAKE_READ, Peer.MOONCAKE_WRITE}
    assert {rank.name.split()[0] for rank in tcp.ranks} == set(Peer)
    assert {rank.name.split()[0] for rank in tcp.ranks if isinstance(rank, SpinningRank)} == {
        "nixl_connect",
        "lmcache",
        "ray_rdt",
        "torch_transport",
    }


def test_rows_are_chosen_and_failures_are_measured_over_tcp_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scenario, "absent", lambda _: {})
    monkeypatch.setattr(scenario, "failing", lambda *_: {})
    with pytest.raises(SettingsError, match=r"--rows: .*speed.* got 'lag'"):
        Peers(rows="lag").sets()
    with pytest.raises(SettingsError, match=r"--cold-blocks: .*'0,16'"):
        Peers(cold_blocks="0,16", rows="cold").sets()[0].turns({}).__next__()
    cold = [(Row.COLD, peer, blocks) for peer in (Peer.TUNED, Peer.KVFLOW) for blocks in (4, 16)]
    killed = [(Row.KILLED, peer, 0) for peer in (Peer.TUNED, Peer.TUNED, Peer.KVFLOW, Peer.KVFLOW)]
    for transport, rows in ((None, cold + killed), (Fabric.TCP, cold + killed), (Fabric.SHM, cold)):
        options = Peers(transport=transport, contenders="", rows="killed, cold", cold_blocks="16,4", trials=4)
        (alone,) = options.sets()
        assert [(turn.key[0], *turn.key[2:]) for turn in alone.turns({}) if isinstance(turn.key, tuple)] == rows


def test_all_contenders_get_kvflows_frames_if_wanted() -> None:
    assert "UCX_TCP_TX_SEG_SIZE" not in Conditions(Fabric.TCP).environment
    assert Conditions(Fabric.TCP, same_ucx=True).environment["UCX_TCP_TX_SEG_SIZE"] == "64k"


# --- who is left out


def test_who_is_not_installed_is_left_out_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    libraries(monkeypatch, tmp_path, gone="import no_such_library.engine")
    monkeypatch.setattr(contenders, "_LIBRARIES", {Peer.NIXL_CONNECT: "gone"})
    assert absent((Peer.TUNED, Peer.NIXL_CONNECT)) == {Peer.NIXL_CONNECT: Absent("no_such_library is not installed")}
    monkeypatch.setattr(scenario, "failing", lambda *_: {})
    first, second, *_ = Peers(contenders="nixl_connect", rows=SPEED_ONLY).sets()
    (turn,) = first.turns({})
    assert turn.note == "nixl_connect is left out: no_such_library is not installed"
    assert (turn.key, turn.run()) == (Peer.NIXL_CONNECT, Absent("no_such_library is not installed"))
    assert {rank.name.split()[0] for rank in second.ranks} == {"raw_tuned", "kvflow"}


def test_who_cannot_be_imported_is_left_out_with_what_the_import_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = "raise ImportError('libibverbs.so.1: cannot open')"
    libraries(monkeypatch, tmp_path, half_installed=error, installed="pass")
    modules = {Peer.NIXL_CONNECT: "installed", Peer.MOONCAKE_READ: "half_installed"}
    monkeypatch.setattr(contenders, "_LIBRARIES", modules)
    assert absent(tuple(Peer)) == {Peer.MOONCAKE_READ: Absent("import: ImportError: libibverbs.so.1: cannot open")}


def libraries(monkeypatch: pytest.MonkeyPatch, folder: Path, **bodies: str) -> None:
    """Make modules whose function `library` has these bodies."""
    for name, body in bodies.items():
        (folder / f"{name}.py").write_text(f"def library():\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))


def test_who_fails_alone_is_left_out_but_kvflow_may_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def failing(*_: object) -> Iterator[None]:
        raise BenchError("lmcache reader: Traceback\nOSError: no port")
        yield

    monkeypatch.setattr(contenders, "open_ranks", failing)
    shape = CacheShape(layers=1, blocks=1)
    assert measured_alone(Peer.LMCACHE, Conditions(Fabric.TCP), shape, lambda *_: 1) == Absent("OSError: no port")
    with pytest.raises(BenchError):
        measured_alone(Peer.KVFLOW, Conditions(Fabric.TCP), shape, lambda *_: 1)


# --- what a load moves, and what lands late


def test_blocks_that_are_neighbours_on_both_sides_are_one_run() -> None:
    load = PlannedLoad(request_id="r", local_ids=(4, 5, 6, 1, 2), remote_ids=(7, 8, 0, 1, 3))
    runs = [Run(4, 7, 2), Run(6, 0, 1), Run(1, 1, 1), Run(2, 3, 1)]
    assert runs_of(load) == runs
    cache = BenchCache(CacheShape(layers=2, blocks=9, kv_heads=1))
    size, plane = 4096, 9 * 4096
    (first, second), bases = cache.bases, (1 << 30, 1 << 31)
    wanted = [
        (base + half + local * size, size * blocks)
        for base in (first, second)
        for half in (0, plane)
        for local, _, blocks in runs
    ]
    assert [tuple(row) for row in local_rows(cache, runs).tolist()] == wanted
    there = [
        (base + half + remote * size, size * blocks)
        for base in bases
        for half in (0, plane)
        for _, remote, blocks in runs
    ]
    assert [tuple(row) for row in remote_rows(cache, bases, runs).tolist()] == there


def test_sizes_of_neighbouring_blocks() -> None:
    (size,) = parse_sizes("4c", 2)
    assert (size.label, size.contiguous) == ("4 MB contiguous", True)
    wake, *loads = loads_of_turn(size._replace(loads_per_turn=2), "turn", 100)
    assert wake.local_ids == (0,)
    assert [load.local_ids for load in loads] == [tuple(range(1, 33)), tuple(range(33, 65))]
    assert [runs_of(load) for load in loads] == [[Run(1, 1, 32)], [Run(33, 33, 32)]]


class HeldReader:
    """Loads write a block when told to; `late` blocks are written after the library's word."""

    def __init__(self, cache: BenchCache, *, late: Sequence[int] = (), says: bool = True) -> None:
        self._cache, self._late, self._says = cache, late, says

    async def connect(self, address: AgentAddress) -> None: ...

    def prepare(self, loads: Sequence[PlannedLoad], tickets: Sequence[Ticket]) -> Job:
        async def job() -> None:
            self._cache.write([0])
            await asyncio.Event().wait()

        return job

    async def wait_safe(self) -> bool:
        asyncio.get_running_loop().call_later(0.05, self._cache.write, self._late)
        return self._says


@pytest.mark.parametrize(("late", "blocks"), [((), 0), ((1, 2), 2)])
async def test_bytes_that_land_after_the_librarys_word_are_found(
    late: Sequence[int], blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_LOOK_S", 0.05)
    cache = BenchCache(CacheShape(layers=2, blocks=4))
    reader = BreakableReader(cache, HeldReader(cache, late=late, says=not late))
    load = PlannedLoad(request_id="r", local_ids=(0, 1, 2), remote_ids=(0, 1, 2))
    result = await reader.cancel(load, (), after_s=0.01)
    assert (result.outcome, result.landed_before_bytes) == ("CancelledError", cache.shape.block_size_bytes)
    assert result.landed_bytes == blocks * cache.shape.block_size_bytes
    assert (result.safe_s is None) == bool(late)


async def test_a_load_that_waits_is_cancelled_at_its_bound() -> None:
    cache = BenchCache(CacheShape(layers=1, blocks=1))
    load = PlannedLoad(request_id="r", local_ids=(0,), remote_ids=(0,))
    result = await BreakableReader(cache, HeldReader(cache)).watch(load, (), bound_s=0.01)
    assert (result.ended_at_s, result.outcome) == (None, "waits")
    assert result.cancelled_s is not None


# --- from turns to rows


def turn(*seconds: float) -> TurnResult:
    return TurnResult(seconds=seconds, cpu_s=0.5, checked_bytes=1)


def judged(transport: Fabric, *found: tuple[LoadSize, Peer, float]) -> Outcome:
    """Each contender twice: as fast as given, and twice as slow."""
    samples = Samples()
    for size, peer, seconds in found:
        samples.add("check", turn(100.0))
        samples.add((transport, size, peer, 0), turn(seconds, seconds))
        samples.add((transport, size, peer, 1), turn(2 * seconds))
    samples.add(Peer.NIXL_CONNECT, Absent("no time"))
    return judge(samples, BYTES)


def test_ratios_are_to_raw_nixl_and_to_kvflow_at_the_same_size() -> None:
    outcome = judged(
        Fabric.SHM,
        (ONE, Peer.TUNED, 1.0),
        (ONE, Peer.KVFLOW, 2.0),
        (BURST, Peer.TUNED, 9.0),
        (BURST, Peer.KVFLOW, 6.0),
        (BURST, Peer.MOONCAKE_READ, 3.0),
    )
    rows: dict[tuple[str, Peer], PeerSpeed] = {(row.size, row.contender): row for row in outcome.results["speed"]}
    assert [(key, row.ratio_to_b, row.ratio_to_kvflow) for key, row in rows.items()] == [
        (("one block", Peer.TUNED), 1.0, 2.0),
        (("one block", Peer.KVFLOW), 0.5, 1.0),
        (("64 x 1 MB", Peer.TUNED), 1.0, pytest.approx(2 / 3)),
        (("64 x 1 MB", Peer.KVFLOW), 1.5, 1.0),
        (("64 x 1 MB", Peer.MOONCAKE_READ), 3.0, 2.0),
    ]
    burst = rows["64 x 1 MB", Peer.KVFLOW]
    assert (burst.samples, burst.pair_medians_s, burst.median_s) == (3, (6.0, 12.0), 9.0)
    assert burst.gb_per_s == pytest.approx(64 * MIB / 9.0 / 1e9)
    assert burst.cpu_s_per_gb == pytest.approx(2 * 0.5 / (3 * 64 * MIB / 1e9))
    assert outcome.results["left out"] == [LeftOut(contender=Peer.NIXL_CONNECT, what="all", why="no time")]


@pytest.mark.parametrize(
    ("read_s", "write_s", "measured", "where", "verdict"),
    [
        (3.0, 2.0, 1.0, "16 MB, mooncake_write", Verdict.PASS),
        (1.9, 4.0, 0.95, "16 MB, mooncake_read", Verdict.FAIL),
    ],
)
def test_bulk_has_to_be_as_fast_as_mooncake_in_its_better_direction(
    read_s: float, write_s: float, measured: float, where: str, verdict: Verdict
) -> None:
    outcome = judged(
        Fabric.TCP,
        (ONE, Peer.TUNED, 1.0),
        (ONE, Peer.KVFLOW, 9.0),
        (ONE, Peer.MOONCAKE_READ, 1.0),
        (BULK, Peer.TUNED, 1.0),
        (BULK, Peer.KVFLOW, 2.0),
        (BULK, Peer.MOONCAKE_READ, read_s),
        (BULK, Peer.MOONCAKE_WRITE, write_s),
    )
    row, at_once, _ = outcome.targets
    assert at_once.measured is None
    assert (row.measured, row.where, row.verdict) == (pytest.approx(measured), where, verdict)


def test_loads_at_once_are_a_target_of_their_own() -> None:
    found = ((Peer.TUNED, 1.0), (Peer.KVFLOW, 2.0), (Peer.MOONCAKE_READ, 1.0))
    bulk, at_once, _ = judged(Fabric.TCP, *((BURST, peer, seconds) for peer, seconds in found)).targets
    assert (bulk.measured, at_once.measured, at_once.verdict) == (None, 0.5, Verdict.FAIL)
    assert at_once.where == "64 x 1 MB, mooncake_read"


def test_without_mooncake_nothing_is_said_of_it() -> None:
    outcome = judged(Fabric.TCP, (BULK, Peer.TUNED, 1.0), (BULK, Peer.KVFLOW, 2.0))
    assert {(row.measured, row.verdict) for row in outcome.targets} == {(None, Verdict.NOT_MEASURED)}


def test_every_row_has_its_table() -> None:
    samples, tcp = Samples(), Fabric.TCP
    samples.add((Row.COLD, tcp, Peer.KVFLOW, 16), ColdResult(0.5, [0.2, 0.1, 0.3]))
    samples.add((Row.IDLE, tcp, Peer.KVFLOW, 0), IdleResult(0.5, 1.0))
    samples.add((Row.MEMORY, tcp, Peer.KVFLOW, 0), GrowthResult(100, 4.0, 8.0, 0, 1))
    trials = [CancelResult(0.1, 0.2, 0, MIB, "CancelledError"), CancelResult(0.3, None, 2 * MIB, MIB, "loaded")]
    samples.add((Row.CANCEL, tcp, Peer.LMCACHE, 0), trials)
    samples.add((Row.CANCEL, tcp, Peer.KVFLOW, 0), trials[:1])
    samples.add((Row.KILLED, tcp, Peer.LMCACHE, 0), FaultResult(None, "waits", 0.1))
    samples.add((Row.STOPPED, tcp, Peer.LMCACHE, 0), Absent("it died"))
    outcome = judge(samples, BYTES)
    kvflow = {"transport": tcp, "contender": Peer.KVFLOW}
    lmcache = {"transport": tcp, "contender": Peer.LMCACHE}
    assert outcome.results == {
        "cold": [ColdRow(**kvflow, blocks=16, cold_s=0.5, warm_s=0.2)],
        "idle": [IdleRow(**kvflow, producer_percent=0.5, reader_percent=1.0)],
        "memory": [GrowthRow(**kvflow, loads=100, producer_kb=4.0, reader_kb=8.0, producer_files=0, reader_files=1)],
        "cancel": [
            CancelRow(
                **lmcache,
                trials=2,
                outcome="CancelledError, loaded",
                ended_s=0.2,
                ended_max_s=0.3,
                safe_s=None,
                landed_mb=2.0,
            ),
            CancelRow(
                **kvflow, trials=1, outcome="CancelledError", ended_s=0.1, ended_max_s=0.1, safe_s=0.2, landed_mb=0.0
            ),
        ],
        "faults": [FaultRow(**lmcache, fault=Row.KILLED, ended_s=None, outcome="waits", cancelled_s=0.1)],
        "left out": [LeftOut(contender=Peer.LMCACHE, what="stopped over tcp", why="it died")],
    }
    assert [row.verdict for row in outcome.targets][-1] is Verdict.PASS


def test_lag_is_of_the_largest_loads() -> None:
    samples = Samples()
    for size in (ONE, BURST):
        for peer in (Peer.TUNED, Peer.KVFLOW):
            turned = TurnResult(seconds=[1.0], cpu_s=0.5, checked_bytes=1, lags_s=[0.001, 0.004])
            samples.add((Fabric.SHM, size, peer, 0), turned)
    assert judge(samples, {ONE: BYTES[ONE], BURST: BYTES[BURST]}).results["loop_lag"] == [
        LagRow(transport=Fabric.SHM, size="64 x 1 MB", contender=peer, lag_p99_s=0.004, lag_max_s=0.004)
        for peer in (Peer.TUNED, Peer.KVFLOW)
    ]
