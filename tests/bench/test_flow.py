"""The bench `flow`: its options, its blocks, its arithmetic; and the cable, which is gone whoever dies."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any
from unittest.mock import patch

import psutil
import pytest
from tests_support import each

from kvflow.bench.child import BenchError, RankProcess, open_children
from kvflow.bench.loads import PlannedLoad, SettingsError
from tests.bench.flow.link import Link, require_cables
from tests.bench.flow.ranks import FlowProducer, FlowReader, Prefill, Schedule, open_rank
from tests.bench.flow.results import UNTIMED, Case, Growth, HandOver, Many, Way
from tests.bench.flow.scenario import Flow, _hand_over, _open
from tests.bench.scenario import Samples
from tests.bench.targets import TargetRow, Verdict

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
    last = prefill.last_chunk()
    assert (prefill.num_tokens, last.chunks, last.load.local_ids, last.load.remote_ids) == (128, 1, (6, 7), (6, 5))


def test_leases_grow_in_one_step_or_spread_over_it() -> None:
    spread, in_step = (Schedule(leases=4, advances=2, every_s=0.02, in_step=in_step) for in_step in (False, True))
    assert [spread.due_s(1, lease) for lease in range(4)] == pytest.approx([0.025, 0.03, 0.035, 0.04])
    assert [in_step.due_s(1, lease) for lease in range(4)] == pytest.approx([0.04] * 4)


# --- from samples to verdicts


WHOLE, LATE = HandOver(0.0, 1.0, 1.0, 2.0), HandOver(0.0, 3.0, 0.0, 3.33)
SLOWER = HandOver(0.0, 0.0, 0.0, 1.04)
MANY_OF_NONE = {"many": Many([0.1], 0.5, 0.5, []), "growth": Growth.NONE}


@each(
    ("given", "verdicts"),
    [
        # The verdicts: start, saved of what is possible, lower by; no pace; lag, the reader's CPU, the producer's.
        ({}, "PP- - PPP"),
        ({"changed": {Way.FLOWING: LATE}}, "FP- - PPP"),
        ({"changed": {Way.FLOWING: LATE._replace(loaded_s=3.4)}}, "FF- - PPP"),
        # A prompt whose wire time is a third of its prefill can save less than a quarter, however it is moved.
        ({"changed": {Way.WHOLE: WHOLE, Way.FLOWING: HandOver(0.0, 1.0, 0.0, 1.35)}}, "FPP - PPP"),
        ({"changed": {Way.WHOLE: WHOLE, Way.FLOWING: HandOver(0.0, 1.0, 0.0, 1.45)}}, "FFF - PPP"),
        # Over shared memory nothing gets slower.
        ({"case": SHM}, "--- P PPP"),
        ({"case": SHM, "changed": {Way.FLOWING_AT_ONCE: SLOWER}}, "--- F PPP"),
        ({"case": SHM, "changed": {Way.COMPUTED: SLOWER}}, "--- F PPP"),
        ({"changed": {Way.COMPUTED: SLOWER}}, "PP- - PPP"),
        ({"many": QUIET._replace(lags_s=[0.001] * 98 + [0.003] * 2)}, "PP- - FPP"),
        ({"many": QUIET._replace(reader_cpu=0.16)}, "PP- - PFP"),
        ({"many": QUIET._replace(producer_cpu=0.11)}, "PP- - PPF"),
        (MANY_OF_NONE, "PP- - ---"),
    ],
)
def test_what_is_promised(given: dict[str, Any], verdicts: str) -> None:
    rows = judged(**given)
    names = ("start", "of what is possible", "lower by", "no pace", "lag", "reader", "producer")
    assert [name in row.target for name, row in zip(names, rows, strict=True)] == [True] * 7
    letters = {Verdict.PASS: "P", Verdict.FAIL: "F", Verdict.NOT_MEASURED: "-"}
    assert "".join(letters[row.verdict] for row in rows) == verdicts.replace(" ", "")


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


def test_a_start_is_measured_in_what_it_may_take_and_a_saving_in_what_is_possible() -> None:
    assert [row.measured for row in judged()[:2]] == pytest.approx([0.25 / (1.3 * 0.25 + 0.002), 1.0])


def test_rounds_that_are_not_complete_are_an_error() -> None:
    samples = Samples()
    samples.add((GBIT, Way.WHOLE), TIMES[Way.WHOLE])
    with pytest.raises(BenchError, match="1gbit 2048: rounds are not complete"):
        Flow().judge(samples)


# --- the cable


@each(
    ("missing", "code", "message"),
    [
        ("tc", 0, r"--link 1gbit: needs ip, tc, .* this machine has no tc"),
        ("", 1, r"--link 1gbit: needs root, .*: unshare: .* Operation not permitted"),
    ],
)
def test_a_machine_without_the_tools_or_the_rights_says_so(missing: str, code: int, message: str) -> None:
    refused = subprocess.CompletedProcess("", code, "", "unshare: unshare failed: Operation not permitted\n")
    with (
        patch.object(shutil, "which", lambda tool: None if tool == missing else tool),
        patch.object(subprocess, "run", lambda *_, **__: refused),
    ):
        with pytest.raises(SettingsError, match=message):
            SMALL.sets()
        assert Flow().links == (Link.SHM, Link.TCP)


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
    found = set()
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(OSError):  # it has gone, or is no more than its exit code
            found.add(os.stat(f"/proc/{child.pid}/ns/net").st_ino)
    return found - {os.stat("/proc/self/ns/net").st_ino}


@pytest.mark.nixl
def test_a_prompt_over_the_cable_and_a_reader_that_is_killed(cables: None) -> None:
    ranks = [
        RankProcess("producer", partial(open_rank, FlowProducer, Link.GBIT, SMALL.model)),
        RankProcess("reader", partial(open_rank, FlowReader, Link.GBIT, SMALL.model)),
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
