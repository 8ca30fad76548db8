"""Hosts and addresses as texts: one form of a host, wherever it is given."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow import Config
from kvflow.config import is_key_name
from kvflow.connector.prefix_questions import source_in
from kvflow.core.protocol.addresses import PeerAddress
from kvflow.errors import ConfigError, RequestError
from kvflow.hosts import HOST_CHARS_MAX, address_at, bracket_ipv6_host, is_host, plain_host, split_address
from kvflow.ray.llm import worker_settings
from kvflow.stock.params import read_stock_params

SPELLINGS = ["fd00::2", "[fd00::2]", "FD00::2", "[fd00:0:0:0:0:0:0:2]"]
each = pytest.mark.parametrize


@each(
    ("given", "plain"),
    [
        *((spelling, "fd00::2") for spelling in SPELLINGS),
        *((zone, "fe80::1%eth0") for zone in ("fe80::1%eth0", "[fe80::1%eth0]", "FE80:0::1%eth0")),
        *((same, same) for same in ("127.0.0.1", "node-7.cluster.local", "*", "0.0.0.0", "::1", "fe80::1%3")),
        *((wildcard, "::") for wildcard in ("::", "[::]", "0:0::0")),
        *((bad, None) for bad in ("", "a b", "[", "[]", "[h]", "[10.0.0.7]", "[fd00::2", "fd00::2]", "[[fd00::2]]")),
        *((bad, None) for bad in ("fd00", "fd00::2::", "fd00::g", "fe80::1%", "fe80::1%a b", "fe80::1%eth0/x", "h:1")),
        ("x" * (HOST_CHARS_MAX + 1), None),
    ],
)
def test_a_host_has_one_form(given: str, plain: str | None) -> None:
    assert plain_host(given) == (given if given == "fd00" else plain)  # a name like any other


@given(st.text(max_size=30) | st.from_regex(r"\[?[0-9a-f:]{2,20}(%[a-z0-9]{0,4})?\]?", fullmatch=True))
def test_the_one_form_is_its_own_and_goes_through_addresses(text: str) -> None:
    host = plain_host(text)
    if host is not None:
        assert plain_host(host) == host
        assert split_address(address_at(host, 5600)) == (host, 5600)
        assert split_address(f"tcp://{text}:5600") == (host, 5600)


@each("host", SPELLINGS)
def test_every_place_that_takes_a_host_takes_all_spellings(host: str) -> None:
    at = "tcp://[fd00::2]:5600"
    assert Config(engine_id="e", listen=f"tcp://{host}:5600").listen == at
    for toward, expected in ((host, "fd00::2"), (f"auto:{host}", "auto:fd00::2")):
        assert Config(engine_id="e", listen="tcp://*:0", advertise_host=toward).advertise_host == expected
    assert PeerAddress(engine_id="e", address=f"tcp://{host}:5600").address == at
    source = {"kv_request_id": "x", "remote_host": host, "remote_port": 5600}
    assert source_in({"remote_kv_source": source}) == at
    assert read_stock_params(stock(host), arrived=None, lease_s=30.0, block_ids_max=1000).address == at
    assert split_address(address_at(host, 5600)) == ("fd00::2", 5600)
    assert worker_settings({}, node_ip=host, head="", workers=1)["listen"] == address_at(host, 0)


def stock(host: str) -> dict[str, Any]:
    return {
        **{"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[1, 2]], "dcp_size": 1},
        **{"remote_engine_id": "e", "remote_request_id": "cmpl-1-0-abcdef01", "remote_host": host, "remote_port": 5600},
        **{"tp_size": 1, "pp_size": 1, "remote_num_tokens": 32, "remote_blocks_expiry_time": None},
    }


@each("host", ["", "[", "fd00::2::", "[h]", "*", "::", "[::]", "a b", "h:1"])
def test_what_is_no_host_to_connect_to_is_refused_and_shown(host: str) -> None:
    assert not is_host(host)
    with pytest.raises(RequestError, match="remote_host"):
        read_stock_params(stock(host), arrived=None, lease_s=30.0, block_ids_max=1000)
    with pytest.raises(RequestError, match="remote_host"):
        source_in({"remote_kv_source": {"remote_host": host, "remote_port": 5600}})
    with pytest.raises(ConfigError, match="advertise_host"):
        Config(engine_id="e", listen="tcp://*:0", advertise_host=host)


@each(
    ("given", "url"),
    [
        ("tcp://fd00::2:5557", "tcp://[fd00::2]:5557"),
        ("http://fd00::2:9100/metrics?x=a:b", "http://[fd00::2]:9100/metrics?x=a:b"),
        ("tcp://fe80::1%eth0:*", "tcp://[fe80::1%eth0]:*"),
        *((same, same) for same in ("tcp://[fd00::2]:5557", "tcp://*:5557", "tcp://node-7:1", "http://h", "")),
        *((same, same) for same in ("ipc:///tmp/a:b:1", "inproc://x", "http://fd00::2", "http://user:word@h:1/")),
    ],
)
def test_a_bare_address_gets_its_brackets_in_a_url(given: str, url: str) -> None:
    assert bracket_ipv6_host(given) == url


@each("engine_id", ["fd00::2", "::1", "[fd00::2]:5600", "fe80::1%eth0"])
def test_an_engine_that_is_named_after_its_address_can_have_keys(engine_id: str) -> None:
    assert is_key_name(engine_id)
