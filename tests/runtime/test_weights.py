"""Versions of weights: tickets of other weights are refused, and what was computed with the old ones ends."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pairs import EnginePair, host_of

from kvflow import LeaseOutcome, ServeRequest, Ticket
from kvflow.errors import LeaseExpired, RequestError, RuntimeClosed, WeightsMismatch

REFUSED = r"the blocks of request 'req' from 'producer' at tcp://.*other weights: ours {}, theirs {}$"


async def test_a_ticket_of_other_weights_is_refused(pair: EnginePair) -> None:
    """Before anything is asked or read; the lease is there for readers with its weights."""
    pair.writer.set_weights("step-7")
    lease = pair.offer([3])
    await pair.fails(WeightsMismatch, lease, match=REFUSED.format("''", "'step-7'"))
    pair.reader.set_weights("step-6")
    await pair.fails(WeightsMismatch, lease, match=REFUSED.format("'step-6'", "'step-7'"))
    assert pair.reader.statistics().peers == ()
    pair.reader.set_weights("step-7")
    await pair.load(lease, [0])
    pair.assert_loaded([0], [3])
    assert await lease is LeaseOutcome.READ


async def test_it_is_refused_by_a_reader_that_is_connected(pair: EnginePair) -> None:
    """The usual load asks nobody, and is compared all the same."""
    await pair.load(pair.offer([3], "first"), [0])
    lease = pair.offer([4])
    pair.reader.set_weights("step-7")
    await pair.fails(WeightsMismatch, lease, match=REFUSED.format("'step-7'", "''"))
    assert await pair.reader.release_blocks(lease.ticket.to_params()), "a ticket of other weights can be given back"
    assert await lease is LeaseOutcome.READ


async def test_leases_of_the_old_weights_end(pair: EnginePair) -> None:
    """So a reader that was not told yet finds nothing. Told again of the same weights, an engine does nothing."""
    lease = pair.offer([3])
    pair.writer.set_weights("step-7")
    await pair.fails(LeaseExpired, lease)
    assert await lease is LeaseOutcome.REVOKED
    later = pair.offer([4], "later")
    pair.writer.set_weights("step-7")
    assert not later.done


async def test_a_load_under_way_fails_when_the_reader_gets_other_weights(pair: EnginePair) -> None:
    """All bytes land, under an intact seal: the request they are for is of the old weights."""
    task = await pair.hold(pair.offer([3]))
    pair.reader.set_weights("step-7")
    why = r"'producer'.*weights '' were replaced by 'step-7' during the load"
    with pytest.raises(LeaseExpired, match=why) as caught:
        await pair.let_go(task)
    assert caught.value.memory_safe


async def test_a_load_under_way_fails_when_the_producer_gets_other_weights(pair: EnginePair) -> None:
    task = await pair.hold(pair.offer([3]))
    pair.writer.set_weights("step-7")
    with pytest.raises(LeaseExpired):
        await pair.let_go(task)


async def test_a_rank_says_the_weights_of_a_lease_that_the_ticket_lacks(pair: EnginePair) -> None:
    """A router may have the introduction from before: what counts is with what the blocks are computed."""
    introduction = pair.writer.introduce()
    pair.writer.set_weights("step-7")
    assert pair.writer.introduce().first.weights == "step-7"
    lease = pair.writer.serve_blocks(ServeRequest("later", [3], 4))
    ticket = introduction.without_leases(request_id="later", block_ids=[3], num_tokens=4, ttl_s=9.0)
    await pair.fails(WeightsMismatch, ticket, match=r"ours '', theirs 'step-7'")
    pair.reader.set_weights("step-7")
    await pair.load(ticket, [0])
    assert await lease is LeaseOutcome.READ


async def test_a_version_outlasts_the_registration(pair: EnginePair) -> None:
    """Weights are often replaced while an engine sleeps."""
    await pair.writer.unregister()
    pair.writer.set_weights("step-7")
    await pair.writer.register_kv_caches(pair.producer.kv_caches, pair.producer.layout)
    assert pair.offer([3]).ticket.first.weights == "step-7"


async def test_engines_that_were_never_told_write_what_older_ones_write(pair: EnginePair) -> None:
    """And an older engine's ticket is one of an engine that was never told."""
    params = pair.offer([3]).ticket.to_params()
    assert "weights" not in params["kvflow"]["ranks"][0]
    await pair.load(params, [0])
    pair.writer.set_weights("step-7")
    told = pair.offer([4], "later").ticket
    silent = msgspec.structs.replace(told, ranks=(msgspec.structs.replace(told.first, weights=""),))
    digests = [ticket.to_params()["kvflow"]["ranks"][0]["digest"] for ticket in (told, silent)]
    assert digests[0] == digests[1], "a reader from before the field still accepts the ticket"
    assert Ticket.from_params(told.to_params()).first.weights == "step-7"


async def test_a_version_is_a_name(pair: EnginePair) -> None:
    wrong: list[Any] = ["", "two words", "x" * 129, "\n", "\ud800", 7, None, b"7"]
    for version in wrong:
        with pytest.raises(RequestError, match="set_weights: version"):
            pair.writer.set_weights(version)
    assert host_of(pair.writer).context.weights.version == ""


async def test_wrong_weights_in_a_ticket_are_refused(pair: EnginePair) -> None:
    wrong: list[Any] = ["x" * 129, 7, None, [], {}]
    params = pair.offer([3]).ticket.to_params()
    for version in wrong:
        params["kvflow"]["ranks"][0]["weights"] = version
        await pair.fails(RequestError, params, match="weights")


async def test_a_closed_runtime_has_no_weights(pair: EnginePair) -> None:
    await pair.writer.aclose()
    with pytest.raises(RuntimeClosed):
        pair.writer.set_weights("step-7")
