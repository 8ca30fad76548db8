"""The bench `peers`: its options, the contenders that it leaves out, and its ratios and verdict."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvflow.bench.loads import MIB, Fabric, SettingsError
from tests.bench.peers import contenders, scenario
from tests.bench.peers.contenders import Absent, Peer, absent
from tests.bench.peers.results import LeftOut, PeerSpeed, judge
from tests.bench.peers.scenario import Peers
from tests.bench.scenario import Outcome, Samples, SpinningRank
from tests.bench.targets import Verdict
from tests.bench.transfer.ranks import TurnResult
from tests.bench.transfer.sizes import LoadSize

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
    shm, tcp = Peers(pairs=1, rounds=1).sets()
    assert {rank.name.split()[0] for rank in shm.ranks} == {"raw_tuned", "kvflow", "nixl_connect"}
    assert {rank.name.split()[0] for rank in tcp.ranks} == set(Peer)
    assert {rank.name for rank in tcp.ranks if isinstance(rank, SpinningRank)} == {
        "nixl_connect producer",
        "nixl_connect reader",
    }


# --- who is left out


def test_who_is_not_installed_is_left_out_and_it_is_said_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "_MODULES", {Peer.NIXL_CONNECT: "no_such_library.engine"})
    assert absent((Peer.TUNED, Peer.NIXL_CONNECT)) == {
        Peer.NIXL_CONNECT: Absent("no_such_library.engine is not installed")
    }
    first, second, *_ = Peers(contenders="nixl_connect").sets()
    (turn,) = first.turns({})
    assert turn.note == "nixl_connect is left out: no_such_library.engine is not installed"
    assert (turn.key, turn.run()) == (Peer.NIXL_CONNECT, Absent("no_such_library.engine is not installed"))
    assert {rank.name.split()[0] for rank in second.ranks} == {"raw_tuned", "kvflow"}


def test_who_cannot_be_imported_is_left_out_with_what_the_import_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "half_installed.py").write_text("raise ImportError('libibverbs.so.1: cannot open')\n")
    (tmp_path / "installed.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    modules = {Peer.NIXL_CONNECT: "installed", Peer.MOONCAKE_READ: "half_installed"}
    monkeypatch.setattr(contenders, "_MODULES", modules)
    assert absent(tuple(Peer)) == {
        Peer.MOONCAKE_READ: Absent("import half_installed: ImportError: libibverbs.so.1: cannot open")
    }
    assert absent((Peer.NIXL_CONNECT,)) == {}


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
    assert outcome.results["left out"] == [LeftOut(contender=Peer.NIXL_CONNECT, why="no time")]


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
    row, at_once = outcome.targets
    assert at_once.measured is None
    assert (row.measured, row.where, row.verdict) == (pytest.approx(measured), where, verdict)


def test_loads_at_once_are_a_target_of_their_own() -> None:
    found = ((Peer.TUNED, 1.0), (Peer.KVFLOW, 2.0), (Peer.MOONCAKE_READ, 1.0))
    bulk, at_once = judged(Fabric.TCP, *((BURST, peer, seconds) for peer, seconds in found)).targets
    assert (bulk.measured, at_once.measured, at_once.verdict) == (None, 0.5, Verdict.FAIL)
    assert at_once.where == "64 x 1 MB, mooncake_read"


def test_without_mooncake_nothing_is_said_of_it() -> None:
    outcome = judged(Fabric.TCP, (BULK, Peer.TUNED, 1.0), (BULK, Peer.KVFLOW, 2.0))
    assert {(row.measured, row.verdict) for row in outcome.targets} == {(None, Verdict.NOT_MEASURED)}
