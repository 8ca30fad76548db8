"""Log lines cannot be forged: whatever callers, peers and files say stays within the line that repeats it."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from log_lines import FORGED, Written
from pairs import virtual_pair
from storing import storing
from tests_support import PATIENT, each, in_virtual_time, limited

from kvflow import Lease, LoadRequest, ServeRequest, Ticket
from kvflow.errors import KVFlowError
from kvflow.logs import logger_of
from kvflow.storage import SaveRequest

# --- the filter


class Unprintable:
    def __str__(self) -> str:
        raise ZeroDivisionError("a caller's own code")


@each(
    ("template", "value", "expected"),
    [
        ("%s", "plain", "plain"),
        ("%s", "日本 語", "日本 語"),
        ("%s", FORGED, r"a\n2026-01-01 ERROR kvflow.forged \x1b[2J\u2028\u202e\r\x85b"),
        ("%s", "\ud800", r"\ud800"),
        ("%s", ValueError(FORGED), r"a\n2026-01-01"),
        ("%s", [FORGED], r"a\n2026-01-01"),
        ("%s", {"a": FORGED}, r"a\n2026-01-01"),
        ("%s", Path("a\nb"), r"a\nb"),
        ("%s", Unprintable(), "a Unprintable"),
        ("%s", "x" * 1_000_000, "x ... (left out: 5703) ... x"),
        ("%s of %s: %s", ("x" * 1_900, "y" * 1_900, "advice"), ": advice"),
        ("%+f s, %d, %s", (1.5, 7, True), "+1.500000 s, 7, True"),
        ("%r", "e\n", "'e"),
    ],
)
def test_what_a_line_is_told_is_one_line(template: str, value: object, expected: str, written: Written) -> None:
    logger_of("kvflow.tried").warning(template, *(value if isinstance(value, tuple) else (value,)))
    assert expected in written.texts[-1]
    assert len(written.texts[-1]) <= 2000
    written.assert_plain()


def test_a_traceback_has_no_line_of_its_own(written: Written) -> None:
    def fail(depth: int = 0) -> None:
        if depth < 300:
            fail(depth + 1 + depth % 2)
        try:
            raise ValueError(FORGED)
        except ValueError as cause:
            raise RuntimeError(f"{FORGED}\n\x1b[0m") from cause

    try:
        fail()
    except RuntimeError as error:
        logger_of("kvflow.tried").error("it died", exc_info=error)
        logger_of("kvflow.tried").exception("it died")
    assert all("ValueError: a" in text and "in fail" in text for text in written.texts)
    assert all(text.count("\n") <= 201 for text in written.texts)
    written.assert_plain()


def test_a_logger_has_one_filter_and_its_own_place(written: Written) -> None:
    assert logger_of("kvflow.tried") is logger_of("kvflow.tried") is logging.getLogger("kvflow.tried")
    assert len(logger_of("kvflow.tried").filters) == 1
    record: list[logging.LogRecord] = []
    written.emit = record.append  # type: ignore[method-assign]
    logger_of("kvflow.tried").info("%s", "x")
    assert (record[0].funcName, record[0].msg) == ("test_a_logger_has_one_filter_and_its_own_place", "%s")


# --- every path, with ids and reasons that would forge


class FailingObserver:
    """An observer that raises an error with a forged log line."""

    def load_ended(self, record: object) -> None:
        raise ValueError(FORGED)

    lease_ended = load_ended


@in_virtual_time
async def test_no_path_of_a_request_lets_it_forge(written: Written) -> None:
    """Served, loaded, refused, failed, expired, revoked, kept, released, drained."""
    async with virtual_pair(limited(PATIENT, lease_wait_s=0.1)) as pair:

        def serve(name: str, **more: Any) -> Lease:
            return pair.writer.serve_blocks(ServeRequest(f"{FORGED} {name}", [3], 4, **more))

        def request(lease: Lease, **more: Any) -> LoadRequest:
            return LoadRequest(f"{FORGED} load", lease.ticket.to_params(), more.pop("block_ids", [0]), **more)

        with pair.reader._observers.adding(FailingObserver()), pair.writer._observers.adding(FailingObserver()):
            read = serve("read")
            await pair.reader.load_blocks(request(read))
            await read
            with pytest.raises(KVFlowError):
                await pair.reader.load_blocks(request(read))
            with pytest.raises(KVFlowError):
                await pair.reader.load_blocks(request(read, block_ids=[0, 0]))
            revoked = serve("revoked")
            await revoked.revoke()
            failed = serve("failed", computed_tokens=0)
            load = pair.reader.start_load(request(failed))
            await asyncio.sleep(0.1)
            failed.fail(FORGED)
            with pytest.raises(KVFlowError):
                await load
            expired = serve("expired", ttl_s=0.5)
            with pytest.raises(KVFlowError):
                await pair.reader.load_blocks(request(serve("slow", computed_tokens=0), deadline_s=1.0))
            await expired
            with pair.reader.keep_leases(expired.ticket):
                await asyncio.sleep(0.5)
            await pair.reader.release_blocks(expired.ticket)
            pair.writer.decline(f"{FORGED} declined", FORGED)
            late = Ticket.rendezvous(expired.ticket, f"{FORGED} declined")
            with pair.reader.keep_leases(late):
                await asyncio.sleep(0.1)
            assert not await pair.reader.release_blocks(late)
            with pytest.raises(KVFlowError):
                await pair.reader.load_blocks(LoadRequest("met", late, [0]))
            pair.transport.faults.flip_next = 1
            await pair.reader.load_blocks(request(serve("bits"), verify=True))
            await pair.writer.drain(0.5)
        for runtime in (pair.reader, pair.writer):
            with pytest.raises(ValueError, match="forged"):  # which a test is told of at the end
                runtime._observers.close()
    written.assert_plain(" read: offered -> read", "load failed in phase", "refused a load", "could not compute")
    written.assert_plain("-> expired", "-> revoked", "-> failed", "will not be computed", "leases could not be kept")
    written.assert_plain(
        "nothing to give back", "it will not serve the request", "an observer failed", "read once more"
    )
    written.assert_plain("open after draining")


async def test_a_store_does_not_let_requests_and_files_forge(written: Written, tmp_path: Path) -> None:
    folder = tmp_path / "a\n2026-01-01 ERROR kvflow.forged"
    folder.mkdir()
    async with storing(folder) as engine:
        await engine.save(FORGED)
        (entry,) = engine.files
        entry.write_bytes(b"x" * entry.stat().st_size)
        for _ in range(2):
            with pytest.raises(KVFlowError):
                await engine.restore(FORGED)
        with pytest.raises(KVFlowError):
            await engine.storage.save(SaveRequest(f"{FORGED} save", FORGED, [1], 1 << 40))
    written.assert_plain("store ", "entries", "removing the damaged file", "failed in phase")
