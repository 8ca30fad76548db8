"""`kvflow doctor`: every check with scripted facts, the steps to a peer for real, and one run as a user does it."""

from __future__ import annotations

import asyncio
import io
import json
import os
import resource
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from another_install import lines_of_another_install
from rich.console import Console
from side_channels import to
from tests_support import WAIT_S, each, limited, small_cache
from typer.testing import CliRunner

import kvflow
from kvflow import Config, Runtime
from kvflow.bench.child import BenchError
from kvflow.bench.ucx import ReadPath, read_path
from kvflow.cli.app import app, findings_as_json, print_findings
from kvflow.core.plan.topology import Rank
from kvflow.core.protocol import codec, messages
from kvflow.core.protocol.addresses import Address
from kvflow.doctor.backends import judge_backends
from kvflow.doctor.findings import Finding, Status, fail, is_broken, ok, warn
from kvflow.doctor.host import Host, check_host, check_open_files, read_host
from kvflow.doctor.nixl_transfer import judge_host_path, judge_plugins
from kvflow.doctor.peer_channel import examine_peer, judge_answer
from kvflow.runtime.channel.asking import ZmqSideChannel
from kvflow.runtime.clock import SystemClock
from kvflow.runtime.open_files import QUESTION_FILES, needed

GOOD = Host(
    locked_bytes_max=None,
    open_files_max=1 << 20,
    open_files_hard_max=1 << 20,
    capabilities=0,
    shared_memory_free_bytes=8 << 30,
    ptrace_scope=0,
    huge_pages="always",
    rdma_devices=("mlx5_0",),
    networks=("eth0",),
    gpus=(),
    environment={},
)
CONFIG = Config(engine_id="doctor", handshake_timeout_s=WAIT_S)
NEEDED = needed(CONFIG)


OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL
LOCKING, PTRACE = "memory locking", "reading other processes"
SOFT, HARD = {"open_files_max": 512}, {"open_files_hard_max": 1024}
HUGE = {"THP_MEM_ALLOC_ENABLE": "1"}


def assert_found(
    findings: Iterable[Finding], name: str, status: Status, found: str, fix: str, besides: Collection[str] = ()
) -> None:
    """This was found and nothing else is wrong, but for what may be `besides`."""
    known = {one.name: one for one in findings}
    assert {one.name for one in known.values() if one.status is not OK} <= {name, *besides}
    one = known[name]
    assert (one.status, bool(one.fix)) == (status, status is not OK)
    assert found in one.found
    assert fix in one.fix


@each(
    ("changes", "name", "status", "found", "fix"),
    [
        ({"locked_bytes_max": 8 << 20}, LOCKING, FAIL, "at most 8192 KiB", "ulimit -l"),
        ({**SOFT, **HARD}, "open files", WARN, "some 106 other ranks", f"ulimit -Hn {NEEDED}"),
        ({"open_files_max": 50, "open_files_hard_max": 50}, "open files", FAIL, "too few", f"LimitNOFILE={NEEDED}"),
        ({"shared_memory_free_bytes": 64 << 20}, "/dev/shm", WARN, "64 MiB free", "--shm-size"),
        ({"shared_memory_free_bytes": None}, "/dev/shm", WARN, "does not exist", "tmpfs"),
        ({"ptrace_scope": 1}, PTRACE, WARN, "ptrace_scope 1", "yama.ptrace_scope=0"),
        ({"huge_pages": "madvise"}, "huge pages", WARN, "does not ask", "THP_MEM_ALLOC_ENABLE=1"),
        ({"huge_pages": "never"}, "huge pages", WARN, "never", "echo madvise"),
        # what makes a limit harmless
        ({"locked_bytes_max": 1 << 16, "capabilities": 1 << 14}, LOCKING, OK, "CAP_IPC_LOCK", ""),
        ({"locked_bytes_max": 1 << 16, "rdma_devices": ()}, LOCKING, OK, "only RDMA needs more", ""),
        ({"open_files_max": None, "open_files_hard_max": None}, "open files", OK, "no limit", ""),
        (SOFT, "open files", OK, f"at most 512, which a runtime raises to {1 << 20}", ""),
        ({**SOFT, "open_files_hard_max": None}, "open files", OK, "which a runtime raises without limit", ""),
        ({"open_files_max": NEEDED}, "open files", OK, f"at most {NEEDED}, {NEEDED} needed", ""),
        ({"ptrace_scope": 3, "capabilities": 1 << 19}, PTRACE, OK, "CAP_SYS_PTRACE", ""),
        ({"ptrace_scope": None}, PTRACE, OK, "no Yama", ""),
        ({"huge_pages": "madvise", "environment": HUGE}, "huge pages", OK, "torch asks", ""),
        ({"environment": {"UCX_TLS": "tcp"}}, "devices", OK, "mlx5_0; network: eth0; GPU: none; UCX_TLS=tcp", ""),
    ],
)
def test_each_trouble_is_found_and_has_its_fix(
    changes: dict[str, object], name: str, status: Status, found: str, fix: str
) -> None:
    assert_found(check_host(replace(GOOD, **changes), CONFIG), name, status, found, fix)  # type: ignore[arg-type]


def test_an_engine_with_few_peers_needs_few_files() -> None:
    few = limited(CONFIG, peers_max=16, readers_max=16, side_channel_connections_max=64)
    assert needed(few) < 512
    assert check_open_files("open files", replace(GOOD, open_files_max=512, open_files_hard_max=512), few).status is OK


def test_the_docs_say_how_many_files_the_defaults_need() -> None:
    text = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
    assert f"LimitNOFILE={NEEDED}" in text


async def test_a_question_has_no_more_files_than_the_check_says() -> None:
    count = 20
    asked, left = asyncio.Semaphore(0), asyncio.Semaphore(0)

    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.release()
        while await reader.read(1024):
            pass
        writer.close()
        await writer.wait_closed()
        left.release()

    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    address = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    question = messages.MetadataRequest(reader="r", target=Address("silent", Rank(0, 0, 0), "tcp://127.0.0.1:1"))
    channel = ZmqSideChannel(CONFIG, SystemClock().now_s)

    async def asking(count: int) -> int:
        """Return the number of open files while `count` questions wait for their answers."""
        questions = [asyncio.create_task(channel.ask(to(address, question), fingerprint=b"")) for _ in range(count)]
        for _ in range(count):
            await asked.acquire()
        files = len(os.listdir("/proc/self/fd"))
        for one in questions:
            one.cancel()
        await asyncio.gather(*questions, return_exceptions=True)
        for _ in range(count):
            await left.acquire()
        return files

    async with server:
        # The server's ends of the connections are in this process too.
        assert await asking(count + 1) - await asking(1) <= count * (QUESTION_FILES + 1)
    channel.close()


def test_this_machine_can_be_read() -> None:
    host = read_host()
    assert (host.open_files_max, host.open_files_hard_max) == resource.getrlimit(resource.RLIMIT_NOFILE)
    assert next(iter(check_host(host, CONFIG))).status is OK
    assert host.huge_pages in (None, "always", "madvise", "never")


# --- NIXL and UCX


def test_nixl_needs_its_plugin() -> None:
    assert judge_plugins("1.5.1", ("POSIX", "UCX")) == ok("NIXL", "1.5.1, plugins: POSIX, UCX")
    assert judge_plugins("1.5.1", ("POSIX",)).status is FAIL
    broken = judge_plugins("1.5.1", (), problem="ImportError: libcudart.so.12")
    assert (broken.status, "libcudart.so.12" in broken.found) == (FAIL, True)
    note = "; NIXL_PLUGIN_DIR is set to '/opt/other'"
    for finding, status in (
        (judge_plugins("1.5.1", ("UCX",), note=note), WARN),
        (judge_plugins("1.5.1", (), note=note), FAIL),
        (judge_plugins("1.5.1", (), problem="died", note=note), FAIL),
    ):
        assert_found([finding], "NIXL", status, "/opt/other", "unset NIXL_PLUGIN_DIR")
    assert BenchError("NIXL: Traceback\n  File ...\nImportError: no\n").reason == "ImportError: no"


def test_backends_say_what_they_move_and_only_the_stores_is_missed() -> None:
    moving = {"UCX": "memory", "POSIX": "files", "GDS": "!NIXL_ERR_NOT_FOUND"}
    assert judge_backends(moving) == ok("backends", "UCX moves memory; POSIX moves files; not working: GDS")
    for broken in ({**moving, "POSIX": "!no io_uring"}, {"UCX": "memory"}):
        assert_found([judge_backends(broken)], "backends", WARN, "", "kvflow.storage needs POSIX")


def ucx_log(owner: str, operation: str, *rows: str) -> str:
    lines = ["+---+", f"| {owner} |", f"| {operation} |", "+---+", "| Range | Description | Config |", *rows, "+---+"]
    return "".join(f"[1795264635.911658] [vm:25199:0]   {line}\n" for line in lines)


READING = "remote memory read by ucp_get*(multi) into host memory from host"


def test_the_way_is_what_ucx_chose_for_reads_from_others_of_that_size() -> None:
    to_self = ucx_log("reader self cfg#0", READING, "| 0..inf | zero-copy | self/memory |")
    other = "reader intra-node cfg#1"
    ways = "| 0 | short | tcp/lo |", "| 1..16383 | copy-in | posix/memory |", "| 16384..inf | zero-copy | cma/memory |"
    log = to_self + ucx_log(other, "remote memory write by ucp_put*", "| 0..inf | copy-in | tcp/lo |")
    log += ucx_log(other, READING, *ways)
    log += ucx_log(other, "active message by ucp_am_send*", "| 0..inf | copy-in | tcp/lo |")
    assert read_path(log, 32 << 10) == ReadPath("zero-copy", "cma/memory")
    assert read_path(log, 64) == ReadPath("copy-in", "posix/memory")
    assert read_path(log, 0) == ReadPath("short", "tcp/lo")
    assert read_path("", 1) is read_path(to_self, 1) is None


@each(
    ("path", "ucx_tls", "status", "found"),
    [
        (ReadPath("zero-copy", "cma/memory"), None, OK, "shared memory: cma/memory"),
        (ReadPath("software emulation", "tcp/lo"), "tcp", OK, "UCX_TLS=tcp is set"),
        (ReadPath("software emulation", "tcp/lo"), None, WARN, "tcp, on one machine"),
        (ReadPath("zero-copy", "rc_mlx5/mlx5_0:1"), None, OK, "rc_mlx5/mlx5_0:1 (zero-copy)"),
        (None, None, WARN, "UCX did not log the path"),
    ],
)
def test_tcp_on_one_machine_is_fine_only_if_it_was_asked_for(
    path: ReadPath | None, ucx_tls: str | None, status: Status, found: str
) -> None:
    assert_found([judge_host_path(ucx_tls, "way", path)], "way", status, found, "")


# --- a peer


async def steps(address: str, engine_id: str = "") -> list[tuple[str, Status]]:
    return [(finding.name, finding.status) for finding in await examine_peer(CONFIG, address, engine_id)]


async def test_a_peer_that_answers_says_who_it_is() -> None:
    kv_caches, layout = small_cache()
    config = Config(engine_id="prefill-7", listen="tcp://127.0.0.1:0", transport="inproc", model="llama")
    async with Runtime(config) as runtime:
        await runtime.register_kv_caches(kv_caches, layout)
        name, connection, answer = await examine_peer(CONFIG, runtime.address, "")
        assert (name.status, connection.status, answer.status) == (OK,) * 3
        assert "this is 'prefill-7'" in answer.found
        expected = (await examine_peer(CONFIG, runtime.address, "prefill-7"))[-1]
        assert expected.status is OK
        assert "model 'llama', dtype 'float32'" in expected.found
        assert (await steps(runtime.address, "prefill-8"))[-1] == ("peer's answer", FAIL)


async def test_the_first_step_that_fails_is_the_last() -> None:
    assert await steps("ipc:///tmp/x") == [("peer", FAIL)]
    assert await steps("tcp://no-such-host.invalid:5600") == [("peer's name", FAIL)]
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        found = await steps(f"tcp://127.0.0.1:{port}")
        assert found[1:] == [("connection to peer", OK), ("peer's answer", FAIL)]
    assert (await steps(f"tcp://127.0.0.1:{port}"))[1:] == [("connection to peer", FAIL)]


def test_another_protocol_version_is_broken_and_a_rank_without_a_cache_is_not() -> None:
    old = messages.Refusal(reason="version", version=codec.PROTOCOL_VERSION + 1)
    assert judge_answer(old, "").status is FAIL
    assert f"ours {codec.PROTOCOL_VERSION}, theirs {codec.PROTOCOL_VERSION + 1}" in judge_answer(old, "").found
    early = messages.Refusal(reason="no KV cache registered yet", version=codec.PROTOCOL_VERSION, transient=True)
    assert judge_answer(early, "prefill-0").status is OK


# --- the whole


def test_the_report_has_every_finding_and_its_fix() -> None:
    findings: list[Finding] = [ok("one", "fine"), warn("two", "slow [1]", "do this"), fail("three", "no", "do that")]
    output = io.StringIO()
    print_findings(findings, Console(width=100, file=output))
    printed = output.getvalue()
    for text in ("one", "fine", "WARN", "slow [1]", "-> do this", "FAIL", "-> do that", "something is broken"):
        assert text in printed
    report = findings_as_json(findings)
    assert (report["schema_version"], report["broken"], len(report["findings"])) == (1, True, 3)
    assert not is_broken(findings[:2])


@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_children")
def test_the_doctor_hands_blocks_over_and_says_which_way_they_went() -> None:
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert done.exit_code == 0, done.output
    found = {finding["name"]: finding for finding in json.loads(done.stdout)["findings"]}
    assert found["kvflow"]["found"].startswith(f"kvflow {kvflow.__version__}, nixl ")
    assert "needed at most" in found["open files"]["found"] or "ulimit -Hn" in found["open files"]["fix"]
    assert "UCX" in found["NIXL"]["found"]
    assert "UCX moves memory between engines" in found["backends"]["found"]
    assert "POSIX moves files" in found["backends"]["found"]
    assert "every byte compared" in found["self-transfer"]["found"]
    assert found["path of the bytes"]["found"].partition(":")[0] in ("shared memory", "tcp, on one machine", "tcp")


CHECK_ELSEWHERE = """
from kvflow.doctor.nixl_transfer import check_nixl

if __name__ == "__main__":
    print(check_nixl()[0])
"""


@pytest.mark.nixl
def test_plugins_of_another_install_are_a_failure(tmp_path: Path) -> None:
    """See `lines_of_another_install`."""
    (finding,) = lines_of_another_install(tmp_path, CHECK_ELSEWHERE)
    assert "fail" in finding.lower()
