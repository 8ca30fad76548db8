"""The bench `flow`: its options, its blocks, its arithmetic; and the cable, which is gone whoever dies."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvflow.bench.cache import BenchCache, WrongBytes
from kvflow.bench.child import BenchError, RankProcess, open_children
from kvflow.bench.loads import PlannedLoad, SettingsError
from kvflow.bench.scenario import Samples
from kvflow.bench.targets import TargetRow, Verdict
from tests.bench.flow.link import Link, require_cables
from tests.bench.flow.ranks import Prefill, Schedule, open_producer, open_reader
from tests.bench.flow.results import UNTIMED, Case, Growth, HandOver, Many, Way
from tests.bench.flow.scenario import Flow, _hand_over, _open

SMALL = Flow(link=Link.GBIT, prompts="256", chunk=128, rounds=1, layers=2, many=3, many_s=0.1)
GBIT, SHM = Case(Link.GBIT, 2048), Case(Link.SHM, 2048)
# Prefill of 3 s, wire of 1 s in four chunks.
TIMES = {
    Way.WHOLE: HandOver(0.0, 3.0, 3.0, 4.0),
    Way.FLOWING: HandOver(0.0, 3.0, 0.0, 3.25),
    Way.LAST_CHUNK: HandOver(0.0, 0.0, 0.0, 0.25),
    Way.WHOLE_AT_ONCE: HandOver(0.0, 0.0, 0.0, 1.0),
    Way.FLOWING_AT_ONCE: HandOver(0.0, 0.0, 0.0, 1.0),
    Way.COMPUTED: HandOver(0.0, 0.0, 0.0, 1.0),
}
QUIET = Many(lags_s=[0.001] * 100, reader_cpu=0.14, producer_cpu=0.09, behind_s=[0.01])


# --- options and blocks


@pytest.mark.parametrize(
    ("flow", "message"),
    [
        (Flow(prompts=""), r"--prompts: '' is no multiple of --chunk, which is 512"),
        (Flow(prompts="2048,x"), r"--prompts: 'x' is no multiple"),
        (Flow(prompts="2000"), r"--prompts: '2000' is no multiple"),
        (Flow(prompts="40", chunk=20), r"--chunk: 20 is no multiple of a block, which has 16 tokens"),
        (Flow(chunk_ms=-1.0), r"--chunk-ms: -1 is less than 0"),
        (Flow(prompts="none", many_s=0.0), "there is nothing to measure"),
    ],
)
def test_options_that_cannot_be_measured(flow: Flow, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        flow.sets()


def test_the_cache_is_smollm2s_and_has_room_for_the_longest_prompt() -> None:
    flow = Flow(link=Link.SHM)
    assert flow.tokens == (2048, 8192)
    assert flow.model.block_size_bytes == 16 * 23_040
    assert flow.model.blocks == 512 + 64 + 1
    assert flow.small.block_size_bytes == 4096
    assert [one.note for one in flow.sets()] == ["shm: prompts: starting 2 ranks", "shm: many loads: starting 2 ranks"]


def test_all_ways_of_a_round_move_the_same_blocks() -> None:
    flow = Flow()
    (wake, one), (_, other) = (flow.planned(f"round 1, {way}", 2048) for way in (Way.WHOLE, Way.FLOWING))
    assert one.request_id != other.request_id
    assert (one.local_ids, one.remote_ids) == (other.local_ids, other.remote_ids)
    for name in ("local_ids", "remote_ids"):
        ids = [*getattr(one, name), *getattr(wake, name)]
        assert len(set(ids)) == 129
        assert max(ids) < flow.model.blocks
    assert flow.planned("round 2, whole", 2048)[1].local_ids != one.local_ids
    many = flow.many_loads("turn", flow.advances)
    assert len({block for load in many for block in load.remote_ids}) == flow.small.blocks == 64 * 300


def test_chunks_are_computed_in_three_times_their_wire_time_or_as_long_as_is_said() -> None:
    assert Flow().chunk_s(2048, 0.4) == pytest.approx(0.3, rel=1e-3)
    assert Flow(wire_share=0.5).chunk_s(2048, 0.4) == pytest.approx(0.2)
    assert Flow(chunk_ms=7.0).chunk_s(2048, 0.4) == 0.007


def test_the_chunks_of_a_prompt_are_all_of_it() -> None:
    load = PlannedLoad(request_id="r", local_ids=tuple(range(8)), remote_ids=(3, 1, 4, 15, 9, 2, 6, 5))
    prefill = Prefill(load=load, chunks=4, chunk_s=0.0, grows=True)
    assert [prefill.blocks_of(chunk) for chunk in range(4)] == [(3, 1), (4, 15), (9, 2), (6, 5)]
    assert prefill.num_tokens == 128
    last = prefill.last_chunk()
    assert (last.chunks, last.load.local_ids, last.load.remote_ids) == (1, (6, 7), prefill.blocks_of(3))


def test_leases_grow_in_one_step_or_spread_over_it() -> None:
    spread, in_step = (Schedule(leases=4, advances=2, every_s=0.02, in_step=in_step) for in_step in (False, True))
    assert [spread.due_s(1, lease) for lease in range(4)] == pytest.approx([0.025, 0.03, 0.035, 0.04])
    assert [in_step.due_s(1, lease) for lease in range(4)] == pytest.approx([0.04] * 4)
    assert spread.half_s == in_step.half_s == pytest.approx(0.02)


def test_what_is_written_block_by_block_is_what_a_producer_holds() -> None:
    cache = BenchCache(SMALL.model)
    cache.write([3, 1])
    assert cache.check([3, 1], [3, 1]) == 2 * SMALL.model.block_size_bytes
    with pytest.raises(WrongBytes):
        cache.check([2], [2])


# --- from samples to verdicts


def judged(
    case: Case = GBIT,
    changed: Mapping[Way, HandOver] | None = None,
    many: Many = QUIET,
    growth: Growth = Growth.SPREAD,
) -> list[TargetRow]:
    samples = Samples()
    samples.add(UNTIMED, HandOver(0.0, 9.0, 9.0, 99.0))
    samples.add(UNTIMED, Many([9.0], 9.0, 9.0, [9.0]))
    for way, times in TIMES.items():
        samples.add((case, way), (changed or {}).get(way, times))
    samples.add((case.link, growth), many)
    return list(Flow().judge(samples).targets)


def verdicts(rows: list[TargetRow]) -> dict[str, Verdict]:
    names = ("start", "of what is possible", "lower by", "no pace", "lag", "reader", "producer")
    assert len(rows) == len(names)
    for row, name in zip(rows, names, strict=True):
        assert name in row.target
    return {name: row.verdict for name, row in zip(names, rows, strict=True)}


def test_what_is_promised_of_a_slow_link() -> None:
    rows = judged()
    assert [row.measured for row in rows[:2]] == pytest.approx([0.25 / (1.3 * 0.25 + 0.002), 1.0])
    found = verdicts(rows)
    assert (found["start"], found["of what is possible"]) == (Verdict.PASS, Verdict.PASS)
    assert found["no pace"] is Verdict.NOT_MEASURED
    late = HandOver(0.0, 3.0, 0.0, 3.33)
    found = verdicts(judged(changed={Way.FLOWING: late}))
    assert (found["start"], found["of what is possible"]) == (Verdict.FAIL, Verdict.PASS)
    assert verdicts(judged(changed={Way.FLOWING: late._replace(loaded_s=3.4)}))["of what is possible"] is Verdict.FAIL


@pytest.mark.parametrize(("loaded_s", "verdict"), [(1.35, Verdict.PASS), (1.45, Verdict.FAIL)])
def test_an_absolute_saving_is_judged_where_overlap_can_bring_it(loaded_s: float, verdict: Verdict) -> None:
    """A prompt whose wire time is a third of its prefill can save less than a quarter, however it is moved."""
    assert verdicts(judged())["lower by"] is Verdict.NOT_MEASURED
    whole, flowing = HandOver(0.0, 1.0, 1.0, 2.0), HandOver(0.0, 1.0, 0.0, loaded_s)
    assert verdicts(judged(changed={Way.WHOLE: whole, Way.FLOWING: flowing}))["lower by"] is verdict


@pytest.mark.parametrize("way", [Way.FLOWING_AT_ONCE, Way.COMPUTED])
def test_over_shared_memory_nothing_gets_slower(way: Way) -> None:
    assert verdicts(judged(SHM))["no pace"] is Verdict.PASS
    slower = {way: HandOver(0.0, 0.0, 0.0, 1.04)}
    assert verdicts(judged(SHM, slower))["no pace"] is Verdict.FAIL
    assert verdicts(judged(changed=slower))["no pace"] is Verdict.NOT_MEASURED


def test_many_loads_cost_little() -> None:
    def found(**changed: Any) -> list[Verdict]:
        return [row.verdict for row in judged(many=QUIET._replace(**changed))[4:]]

    assert found() == [Verdict.PASS] * 3
    assert found(lags_s=[0.001] * 98 + [0.003] * 2) == [Verdict.FAIL, Verdict.PASS, Verdict.PASS]
    assert found(reader_cpu=0.16) == [Verdict.PASS, Verdict.FAIL, Verdict.PASS]
    assert found(producer_cpu=0.11) == [Verdict.PASS, Verdict.PASS, Verdict.FAIL]
    idle = judged(many=Many([0.1], 0.5, 0.5, []), growth=Growth.NONE)
    assert [row.verdict for row in idle[4:]] == [Verdict.NOT_MEASURED] * 3


def test_rounds_that_are_not_complete_are_an_error() -> None:
    samples = Samples()
    samples.add((GBIT, Way.WHOLE), TIMES[Way.WHOLE])
    with pytest.raises(BenchError, match="1gbit 2048: rounds are not complete"):
        Flow().judge(samples)


# --- the cable


def test_a_machine_without_the_tools_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda tool: None if tool == "tc" else tool)
    with pytest.raises(SettingsError, match=r"--link 1gbit: needs ip, tc, .* this machine has no tc"):
        SMALL.sets()
    assert Flow().links == (Link.SHM, Link.TCP)


def test_a_machine_without_the_rights_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, 1, "", "unshare: unshare failed: Operation not permitted\n")

    monkeypatch.setattr(shutil, "which", lambda tool: tool)
    monkeypatch.setattr(subprocess, "run", refused)
    with pytest.raises(SettingsError, match=r"--link 1gbit: needs root, .*: unshare: .* Operation not permitted"):
        SMALL.sets()


@pytest.fixture
def cables() -> Iterator[None]:
    """For tests that lay one: skipped where the machine does not let them; nothing of it is seen outside."""
    try:
        require_cables()
    except SettingsError as error:
        pytest.skip(f"no cable can be laid here: {error}")
    before = set(os.listdir("/sys/class/net"))
    yield
    assert set(os.listdir("/sys/class/net")) == before


def networks_of_children() -> set[int]:
    """The networks, as the kernel numbers them, of processes that descend from this one; not ours."""
    parents: dict[int, int] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text(encoding="ascii")
        except OSError:  # it has gone
            continue
        parents[int(name)] = int(stat.rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    found = set()
    for pid in family:
        try:
            found.add(os.stat(f"/proc/{pid}/ns/net").st_ino)
        except OSError:  # it has gone, or is no more than its exit code
            continue
    return found - {os.stat("/proc/self/ns/net").st_ino}


@pytest.mark.nixl
def test_a_prompt_over_the_cable_and_a_reader_that_is_killed(cables: None) -> None:
    ranks = [
        RankProcess("producer", partial(open_producer, Link.GBIT, SMALL.model)),
        RankProcess("reader", partial(open_reader, Link.GBIT, SMALL.model)),
    ]
    with open_children(ranks, Link.GBIT.environment) as children:
        _open(Link.GBIT, children)
        assert len(networks_of_children()) == 2
        case = Case(Link.GBIT, 256)
        for way in (Way.WHOLE, Way.FLOWING, Way.FLOWING_AT_ONCE, Way.COMPUTED, Way.LAST_CHUNK):
            found = _hand_over(SMALL, children, case, way, f"{way}", chunk_s=0.01, layers=(0, 1))
            assert found.begun_s <= found.computed_s <= found.loaded_s
        os.kill(children["reader"].pid, signal.SIGKILL)
        with pytest.raises(BenchError, match="reader: died"):
            _hand_over(SMALL, children, case, Way.WHOLE, "again", chunk_s=0.0, layers=(0,))
    assert networks_of_children() == set()


def _heed_interrupts() -> None:
    """Shells have what they run in the background ignore them, and so does what that starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.mark.nixl
@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_run_that_is_interrupted_leaves_no_network_behind(cables: None) -> None:
    """Thorough: see `test_a_prompt_over_the_cable_and_a_reader_that_is_killed` of this file."""
    options = ["--link", "1gbit", "--prompts", "2048", "--rounds", "50", "--chunk-ms", "200"]
    command = [sys.executable, "-m", "tests.bench", "flow", *options]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_heed_interrupts) as bench:
        assert bench.stderr is not None
        for line in bench.stderr:
            if "a chunk in" in line:
                break
        assert len(networks_of_children()) == 2
        bench.send_signal(signal.SIGINT)
        bench.communicate(timeout=120)
    assert bench.returncode == 130
    assert networks_of_children() == set()
