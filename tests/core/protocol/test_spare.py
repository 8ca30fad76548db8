"""Tickets survive routers that forward common fields only; other parameters are not changed."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from kvflow.core.protocol.rank_lease import RankLease
from kvflow.core.protocol.spare import with_spare
from kvflow.core.protocol.ticket import Ticket, with_changes
from kvflow.errors import RequestError
from tests.support.tests_support import any_ticket

TICKET = any_ticket(tp_size=2).without_leases(request_id="r~kvflow~1#secret", block_ids=[3, 4], num_tokens=5, ttl_s=9.0)
PARAMS = with_spare(TICKET.to_params())
COMMON = {name: value for name, value in PARAMS.items() if name != "kvflow"}
FEWER = {name: value for name, value in COMMON.items() if name != "tp_size"}
NULLS = {**PARAMS, "kvflow": None, "tp_size": None}
GIVEN = {
    "whole": PARAMS,
    "common": COMMON,
    "without": TICKET.to_params(),
    "without tp_size": FEWER,
    "tp_size alone is gone": {**FEWER, "kvflow": PARAMS["kvflow"]},
    "null kvflow": {**PARAMS, "kvflow": None},
    "nulls": NULLS,
}


@pytest.mark.parametrize("given", GIVEN.values(), ids=GIVEN)
def test_a_ticket_is_read_with_and_without_its_own_field(given: dict[str, Any]) -> None:
    assert Ticket.from_params(given) == TICKET


def test_the_field_itself_counts_where_it_is_there() -> None:
    other = {**PARAMS, "kvflow": {**PARAMS["kvflow"], "ttl_s": 4.0}}
    assert Ticket.from_params(other).ttl_s == 4.0


@pytest.mark.parametrize(
    "spare",
    [
        "",
        "~",
        "AAAA",
        base64.urlsafe_b64encode(b"\xc1").decode(),
        base64.urlsafe_b64encode(msgspec.msgpack.encode([[[[1]]]] * 4)).decode(),
        base64.urlsafe_b64encode(b"\x91" * 3000 + b"\xc0").decode(),
        "A" * 8192,
    ],
)
def test_what_is_no_spare_is_a_request_error(spare: str) -> None:
    with pytest.raises(RequestError):
        Ticket.from_params({**COMMON, "remote_request_id": f"r~kvflow~{spare}"})


def test_a_dict_of_very_many_fields_is_refused_before_it_is_copied() -> None:
    with pytest.raises(RequestError, match="fields in one dict"):
        Ticket.from_params(COMMON | {str(number): number for number in range(300)})


def test_another_size_than_the_spares_is_a_changed_ticket() -> None:
    with pytest.raises(RequestError, match="changed in transit"):
        Ticket.from_params({**COMMON, "tp_size": 4})


@pytest.mark.parametrize("size", [[2], "2", 0, 1 << 40])
def test_a_spare_of_a_size_that_cannot_be_is_a_request_error(size: object) -> None:
    packed = base64.urlsafe_b64encode(msgspec.msgpack.encode({**PARAMS["kvflow"], "tp_size": size})).decode()
    with pytest.raises(RequestError, match="tp_size"):
        Ticket.from_params({**FEWER, "remote_request_id": f"{TICKET.request_id}~kvflow~{packed}"})


def test_the_spare_of_very_many_ranks_names_one_of_them() -> None:
    ticket = any_ticket(tp_size=1024)
    rank = msgspec.structs.asdict(ticket.first)
    many = with_changes(ticket, ranks=tuple(RankLease(**{**rank, "tp_rank": number}) for number in range(1024)))
    params = with_spare(many.to_params())
    assert Ticket.from_params(params) == many
    assert len(params["remote_request_id"]) < 4096
    del params["kvflow"]
    assert Ticket.from_params(params).ranks == many.ranks[:1]
