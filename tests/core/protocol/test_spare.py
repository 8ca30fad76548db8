"""Tickets survive routers that forward common fields only; what is no spare of a ticket is left alone."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from kvflow.core.protocol.spare import with_spare
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import RequestError
from tests.support.tests_support import any_ticket

TICKET = any_ticket().without_leases(request_id="r~kvflow~1#secret", block_ids=[3, 4], num_tokens=5, ttl_s=9.0)
PARAMS = with_spare(TICKET.to_params())
COMMON = {name: value for name, value in PARAMS.items() if name != "kvflow"}


@pytest.mark.parametrize("given", [PARAMS, COMMON, TICKET.to_params()], ids=["whole", "common", "without"])
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


def test_an_engine_of_very_many_ranks_has_no_spare() -> None:
    params = TICKET.to_params()
    params["kvflow"]["ranks"] *= 100
    assert with_spare(params) == params
