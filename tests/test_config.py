"""Config refuses what cannot work when it is made, not when it hurts."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.config import PORT_MAX, Config, params_of, split_address
from kvflow.core.protocol.messages import SealLocation
from kvflow.core.protocol.ticket import Ticket
from kvflow.errors import ConfigError
from kvflow.limits import BY_DEVICE, Limits
from tests.core.claimed import sent
from tests.support.tests_support import TICKET, altered, each

SHARES = ("verify_share",)
RANKS = ("tp_rank", "tp_size", "dp_rank", "pp_rank", "pp_size")
OF_LIMITS = [field.name for field in dataclasses.fields(Limits)]
DEFAULTS = {
    field.name: field.default
    for kind in (Config, Limits)
    for field in dataclasses.fields(kind)
    if isinstance(field.default, int | float) and not isinstance(field.default, bool)
}
LIMITS = [name for name in DEFAULTS if name not in (*RANKS, *SHARES)]
TIMES = [name for name in LIMITS if isinstance(DEFAULTS[name], float)]


def config(**changes: Any) -> Config:
    return Config(**{"engine_id": "engine-0", **changes})


def with_limit(name: str, value: float) -> float:
    """A limit as a Config that was given it has it, of its own or in its `limits`."""
    if name in OF_LIMITS:
        return float(getattr(config(limits=Limits(**{name: value})).limits, name))  # type: ignore[arg-type]
    return float(getattr(config(**{name: value}), name))


# --- limits


def test_limits_say_their_unit_or_that_they_are_bounds() -> None:
    """Found by their type, so that a new limit cannot slip past the tests below by its name."""
    assert len(LIMITS) > 30
    assert not set(OF_LIMITS) & {field.name for field in dataclasses.fields(Config)}
    assert [name for name in LIMITS if not name.endswith(("_s", "_max"))] == []
    assert all(name.endswith("_s") for name in TIMES)


@each("name", LIMITS)
def test_a_limit_is_above_zero_and_of_what_can_be_held_or_waited_for(name: str) -> None:
    least = 1e-9 if name in TIMES else 1
    assert with_limit(name, least) == least
    if name in {*BY_DEVICE["cpu"], "host_buffer_bytes_max"}:
        assert with_limit(name, 0) == 0, "as the device wants it"
    wrong = [-1, -0.001, float("nan"), *([0] if name not in {*BY_DEVICE["cpu"], "host_buffer_bytes_max"} else [])]
    for value in [*wrong, *([2_000_000_000] if name in TIMES else [])]:
        with pytest.raises(ConfigError, match=rf"^{name}: .*{value!r}"):
            with_limit(name, value)


@each(
    ("name", "most", "above"),
    [("source_ranks_max", 1 << 24, (1 << 24) + 1), ("leases_max", 1 << 24, (1 << 24) + 1), ("seal_hold_s", 60.0, 60.5)],
)
def test_what_no_memory_holds_and_no_reader_waits_for_is_refused(name: str, most: float, above: float) -> None:
    assert with_limit(name, most) == most
    with pytest.raises(ConfigError, match=f"^{name}: expected .* <= {most}, got {above}"):
        with_limit(name, above)


@pytest.mark.parametrize("name", ["scratch", "staging"])
def test_a_mode_is_one_of_three(name: str) -> None:
    for mode in ("auto", "always", "never"):
        assert getattr(config(**{name: mode}), name) == mode
    with pytest.raises(ConfigError, match=f"^{name}: expected 'auto', 'always' or 'never', got 'often'"):
        config(**{name: "often"})


# --- names and ranks


KEYS = {"curve_secret_key_file": "a.secret", "curve_peers_dir": "keys"}


@each(
    "changes",
    [
        {"model": "m" * 1024},
        {"engine_id": "org/prefill"},
        {"engine_id": "prefill-0.eu", **KEYS},
        {"listen": "tcp://h:0", "tp_rank": 1023, "tp_size": 1024, "pp_rank": 1023, "pp_size": 1024, "num_kv_heads": 1},
    ],
)
def test_what_is_just_possible_is_legal(changes: dict[str, Any]) -> None:
    found = config(**changes)
    assert {name: getattr(found, name) for name in changes} == changes
    assert found.listen_port_offset == found.tp_size * found.pp_size - 1


@each(
    ("match", "changes"),
    [
        ("engine_id: .*0", {"engine_id": ""}),
        ("engine_id: .*257", {"engine_id": "x" * 257}),
        ("model: .*1025", {"model": "m" * 1025}),
        # Else the engine starts, and every ticket that it makes is refused by every reader.
        *(("engine_id: ", {"engine_id": name}) for name in ("prefill 0", "\t", "\ud800", "a\x00b")),
        *(("advertise_host: ", {"advertise_host": name}) for name in ("10.0.0.7 ", "x" * 1025, "\ud800")),
        *(("advertise_host: ", {"advertise_host": name}) for name in ("auto:", "auto:0.0.0.0", "auto:a b", "auto:\n")),
        *(
            ("engine_id: .* cannot name key files", {"engine_id": name, **KEYS})
            for name in ("org/prefill", "..", ".hidden", "x" * 101)
        ),
        *(("curve_secret_key_file, curve_peers_dir: expected both or none", {name: KEYS[name]}) for name in KEYS),
        ("tp_rank: .*4.*4", {"tp_rank": 4, "tp_size": 4}),
        ("tp_rank: .*-1", {"tp_rank": -1, "tp_size": 4}),
        ("pp_rank: .*2", {"pp_rank": 2, "pp_size": 2}),
        *((f"{name}: .*{value}", {name: value}) for name in ("tp_rank", "pp_rank") for value in (1, -1)),
        *((f"{name}: .*{value}", {name: value}) for name in ("tp_size", "pp_size") for value in (0, -1, 1025, 1 << 70)),
        *((f"{name}: .*{value}", {name: value}) for name, value in (("dp_rank", -1), ("num_kv_heads", -8))),
        ("num_kv_heads: .*0", {"num_kv_heads": 0}),
    ],
)
def test_what_cannot_be_is_refused(match: str, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"^{match}"):
        config(**changes)


# --- ports


@settings(deadline=None)
@given(base=st.integers(1, 60000), sizes=st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4)))
def test_each_rank_has_the_next_port(base: int, sizes: tuple[int, int, int]) -> None:
    dp_size, pp_size, tp_size = sizes
    listen = f"tcp://127.0.0.1:{base}"
    ranks = [
        config(listen=listen, tp_rank=tp, tp_size=tp_size, pp_rank=pp, pp_size=pp_size, dp_rank=dp)
        for dp, pp, tp in itertools.product(*map(range, sizes))
    ]
    assert [rank.listen_port for rank in ranks] == list(range(base, base + dp_size * pp_size * tp_size))
    assert {rank.listen_host for rank in ranks} == {"127.0.0.1"}


def test_a_rank_above_the_last_port_is_refused_and_port_0_stays_0() -> None:
    assert config(listen="tcp://127.0.0.1:0", tp_rank=3, tp_size=4, dp_rank=70_000).listen_port == 0
    address = f"tcp://127.0.0.1:{PORT_MAX - 3}"
    assert config(listen=address, tp_rank=3, tp_size=4).listen_port == PORT_MAX
    with pytest.raises(ConfigError, match=rf"^listen: .*{PORT_MAX - 3}.*4.*{PORT_MAX}"):
        config(listen=address, dp_rank=1, tp_size=4)


# --- addresses


@each("host", ["0.0.0.0", "*", "[::]", "::"])
def test_a_wildcard_needs_a_host_to_tell_others_that_they_can_reach(host: str) -> None:
    listen = f"tcp://{host}:5600"
    for told in ({}, *({"advertise_host": name} for name in ("", "0.0.0.0", "*", "[::]"))):
        with pytest.raises(ConfigError, match="advertise_host"):
            config(listen=listen, **told)
    assert config(listen=listen, advertise_host="10.0.0.7").listen_host == host.strip("[]")


@each(
    ("address", "expected"),
    [
        ("tcp://127.0.0.1:5600", ("127.0.0.1", 5600)),
        ("tcp://node-7.cluster.local:1", ("node-7.cluster.local", 1)),
        ("tcp://[::1]:65535", ("::1", 65535)),
        ("tcp://*:0", ("*", 0)),
    ],
)
def test_addresses(address: str, expected: tuple[str, int]) -> None:
    assert split_address(address) == expected


BAD_ADDRESSES = [
    *(f"{start}127.0.0.1:5600" for start in ("", "udp://", "tcp:/", "tcp//", "TCP://", "tcp://tcp://")),
    *(f"tcp://127.0.0.1{end}" for end in ("", ":", ":http", ":-1", ":+1", ": 1", ":1_0", ":1.5", ":5600/path")),
    *(f"tcp://127.0.0.1:{port}" for port in ("65536", "9" * 20, "9" * 5000)),
    *("", "ipc:///tmp/socket", "tcp://:5600", "tcp://two words:5600"),
    *(
        "tcp://fd00::2",
        "tcp://[fd00::2:5600",
        "tcp://fd00::2]:5600",
        "tcp://[10.0.0.7]:5600",
        "tcp://[::1]",
        "tcp://::%:1",
    ),
]


@each("address", BAD_ADDRESSES)
def test_a_bad_address_is_refused_and_shown(address: str) -> None:
    with pytest.raises(ConfigError, match=r"^listen: "):
        config(listen=address)
    with pytest.raises(ConfigError, match=r"^peer: "):
        split_address(address, what="peer")


@settings(deadline=None)
@given(st.text(max_size=20) | st.builds("tcp://{}:{}".format, st.text(max_size=8), st.text(max_size=6)))
def test_any_text_is_an_address_or_a_config_error(text: str) -> None:
    try:
        host, port = split_address(text)
    except ConfigError:
        return
    assert host
    assert 0 <= port <= PORT_MAX


# --- what Config accepts, peers accept


@settings(deadline=None)
@given(
    engine_id=st.text(min_size=1, max_size=8),
    advertise_host=st.none() | st.text(max_size=8),
    lease_ttl_s=st.floats(min_value=0),
)
def test_the_tickets_of_every_legal_config_are_legal(
    engine_id: str, advertise_host: str | None, lease_ttl_s: float
) -> None:
    try:
        legal = config(engine_id=engine_id, advertise_host=advertise_host, lease_ttl_s=lease_ttl_s)
    except ConfigError:
        return
    ticket = altered(
        TICKET,
        engine_id=legal.engine_id,
        ttl_s=legal.lease_ttl_s,
        host=legal.advertise_toward or legal.advertise_host or legal.listen_host,
        port=legal.listen_port,
    )
    assert Ticket.from_params(ticket.to_params()) == ticket


@each(("name", "value"), [("seal_hold_s", 60.0), ("seal_hold_s", 3600.0), ("leases_max", (1 << 24) + 1)])
def test_seals_that_no_reader_takes_are_refused_early(name: str, value: float) -> None:
    try:
        limits = Limits(**{name: value})  # type: ignore[arg-type]
    except ConfigError:
        return
    seals = SealLocation(address=4096, count=limits.leases_max, hold_s=limits.seal_hold_s)
    assert sent(seals) == seals


# --- backends


def test_one_backend_or_several_with_parameters() -> None:
    one = config(nixl_backend_params={"ucx_error_handling_mode": "peer"})
    assert one.nixl_backends == {"UCX": {"ucx_error_handling_mode": "peer"}}
    assert params_of(one, "POSIX") == {}
    several = config(
        nixl_backend="UCX,LIBFABRIC",
        nixl_backend_params={"all": "1", "UCX.num_workers": "2", "POSIX.use_uring": "true", "LIBFABRIC.all": "3"},
    )
    assert several.nixl_backends == {"UCX": {"all": "1", "num_workers": "2"}, "LIBFABRIC": {"all": "3"}}
    assert list(several.nixl_backends) == ["UCX", "LIBFABRIC"]
    assert params_of(several, "POSIX") == {"use_uring": "true"}


# --- meanings


@each("kind", [Config, Limits])
def test_every_setting_says_what_it_is_in_words_of_its_users(kind: type) -> None:
    """In the string below it, from which the docs' table is made."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(kind)).body if isinstance(node, ast.ClassDef))
    said = {}
    for entry, text in itertools.pairwise(body):
        match entry, text:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(words))):
                said[name] = words
    assert [entry.name for entry in dataclasses.fields(kind) if entry.name not in said] == []
    internal = re.compile(r"\b(core|runtime|limits|transport)\.\w|[A-Z]_[A-Z]|\b0 GiB")
    assert {name: words for name, words in said.items() if internal.search(words)} == {}


def test_there_are_no_more_settings_than_can_be_known() -> None:
    assert len(dataclasses.fields(Config)) + len(dataclasses.fields(Limits)) <= 56


# --- slips of the pen


@each(
    ("make", "match"),
    [
        (lambda: config(lease_tll_s=3.0), "Config: unknown: lease_tll_s; did you mean 'lease_ttl_s'"),
        (lambda: Limits(peer_max=3), "Limits: unknown: peer_max; did you mean 'peers_max'"),  # type: ignore[call-arg]
        (lambda: config(colour="red"), "Config: unknown: colour; known are advertise_host, "),
        (lambda: config(transport="ucx"), "transport: expected 'nixl' or 'inproc', got 'ucx'"),
        *(
            (lambda names=names: config(nixl_backend=names), "nixl_backend: expected names separated by commas")
            for names in ("", "UCX,", ",UCX", "UCX,UCX", "UCX, LIBFABRIC", "U CX", "x" * 65)
        ),
        (lambda: config(nixl_backend="POSIX"), "nixl_backend: POSIX reaches files only"),
        (lambda: config(nixl_backend_params={"GDS.x": "1"}), ".*'GDS.x' is for 'GDS', there are UCX, POSIX"),
        (lambda: config(role="prodcer"), "role: .*, got 'prodcer'; did you mean 'producer'"),
        (lambda: config(nixl_backend="UXC"), "nixl_backend: 'UXC' is not a backend .*; did you mean 'UCX'"),
        (lambda: config(nixl_backend="UCX,libfabric"), "nixl_backend: 'libfabric' .*; did you mean 'LIBFABRIC'"),
    ],
)
def test_a_slip_is_refused_where_it_is_made_and_what_was_meant_is_named(make: Any, match: str) -> None:
    with pytest.raises(ConfigError, match=f"^{match}"):
        make()


def test_a_backend_of_somebody_elses_is_taken_by_its_name() -> None:
    assert config(nixl_backend="PIGEONS").nixl_backends == {"PIGEONS": {}}
    assert config(nixl_backend="UCX,POSIX")


def test_limits_are_taken_as_a_dict() -> None:
    """As configuration files have them."""
    assert Config(engine_id="e", limits={"peers_max": 7}).limits == Limits(peers_max=7)  # type: ignore[arg-type]
    for wrong, word in (
        ({"peer_max": 7}, "peers_max"),
        ({"peers_max": "7"}, "peers_max"),
        ([7], "Limits"),
        ({7: 7}, "7"),
    ):
        with pytest.raises(ConfigError, match=f"^limits: .*{word}"):
            Config(engine_id="e", limits=wrong)  # type: ignore[arg-type]
