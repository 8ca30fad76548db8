"""Mistakes of callers: a typed error that names the request and both values, and no change.

`core/protocol/test_ticket.py` has the fields of tickets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from inspect import isawaitable
from typing import Any

import msgspec
import pytest
import torch
from pairs import EnginePair, load_request, open_pair
from tests_support import PATIENT, Records, altered, limited, small_cache

from kvflow import (
    CacheLayout,
    Config,
    Lease,
    LeaseOutcome,
    LoadRequest,
    RuntimeState,
    ServeRequest,
    Ticket,
    merge_tickets,
)
from kvflow.core.cache.groups import groups_of
from kvflow.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidInput,
    LayoutError,
    Overloaded,
    PromptMismatch,
    RequestError,
)
from kvflow.testing import assert_blocks_equal, inproc_pair

LISTS = "expected a flat list of whole numbers"
SERVE: list[tuple[dict[str, Any], str]] = [
    ({"block_ids": [16]}, "request 'r': block_ids: block id 16 is not in 0..15"),
    ({"block_ids": [1, 2, 1], "num_tokens": 12}, "block id 1 is given twice"),
    ({"block_ids": [[1]]}, LISTS),
    ({"block_ids": [1, 2]}, "2 block ids, expected at most 1 block of 4 for 4 tokens"),
    ({"block_ids": [], "num_tokens": -1}, "num_tokens: expected `int` >= 0, got -1"),
    ({"request_id": "x" * 513}, "request_id: expected `str` of length <= 512, got 513"),
]


async def test_serve_requests_that_cannot_be_right(pair: EnginePair) -> None:
    for changes, message in SERVE:
        with pytest.raises(RequestError) as caught:
            pair.writer.serve_blocks(ServeRequest(**{"request_id": "r", "block_ids": [1], "num_tokens": 4} | changes))
        assert message in str(caught.value)


LOAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"block_ids": [16]}, "request 'req': block_ids: block id 16 is not in 0..15"),
    ({}, {"block_ids": [1, 1]}, "block id 1 is given twice"),
    (
        {},
        {"block_ids": [0, 1, 2]},
        "3 local blocks of 4 tokens, for tokens 0 to 12 (cached_tokens 0), but the 8 tokens that ... fill 2",
    ),
    ({}, {"priority": True}, "priority: expected `int`, got True"),
    ({"remote_block_ids": [3, 99]}, {}, "remote_block_ids of 'producer': block id 99 is not in 0..15"),
    ({"remote_port": 0}, {}, "remote_port 0 is not in 1..65535"),
    ({"seal_index": 1 << 40}, {}, "seal_index 1099511627776"),
]


async def test_load_requests_that_cannot_be_right(pair: EnginePair) -> None:
    """Three dots stand for anything."""
    lease = pair.offer([3, 7])
    for changes, options, message in LOAD:
        if "seal_index" in changes:
            ticket = altered(lease.ticket, **changes).to_params()
        elif "remote_block_ids" in changes:  # as an engine that is wrong itself, so that its digest is right
            ids = tuple(changes["remote_block_ids"])
            ticket = msgspec.structs.replace(lease.ticket, block_ids=ids).to_params()
        else:
            ticket = lease.ticket.to_params() | changes
        error = await pair.fails(RequestError, ticket, **{"block_ids": [0, 1], **options})
        assert all(part in str(error) for part in message.split(" ... ")), error
        pair.assert_loaded([], [])
    await pair.load(lease, [0, 1])
    assert await lease is LeaseOutcome.READ


# 10 tokens are offered, in three blocks of 4. A cached prefix needs no blocks.
FITS: list[dict[str, Any]] = [
    {"block_ids": [0, 1, 2], "num_tokens": 10},
    {"block_ids": [1, 2], "num_tokens": 10, "prompt": range(10), "cached_tokens": 4},
    {"block_ids": [1, 2], "prompt": range(50), "cached_tokens": 4},
]
FITS_NOT: list[tuple[dict[str, Any], type[RequestError], str]] = [
    (
        {"block_ids": [0, 1, 2, 4], "num_tokens": 10},
        RequestError,
        "4 local blocks of 4 tokens, .* but the 10 .* fill 3",
    ),
    ({"block_ids": [0, 1, 2, 4], "prompt": range(50)}, RequestError, "the 10 tokens that 'producer' at .* fill 3"),
    ({"block_ids": [0, 1], "num_tokens": 8}, PromptMismatch, "expected 8 tokens, 'producer' at .* offers 10"),
    ({"block_ids": [], "prompt": range(9)}, PromptMismatch, "its prompt has 9 tokens, .* offers 10"),
]


async def test_blocks_that_fit_what_the_request_says(pair: EnginePair) -> None:
    for options in FITS:
        lease = pair.writer.serve_blocks(ServeRequest("req", [3, 7, 9], num_tokens=10))
        wanted = options["block_ids"]
        report = await pair.load(lease, **options)
        assert report.tokens == 10 - 4 * (3 - len(wanted))
        ours, theirs = pair.consumer.cache, pair.producer.cache
        assert_blocks_equal(ours, wanted, theirs, [3, 7, 9][3 - len(wanted) :], num_tokens=report.tokens)
        assert await lease is LeaseOutcome.READ


async def test_blocks_that_do_not_fit_what_the_request_says(pair: EnginePair) -> None:
    """Refused before anybody is asked."""
    lease = pair.writer.serve_blocks(ServeRequest("req", [3, 7, 9], num_tokens=10))
    for count, (options, error, message) in enumerate(FITS_NOT, 1):
        await pair.fails(error, lease, match=f"^request 'req': .*{message}", **options)
        assert pair.reader.statistics().peers == ()
        assert (pair.loading.refused, pair.consumer_blocks.in_flight) == (count, 0)
    await pair.load(lease, [0, 1, 2])
    assert await lease is LeaseOutcome.READ


async def test_blocks_that_an_offer_without_blocks_would_leave_empty_are_refused(pair: EnginePair) -> None:
    """An introduction, or a prompt shorter than a block of an engine that offers full blocks only."""
    lease = pair.writer.serve_blocks(ServeRequest("req", [], num_tokens=3, prompt=range(3)))
    told = r"^request 'req': 1 local block of 4 tokens, .* but the 0 tokens that 'producer' at .* offers fill 0"
    given: list[tuple[Lease | Ticket, dict[str, Any]]] = [
        (lease, {}),
        (lease, {"prompt": range(3)}),
        (lease, {"num_tokens": 0}),
        (pair.writer.introduce(), {}),
        (pair.writer.introduce(), {"prompt": range(3)}),
    ]
    for offered, options in given:
        await pair.fails(RequestError, offered, match=told, **options)
        report = await pair.load(offered, [], **options)
        assert (report.tokens, report.blocks) == (0, 0)
    pair.assert_loaded([], [])
    await lease


CACHE, LAYOUT = small_cache()
TENSORS = list(CACHE.values())
NAMES = r'expected a dict of tensors by layer name, got a list of 2: write \{f"layers\.\{index\}": tensor for .*\}'


def served(pair: EnginePair, **changes: Any) -> Lease:
    given: dict[str, Any] = {"request_id": "new", "block_ids": [7, 9], "num_tokens": 8}
    return pair.writer.serve_blocks(ServeRequest(**given | changes))


def loaded(pair: EnginePair, lease: Lease, **changes: Any) -> Any:
    given: dict[str, Any] = {"request_id": "req", "ticket": lease.ticket, "block_ids": [0, 1]}
    return pair.reader.load_blocks(LoadRequest(**given | changes))


NEWCOMERS: dict[str, tuple[Callable[[EnginePair, Lease], Any], type[InvalidInput], str]] = {
    "tensors to infer from": (lambda *_: CacheLayout.infer(TENSORS, order="HND", block_size=4), LayoutError, NAMES),
    "tensors to register": (lambda *_: groups_of(TENSORS, LAYOUT), LayoutError, NAMES),
    "a tensor alone": (lambda *_: groups_of(TENSORS[0], LAYOUT), LayoutError, "got a Tensor: write"),
    "pairs without names": (lambda *_: groups_of([tuple(TENSORS)], LAYOUT), LayoutError, "got a list of 1: write"),
    "no layout": (lambda *_: groups_of(CACHE, None), LayoutError, r"needs one, such as CacheLayout\.infer\("),
    "JSON": (
        lambda pair, lease: loaded(pair, lease, ticket=json.dumps(lease.ticket.to_params())),
        RequestError,
        r"ticket: expected a dict .*, got '\{.*; a ticket in JSON is read by json\.loads",
    ),
    "a lease": (
        lambda pair, lease: loaded(pair, lease, ticket=lease),
        RequestError,
        "ticket: expected a dict .*, got <Lease req .*; pass the lease's `ticket`",
    ),
    "no ticket": (
        lambda pair, lease: loaded(pair, lease, ticket=None),
        RequestError,
        r"got None; .*ticket\.to_params\(",
    ),
    "a port with quotes": (
        lambda pair, lease: loaded(pair, lease, ticket=lease.ticket.to_params() | {"remote_port": "5600"}),
        RequestError,
        r"Expected `int`, got `str` - at `\$\.remote_port`, got '5600'; a number is written without quotes",
    ),
    "a row of a batch": (
        lambda pair, lease: loaded(pair, lease, prompt=[list(range(8))]),
        RequestError,
        r"prompt: expected a flat list of token ids, got 1 row, the first of 8 tokens: .*prompt\[0\]",
    ),
    "a row of a tensor": (
        lambda pair, _: served(pair, prompt=torch.arange(8)[None]),
        RequestError,
        r"prompt: expected a flat list of token ids, got 1 row, the first of 8 tokens: .*prompt\[0\]",
    ),
    "tickets of two requests": (
        lambda pair, lease: merge_tickets([lease.ticket, served(pair).revoke().ticket]),
        RequestError,
        "request_id: req and new: expected tickets that the ranks of one engine made for one request",
    ),
    "tickets as dicts": (
        lambda _, lease: merge_tickets([lease.ticket.to_params()]),  # type: ignore[list-item]
        RequestError,
        r"tickets only, got \[\{.*Ticket\.from_params",
    ),
    "a limit": (
        lambda *_: Config(engine_id="e", peers_max=3),  # type: ignore[call-arg]
        ConfigError,
        r"peers_max; it is a field of Limits: write Config\(limits=Limits\(peers_max=\.\.\.\)\)",
    ),
    "prefill": (
        lambda *_: Config(engine_id="e", role="prefill"),
        ConfigError,
        "got 'prefill'; did you mean 'producer'",
    ),
    "decode": (lambda *_: Config(engine_id="e", role="decode"), ConfigError, "got 'decode'; did you mean 'consumer'"),
    "a number as a tensor": (
        lambda pair, _: served(pair, num_tokens=torch.tensor(8)),
        RequestError,
        r"num_tokens: expected `int`, got tensor\(8\); num_tokens\.item\(\) is a number",
    ),
}


async def test_what_newcomers_write_is_refused_with_what_to_write(pair: EnginePair) -> None:
    """The message has the given and the expected value, too."""
    lease = pair.offer([3, 4])
    for what, (mistake, error, message) in NEWCOMERS.items():
        with pytest.raises(error, match=message):
            made = mistake(pair, lease)
            assert not isawaitable(made) or not await made, what
    await pair.load(lease, [0, 1])


@pytest.mark.parametrize("seconds_left", [0, -0.25, -2e9, float("-inf")])
async def test_a_request_whose_time_is_over_has_no_wrong_deadline(seconds_left: float) -> None:
    records = Records()
    async with inproc_pair(config=PATIENT, observers=[records]) as made:
        pair = EnginePair(producer=made.producer, consumer=made.consumer)
        lease = pair.offer([3, 4])
        error = await pair.fails(DeadlineExceeded, lease, [0, 1], deadline_s=seconds_left)
        load = pair.reader.start_load(load_request(lease, [0, 1], deadline_s=seconds_left))
        with pytest.raises(
            DeadlineExceeded, match=r"request 'req' .*in phase 'queued': its deadline_s was .* when it was"
        ):
            await load
        assert (error.phase, error.blame, error.retryable, error.quarantine) == ("queued", "nobody", True, None)
        assert [(one.outcome, one.phase) for one in records.loads] == [("DeadlineExceeded", "queued")] * 2
        assert (pair.loading.failed, pair.loading.refused, pair.reader.statistics().peers) == (2, 0, ())
        await pair.load(lease, [0, 1], deadline_s=5.0)
        assert await lease is LeaseOutcome.READ


@pytest.mark.parametrize(("field", "value"), [("host", "a..b"), ("engine_id", "\ud800"), ("lease_id", "0" * 32)])
async def test_a_bad_ticket_costs_its_load_and_nothing_else(pair: EnginePair, field: str, value: object) -> None:
    lease = pair.offer([3])
    with pytest.raises(RequestError, match=r"^ticket: "):
        altered(lease.ticket, **{field: value})
    params = lease.ticket.to_params()
    if field == "lease_id":
        params["kvflow"]["ranks"][0][field] = value
    else:
        params[f"remote_{field}"] = value
    await pair.fails(RequestError, params, match=r"^request '[^']*': ticket: ")
    assert pair.reader.state is RuntimeState.OPEN
    await pair.load(lease)
    assert await lease is LeaseOutcome.READ


CHANGES: list[tuple[dict[str, Any], str]] = [
    ({"remote_block_ids": [3, 12]}, "block ids: digest ours"),
    ({"remote_block_ids": [7, 3]}, "block ids: digest ours"),
    ({"num_tokens": 7}, "tokens or prompt: digest ours"),
    ({"remote_request_id": "another"}, "request, ranks or lease: digest ours"),
]


def on_its_way(lease: Lease, changes: dict[str, Any]) -> dict[str, Any]:
    """The lease's ticket with other values, as a router hands it over that has mixed something up."""
    params = lease.ticket.to_params()
    return {**params, **changes, "kvflow": {**params["kvflow"], **changes}}


async def test_a_ticket_that_was_changed_on_its_way_is_refused_and_what_differs_is_named(pair: EnginePair) -> None:
    """Also together with a good ticket: no peer is asked, and both offers stay open."""
    lease, good = pair.offer([3, 7]), pair.offer([4, 5], "good")
    for changes, problem in CHANGES:
        params = on_its_way(lease, changes)
        why = f"ticket: it differs from what .* of 'producer' has offered for request .*{problem}"
        await pair.fails(RequestError, params, [0, 1], match=f"^request 'req': {why}")
        for tickets in ([good.ticket, params], [params, good.ticket]):
            with pytest.raises(RequestError, match=why):
                await pair.reader.load_blocks(LoadRequest("req", tickets, [0, 1]))
        for verb in (pair.reader.release_blocks, Ticket.from_params, partial(Ticket.rendezvous, request_id="other")):
            with pytest.raises(RequestError, match=why):
                await verb(params)
        with pytest.raises(RequestError, match=why), pair.reader.keep_leases(params):
            pass
    assert pair.reader.statistics().peers == ()
    pair.assert_loaded([], [])
    await pair.load(lease, [0, 1])
    assert await lease is LeaseOutcome.READ
    good.revoke()


async def test_what_again_brings_was_changed_on_its_way(pair: EnginePair) -> None:
    gone, lease = pair.offer([1, 2], "gone").revoke(), pair.offer([3, 7])

    async def again(_: Any) -> dict[str, Any]:
        return on_its_way(lease, {"remote_block_ids": [3, 12]})

    with pytest.raises(
        RequestError, match=r"^request 'req': again: ticket: it differs from what .*: block ids: digest"
    ):
        await pair.reader.load_blocks(LoadRequest("req", [gone.ticket], [0, 1], again=again))
    await pair.load(lease, [0, 1])
    pair.assert_loaded([0, 1], [3, 7])


async def test_leases_are_bounded_and_the_limit_is_named() -> None:
    async with open_pair(limited(PATIENT, leases_max=2)) as pair:
        leases = [pair.offer([block], f"r{block}") for block in range(2)]
        with pytest.raises(Overloaded, match=r"'one more': at most 2 leases may be open \(limits.leases_max\)") as full:
            pair.offer([5], "one more")
        assert full.value.request_id == "one more"
        leases.pop().revoke()
        pair.offer([5], "fits again")
