"""Promises about prefixes, each broken on purpose: `tests/simulator/test_mutations.py` has the simulator find them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from kvflow.core.protocol import messages
from kvflow.core.protocol.proof import SealProof
from kvflow.errors import LoadError, PeerError
from kvflow.prefix import keys, pull
from kvflow.prefix.prefix_requests import PrefixReport
from kvflow.prefix.pull import Pull
from kvflow.prefix.search import Holder
from kvflow.prefix.seek import PrefixSeeker
from kvflow.prefix.sharing import SharedPrefixes
from kvflow.runtime.load.load import Load
from kvflow.runtime.load.requests import LoadReport
from kvflow.runtime.peers import ticket_resolver
from kvflow.runtime.producer.lease import OpenLease


def believe_a_seal_seen_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick read is accepted by the seal that was fetched with it, although leases of prefixes have no hold."""
    real = ticket_resolver._source
    monkeypatch.setattr(
        ticket_resolver,
        "_source",
        lambda peer, connection, lease: real(peer, connection, msgspec.structs.replace(lease, held=True)),
    )
    monkeypatch.setattr(SealProof, "note_read_posted", lambda _: None)  # as if each load had one read


def unpin_as_soon_as_it_is_leased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned prefix is unpinned before its lease has ended."""
    real = SharedPrefixes._lease_prefix

    def offered(self: SharedPrefixes, *given: Any) -> messages.Reply:
        reply = real(self, *given)
        for opened in list(self._prefix_of_lease):
            self._unpin_ended(opened)
        return reply

    monkeypatch.setattr(SharedPrefixes, "_lease_prefix", offered)


def reclaim_without_revoking(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner gets its blocks back, but the seal still says that they are leased."""
    monkeypatch.setattr(SharedPrefixes, "_revoke", lambda self, opened: self._unpin_ended(opened))


def revoke_without_unpinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix stays pinned after its lease has ended by itself."""
    unpin, real = SharedPrefixes._unpin_ended, SharedPrefixes._revoke

    def revoke(self: SharedPrefixes, opened: OpenLease) -> None:
        real(self, opened)
        if opened.outcome.done():
            unpin(self, opened)

    monkeypatch.setattr(SharedPrefixes, "_revoke", revoke)
    monkeypatch.setattr(SharedPrefixes, "_unpin_ended", lambda *_: None)


def read_from_the_next_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next holder is read while bytes from the failed holder may still land."""
    real = Pull._await_load

    async def awaited(self: Pull, holders: Sequence[Holder], load: Load) -> LoadReport | None:
        try:
            await load
        except (PeerError, LoadError) as error:
            self._note_failures(holders, load, str(error))
            return None
        return await real(self, holders, load)

    monkeypatch.setattr(Pull, "_await_load", awaited)


def leave_the_salt_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys depend on the tokens alone."""
    real = keys.key_state
    monkeypatch.setattr(keys, "key_state", lambda salt: real(b""))


def count_a_block_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pull reports one block more than it has filled."""
    real = Pull._make_report

    def report(self: Pull, *given: Any) -> PrefixReport:
        made = real(self, *given)
        more = self._groups[0].block_size if made.pulled_tokens else 0
        return replace(made, num_tokens=made.num_tokens + more)

    monkeypatch.setattr(Pull, "_make_report", report)


def fill_the_wrong_end_of_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end of a prefix lands in the blocks of the prefix's beginning."""
    real = pull._blocks_filled_by

    def filled(groups: Any, tables: Any, cached: int, tokens: int) -> list[Any]:
        found = real(groups, tables, cached, tokens)
        return [table[: len(some)] for table, some in zip(tables, found, strict=True)]

    monkeypatch.setattr(pull, "_blocks_filled_by", filled)


def forget_answers_that_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prefix that is found after its question has ended stays pinned."""
    real = SharedPrefixes._match_done

    def match_done(self: SharedPrefixes, *given: Any) -> None:
        _, _, reply, timer, _ = given
        if reply.done():
            timer.cancel()
            del self._waiting_replies[reply]
        else:
            real(self, *given)

    monkeypatch.setattr(SharedPrefixes, "_match_done", match_done)


def stay_connected_to_who_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder that has restarted at its address is taken for the process before."""

    async def connected_again(_: object, engine: object, __: object) -> object:
        return engine

    monkeypatch.setattr(PrefixSeeker, "_reconnect", connected_again)


PREFIX_MUTATIONS = {
    # As in `test_mutations.MUTATIONS`.
    "believe_a_seal_seen_meanwhile": (believe_a_seal_seen_meanwhile, "I9", (118, 129)),
    "unpin_as_soon_as_it_is_leased": (unpin_as_soon_as_it_is_leased, "I9", (1, 5)),
    "reclaim_without_revoking": (reclaim_without_revoking, "I9", (1, 18)),
    "revoke_without_unpinning": (revoke_without_unpinning, "I9", (1, 5)),
    "read_from_the_next_too_early": (read_from_the_next_too_early, "I1 I5", (1052, 165)),
    "leave_the_salt_out": (leave_the_salt_out, "I9", (5, 18)),
    "count_a_block_too_many": (count_a_block_too_many, "I9", (1, 5)),
    "fill_the_wrong_end_of_windows": (fill_the_wrong_end_of_windows, "I9", (59, 19)),
    "forget_answers_that_come_late": (forget_answers_that_come_late, "I9", (82, 133)),
    "stay_connected_to_who_was_there_before": (stay_connected_to_who_was_there_before, "I7", (22, 51)),
}
