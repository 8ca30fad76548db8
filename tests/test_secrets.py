"""A secret is in no message, log line, record, `repr` and name of a task: that of a request id, a lease id, a spare."""

from __future__ import annotations

import asyncio
import copy
import pickle
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from log_lines import Written
from pairs import EnginePair, virtual_pair
from tests_support import PATIENT, each, in_virtual_time, limited

import kvflow
from kvflow import Lease, LeaseRecord, LoadRecord, LoadRequest, ServeRequest, Ticket
from kvflow.checks import printable, short_repr
from kvflow.connector.step import Decline, Save, Step
from kvflow.core.protocol import messages
from kvflow.core.protocol.spare import with_spare
from kvflow.errors import KVFlowError, RequestError, without_secrets
from kvflow.observe.timeline import RecordFile
from kvflow.prefix import PrefixRequest

# --- the id


def test_a_secret_id_is_made_of_an_id_and_a_new_secret() -> None:
    made = [kvflow.secret_id("req-1") for _ in range(2)]
    assert made[0] != made[1]
    for name in made:
        plain, mark, secret = name.partition("#")
        assert (plain, mark, len(bytes.fromhex(secret))) == ("req-1", "#", 16)
        assert without_secrets(name) == "req-1#..."
    longest = "x" * 479
    assert ServeRequest(kvflow.secret_id(longest), [0], 1).request_id.startswith(longest)


@each("wrong", [None, 7, "", "x" * 480, "\ud800", b"x"])
def test_of_what_no_secret_id_is_made(wrong: Any) -> None:
    with pytest.raises(RequestError, match="request_id: expected"):
        kvflow.secret_id(wrong)


NAME = kvflow.secret_id("req-1")
SECRET = NAME.partition("#")[2]


@each(
    ("text", "shown"),
    [
        (f"request '{NAME}': it failed", "request 'req-1#...': it failed"),
        (f"{NAME}, {NAME}-0", "req-1#..., req-1#...-0"),
        (f"RankLease(lease_id='{SECRET}', x=1)", "RankLease(lease_id='...', x=1)"),
        (f'{{"lease_id": "{SECRET}"}}', '{"lease_id": "..."}'),
        (f"{{'remote_request_id': '{NAME}~kvflow~aGVsbG8_-=='}}", "{'remote_request_id': 'req-1#...~kvflow~...'}"),
        (f"cmpl-{SECRET} of chat#17, #c0ffee, lease_id", f"cmpl-{SECRET} of chat#17, #c0ffee, lease_id"),
    ],
)
def test_what_of_a_text_is_shown(text: str, shown: str) -> None:
    error = RequestError(text)
    error.add_note(text)
    assert without_secrets(text) == printable(text, 2000) == str(error) == error.__notes__[0] == shown


@each("value", [NAME, "x" * 70 + NAME, {"a": {"b": [NAME]}}, {"lease_id": SECRET}, [NAME * 9]])
def test_what_a_message_quotes_shows_no_secret(value: object) -> None:
    assert SECRET[:16] not in short_repr(value)
    assert SECRET[16:] not in short_repr(value)


# --- everything that shows a request


class Shown:
    """Everything that is shown to others, and the secrets that must not be in it."""

    def __init__(self, folder: Path) -> None:
        self.secrets: set[str] = set()
        self.texts: list[str] = []
        self.records: list[LoadRecord | LeaseRecord] = []
        self.file = RecordFile(folder / "records.jsonl")

    def name(self, plain: str) -> str:
        made = kvflow.secret_id(plain)
        self.secrets.add(made.partition("#")[2])
        return made

    def lease(self, lease: Lease) -> Lease:
        self.secrets.update(rank.lease_id for rank in lease.ticket.ranks)
        self.texts += [repr(lease), repr(lease.ticket), repr(lease.ticket.ranks)]
        return lease

    def error(self, error: BaseException) -> None:
        self.texts += ["".join(traceback.format_exception(error)), *map(repr, (error, copy.copy(error)))]
        if isinstance(error, KVFlowError):
            other = pickle.loads(pickle.dumps(error))
            self.texts += [f"{other} {other!r} {error.quarantine!r} {other.quarantine!r}"]

    def load_ended(self, record: LoadRecord) -> None:
        self.records.append(record)
        self.file.load_ended(record)

    def lease_ended(self, record: LeaseRecord) -> None:
        self.records.append(record)
        self.file.lease_ended(record)

    def assert_no_secret(self, folder: Path) -> None:
        self.file.close()
        self.texts += [*map(repr, self.records), (folder / "records.jsonl").read_text()]
        assert len(self.secrets) > 10, "this has shown nothing"
        for text in self.texts:
            assert not {secret for secret in self.secrets if secret in text}, text


@pytest.fixture
def shown(tmp_path: Path, written: Written) -> Iterator[Shown]:
    """At the end of the test no secret may have been shown, in a line of the log neither."""
    made = Shown(tmp_path)
    yield made
    made.texts += written.texts
    made.assert_no_secret(tmp_path)


class Failing:
    """An observer that raises an error with its argument's repr."""

    def load_ended(self, record: object) -> None:
        raise ValueError(repr(record))

    lease_ended = load_ended


async def note(shown: Shown, pair: EnginePair, ticket: Any, block_ids: list[int], **more: Any) -> None:
    """Load, under a secret id of its own, and note the error and the names of all tasks."""
    load = pair.reader.start_load(LoadRequest(shown.name("load"), ticket, block_ids, **more))
    shown.texts.append(repr(load))
    await asyncio.sleep(0.01)
    shown.texts += [task.get_name() for task in asyncio.all_tasks()]
    try:
        await load
    except KVFlowError as error:
        shown.error(error)
    shown.texts += [repr(load), repr(load.flight)]


@in_virtual_time
async def test_no_path_of_a_request_shows_a_secret(shown: Shown) -> None:
    """Served, loaded, refused, failed, expired, revoked, kept, released, declined, quarantined, drained."""
    async with virtual_pair(limited(PATIENT, lease_wait_s=0.1)) as pair:

        def serve(name: str, **more: Any) -> Lease:
            return shown.lease(pair.writer.serve_blocks(ServeRequest(shown.name(name), [3], 4, **more)))

        with (
            pair.reader._observers.adding(Failing()),
            pair.reader._observers.adding(shown),
            pair.writer._observers.adding(shown),
        ):
            read = serve("read")
            with pytest.raises(RequestError) as twice:
                pair.writer.serve_blocks(ServeRequest(read.request_id, [3], 4))
            shown.error(twice.value)
            await note(shown, pair, read.ticket, [0])
            await read
            params = read.ticket.to_params()
            await note(shown, pair, params, [0])  # it has ended
            await note(shown, pair, serve("blocks").ticket, [0, 1])
            await note(shown, pair, {**params, "remote_block_ids": [4]}, [0])  # changed on its way
            for name in params:
                with pytest.raises(RequestError) as malformed:
                    Ticket.from_params({**{other: params[other] for other in params if other != name}})
                shown.error(malformed.value)
                with pytest.raises(RequestError) as malformed:
                    Ticket.from_params(with_spare(params) | {name: params})
                shown.error(malformed.value)
            revoked = serve("revoked")
            await revoked.revoke()
            await note(shown, pair, revoked.ticket, [0])
            failed = serve("failed", computed_tokens=0)
            failing = asyncio.create_task(note(shown, pair, failed.ticket, [0]))
            await asyncio.sleep(0.1)
            failed.fail(f"{failed.request_id} of lease_id={failed.ticket.lease_id}")
            await failing
            expired = serve("expired", ttl_s=0.5)
            await note(shown, pair, serve("slow", computed_tokens=0).ticket, [0], deadline_s=1.0)
            await expired
            with pair.reader.keep_leases(expired.ticket):
                await asyncio.sleep(0.5)
            await pair.reader.release_blocks(expired.ticket)
            waited = Ticket.rendezvous(expired.ticket, shown.name("declined"))
            await note(shown, pair, waited, [0], deadline_s=0.2)
            pair.writer.decline(waited.request_id, f"{waited.request_id} is too long")
            with pair.reader.keep_leases(waited):
                await asyncio.sleep(0.1)
            await pair.reader.release_blocks(waited)
            await note(shown, pair, waited, [0])
            pair.transport.faults.flip_next = 1
            await note(shown, pair, serve("bits").ticket, [0], verify=True)
            pair.transport.faults.hold = True
            await note(shown, pair, serve("held").ticket, [0], deadline_s=0.1)
            shown.texts += [repr(pair.reader.quarantines), repr(pair.reader.statistics())]
            pair.transport.faults.hold = False
            pair.transport.perform()
            await pair.writer.drain(0.5)
        with pytest.raises(ValueError, match="LoadRecord") as failure:  # which a test is told of at the end
            pair.reader._observers.close()
        shown.error(failure.value)


ASKED: dict[str, Any] = {"reader": "r/0", "target": None, "request_id": NAME}
REPRS: dict[str, Callable[[Ticket], object]] = {
    "what is served": lambda _: ServeRequest(NAME, [0], 1),
    "what is loaded": lambda ticket: LoadRequest(NAME, ticket.to_params(), [0]),
    "a spare": lambda ticket: LoadRequest("x", with_spare(ticket.to_params()), [0]),
    "a known peer": lambda ticket: PrefixRequest("x", range(4), key_tokens=4, peers=[ticket], block_ids=[0]),
    "a question": lambda ticket: messages.LeaseRequest(**ASKED, lease_id=ticket.lease_id),
    "an answer": lambda ticket: messages.LeaseAnswer(state=messages.LeaseAnswerState.OPEN, lease=ticket.first),
    "a step of an engine": lambda ticket: Step(
        keep={"x": (ticket,)},
        save=[Save(request_id="x", serve_id=NAME, block_tables=(), num_tokens=1, ttl_s=1.0)],
        decline=[Decline(serve_id=NAME, reason="")],
    ),
}
"""Objects that an engine may log: vLLM logs a failed step with the connector's work."""


@each("name", REPRS)
@in_virtual_time
async def test_a_repr_shows_no_secret(name: str) -> None:
    async with virtual_pair() as pair:
        lease = pair.writer.serve_blocks(ServeRequest(NAME, [3], 4))
        text = repr(REPRS[name](lease.ticket))
        assert "..." in text
        assert SECRET not in text
        assert lease.ticket.lease_id not in text
        await lease.revoke()
