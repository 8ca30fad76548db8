"""Which request of a prefill server answers which of a decode server; the plugin's settings. Without SGLang."""

from __future__ import annotations

import itertools
import json

import pytest

from kvflow import Config, Limits
from kvflow.errors import ConfigError
from kvflow.sglang.rooms import (
    LEFTOVER_S,
    REASON_CHARS_MAX,
    REFUSALS_MAX,
    REQUESTS_MAX,
    ROOM_MAX,
    Answer,
    Room,
    RoomMessage,
    Rooms,
    room_problem,
)
from kvflow.sglang.server_settings import SETTINGS, config_of, switch_warning

ROOM = 77


def message(name: str, reader: str = "0", readers: int = 1, room: int = ROOM, **more: str) -> RoomMessage:
    return RoomMessage(room=room, name=name, reader=reader, readers=readers, **more)  # type: ignore[arg-type]


@pytest.fixture
def rooms() -> Rooms:
    return Rooms(patience_s=300.0)


def name_of(answer: Answer) -> str:
    return "" if answer.request is None else answer.request.name


def is_empty(rooms: Rooms) -> bool:
    tables = (rooms.requests, rooms.answers, rooms._waiting_by_name, rooms._paired_by_name, rooms._refusals)
    return not any(tables)


@pytest.mark.parametrize("order", sorted(set(itertools.permutations("aaabbb"))))
def test_the_nth_answers_the_nth_whoever_comes_first(rooms: Rooms, order: tuple[str, ...]) -> None:
    """Of one room: a are requests of the decode server, b those of the prefill server."""
    names, answers = iter(["one", "two", "three"]), []
    for step in order:
        if step == "a":
            assert rooms.handle(message(next(names)), 0.0) is None
        else:
            answers.append(rooms.add_answer(ROOM, 0.0))
    assert [name_of(answer) for answer in answers] == ["one", "two", "three"]
    for answer in answers:
        rooms.close(answer, 0.0)
    assert is_empty(rooms)


def test_two_ranks_of_a_prefill_server_pair_alike_whenever_an_abort_comes() -> None:
    """To one rank the abort comes before its sender, to the other one after it; both give the second its own."""
    found = []
    for abort_first in (True, False):
        rooms = Rooms(patience_s=300.0)
        rooms.handle(message("one"), 0.0)
        rooms.handle(message("two"), 0.0)
        answers = [] if abort_first else [rooms.add_answer(ROOM, 0.0)]
        rooms.handle(message("one", given_up="the client has left"), 0.0)
        answers += [rooms.add_answer(ROOM, 0.0) for _ in range(2 - len(answers))]
        found.append([(name_of(answer), answer.request.given_up if answer.request else "") for answer in answers])
    assert found[0] == found[1] == [("one", "the client has left"), ("two", "")]


def test_a_request_is_complete_once_all_ranks_have_asked(rooms: Rooms) -> None:
    answer = rooms.add_answer(ROOM, 0.0)
    rooms.handle(message("one", "0", 2), 0.0)
    assert answer.request is not None
    assert not answer.request.complete
    rooms.handle(message("one", "0", 2), 0.0)
    assert not answer.request.complete
    rooms.handle(message("one", "1", 2), 0.0)
    assert answer.request.complete
    rooms.handle(message("one", "2", 2), 0.0)
    assert len(answer.request.messages) == 2, "a third of two is nobody"


@pytest.mark.parametrize("refused_first", [True, False])
def test_refusals_keep_their_places(rooms: Rooms, refused_first: bool) -> None:
    first, second = rooms.add_answer(ROOM, 0.0), rooms.add_answer(ROOM, 0.0)
    if refused_first:
        assert rooms.refuse(first, "too long", 0.0) is None
        declined = rooms.handle(message("one"), 0.0)
        assert declined is not None
        assert (declined[0].name, declined[1]) == ("one", "too long")
    else:
        rooms.handle(message("one"), 0.0)
        asked = rooms.refuse(first, "too long", 0.0)
        assert asked is not None
        assert asked.name == "one"
    assert rooms.refuse(first, "again", 0.0) is None
    rooms.handle(message("two"), 0.0)
    assert name_of(second) == "two"
    for answer in (first, second):
        rooms.close(answer, 0.0)
    assert is_empty(rooms)


def test_what_is_said_of_a_request_that_is_over_changes_nothing(rooms: Rooms) -> None:
    answer = rooms.add_answer(ROOM, 0.0)
    rooms.handle(message("one"), 0.0)
    rooms.close(answer, 0.0)
    assert rooms.handle(message("one", given_up="late"), 0.0) is None
    again = rooms.add_answer(ROOM, 0.0)
    assert again.request is None
    rooms.handle(message("two"), 0.0)
    assert name_of(again) == "two"


def test_a_request_that_nobody_answers_is_declined_in_the_end(rooms: Rooms) -> None:
    rooms.handle(message("one"), 0.0)
    rooms.handle(message("given up", room=ROOM + 1, given_up="why"), 0.0)
    assert rooms.pop_expired(300.0) == []
    assert [asked.name for asked in rooms.pop_expired(300.1)] == ["one"], "of what was given up nobody waits"
    assert is_empty(rooms)


def test_rooms_that_nobody_comes_for_are_bounded(rooms: Rooms) -> None:
    for at in range(REQUESTS_MAX + 3):
        rooms.handle(message(f"name-{at}", room=at + 1), 0.0)
    assert [asked.name for asked in rooms.pop_expired(0.0)] == ["name-0", "name-1", "name-2"]
    assert len(rooms.requests) == REQUESTS_MAX
    for at in range(REFUSALS_MAX + 3):
        rooms.refuse(rooms.add_answer(REQUESTS_MAX * 2 + at, 0.0), "too long", 0.0)
    assert len(rooms.answers) == REFUSALS_MAX


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_a_leftover_ends_no_later_request_of_its_room(rooms: Rooms, side: str) -> None:
    """A half that was given up just now ends its other half; an old one ends nothing."""
    for waited_s, ends in ((LEFTOVER_S, True), (LEFTOVER_S + 0.1, False)):
        if side == "prefill":
            rooms.refuse(rooms.add_answer(ROOM, 0.0), "aborted", 0.0)
        else:
            rooms.handle(message(f"old-{ends}", given_up="aborted"), 0.0)
        answer = rooms.add_answer(ROOM, waited_s)
        declined = rooms.handle(message(f"new-{ends}"), waited_s)
        if side == "prefill":
            assert (declined is not None) is ends
        else:
            assert name_of(answer) == (f"old-{ends}" if ends else f"new-{ends}")
        rooms.close(answer, waited_s)
        rooms = Rooms(patience_s=300.0)


def test_rooms_of_one_number_are_different_keys() -> None:
    first, second = Room(ROOM), Room(ROOM)
    table = {first: 1, second: 2}
    assert (table[first], table[second], len(table)) == (1, 2, 2)
    assert ROOM not in table
    assert (f"{first}", first % 10, json.dumps(first)) == ("77", 7, "77")


@pytest.mark.parametrize("room", [0, -1, ROOM_MAX + 1, 1 << 70])
def test_rooms_that_no_metadata_can_hold(room: int) -> None:
    assert str(room) in room_problem(room)
    assert room_problem(1) == room_problem(ROOM_MAX) == ""


def test_reasons_from_outside_are_short_and_of_one_line(rooms: Rooms) -> None:
    rooms.handle(message("one", given_up="a\nline" * 1000), 0.0)
    answer = rooms.add_answer(ROOM, 0.0)
    assert answer.request is not None
    assert "\n" not in answer.request.given_up
    assert len(answer.request.given_up) <= REASON_CHARS_MAX + 3


FROM_SGLANG = {"engine_id": "sglang-x-dp0-kv", "model": "float16.nhd", "role": "producer"}
FROM_SGLANG |= {"listen": "tcp://127.0.0.1:0"}


def made(text: str) -> Config:
    return config_of(FROM_SGLANG, {SETTINGS: text})


def test_settings_are_fields_of_config_limits_among_them() -> None:
    assert config_of(FROM_SGLANG, {}) == made("") == made("{}") == Config(**FROM_SGLANG)  # type: ignore[arg-type]
    assert made('{"nixl_backend": "LIBFABRIC"}').nixl_backend == "LIBFABRIC"
    config = made('{"limits": {"block_ids_max": 1048576, "peers_max": 4096}, "lease_ttl_s": 60}')
    assert config.limits == Limits(block_ids_max=1048576, peers_max=4096)
    assert config.lease_ttl_s == 60.0
    assert made('{"listen": "tcp://127.0.0.2:0"}').listen == "tcp://127.0.0.2:0"


def test_with_the_switch_variables_of_nixl_mean_what_they_mean_there() -> None:
    given = {"SGLANG_DISAGGREGATION_NIXL_BACKEND": "LIBFABRIC"}
    given["SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS"] = '{"num_threads": "4"}'
    assert config_of(FROM_SGLANG, given) == made("")
    switched = {**given, "KVFLOW_AS_NIXL": "1"}
    config = config_of(FROM_SGLANG, switched)
    assert (config.nixl_backend, dict(config.nixl_backend_params)) == ("LIBFABRIC", {"num_threads": "4"})
    assert config_of(FROM_SGLANG, {**switched, SETTINGS: '{"nixl_backend": "UCX"}'}).nixl_backend == "UCX"
    with pytest.raises(ConfigError, match=r"SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS: expected a JSON object"):
        config_of(FROM_SGLANG, {**switched, "SGLANG_DISAGGREGATION_NIXL_BACKEND_PARAMS": "[]"})


def test_the_line_of_the_switch_names_what_has_no_effect() -> None:
    assert switch_warning(None).startswith("KVFLOW_AS_NIXL=1: the transfer backend nixl is kvflow in this server.")
    assert "Without effect" not in switch_warning("")
    assert switch_warning("mlx5_0").endswith(
        "Without effect: --disaggregation-ib-device mlx5_0 (UCX_NET_DEVICES has one)"
    )


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ('{"nixl_backend": ["LIBFABRIC"]}', "nixl_backend"),
        ('{"lease_ttl": 60}', "lease_ttl_s"),
        ('{"lease_ttl_s": "60"}', "lease_ttl_s"),
        ('{"lease_ttl_s": -1}', "lease_ttl_s"),
        ('{"listen": "127.0.0.1"}', "listen"),
        ('{"limits": {"peer_max": 4096}}', "peers_max"),
        ('{"limits": {"peers_max": "many"}}', "peers_max"),
        ('{"limits": {"peers_max": 0}}', "peers_max"),
        ('{"limits": [1]}', "limits"),
        ('{"limits": null}', "limits"),
        ('{"engine_id": "mine"}', "come from SGLang"),
        ('{"tp_size": 4}', "come from SGLang"),
        ("{nixl_backend: LIBFABRIC}", "JSON"),
        ("[]", "JSON"),
        ("null", "JSON"),
        ("7", "JSON"),
        ("\udcff", "JSON"),
        ("[" * 100_000, "JSON"),
    ],
)
def test_a_setting_that_cannot_be_names_the_variable(text: str, word: str) -> None:
    with pytest.raises(ConfigError) as caught:
        made(text)
    assert str(caught.value).startswith(f"{SETTINGS}: ")
    assert word in str(caught.value)
    assert len(str(caught.value)) < 2000
