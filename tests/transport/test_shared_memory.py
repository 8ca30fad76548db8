"""Where addresses of a peer lie in this process, and which process a peer is."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core.cache.regions import Span
from kvflow.transport.mapped import shared_memory
from kvflow.transport.mapped.shared_memory import (
    AddressMap,
    NotMappable,
    OnOtherMachine,
    SharedMemory,
    WatchedProcess,
    decode,
    encode,
    own_process,
)
from tests.support.tests_support import WAIT_S

SHARED = SharedMemory(process=own_process(), kind="cuda", allocations=(), ranges=(), host_metadata=b"\x00")
BOUNDARY = st.sampled_from([0, 1, 99, 100, 101, 149, 150, 151, 200, 299, 300, 301, (1 << 63) - 1, (1 << 64) - 1])


@given(st.lists(st.tuples(BOUNDARY, BOUNDARY), min_size=1, max_size=4))
def test_only_pieces_within_one_range_are_found(pieces: list[tuple[int, int]]) -> None:
    ranges = [(Span(address=200, size_bytes=100), 7000), (Span(address=100, size_bytes=50), 9000)]
    places = [
        next(
            (
                place + address - span.address
                for span, place in ranges
                if span.address <= address and address + size <= span.address + span.size_bytes
            ),
            None,
        )
        for address, size in pieces
    ]
    table = np.array(pieces, dtype=np.uint64)
    found = AddressMap(ranges).find(table[:, 0], table[:, 1])
    assert (None if found is None else found.tolist()) == (None if None in places else places)


def test_nothing_is_found_where_nothing_is() -> None:
    one = np.array([1], dtype=np.uint64)
    assert AddressMap([]).find(one, one) is None
    assert AddressMap([(Span(address=8, size_bytes=8), 80)]).find_one(Span(address=12, size_bytes=4)) == 84


def test_what_is_encoded_decodes_and_nothing_else_does() -> None:
    assert decode(encode(SHARED)) == SHARED
    whole = msgspec.msgpack.decode(encode(SHARED))
    for wrong in ({"kind": 5}, {"ranges": [{"address": -1, "size_bytes": 1}]}, {"allocations": [[1, 2, b""]]}):
        with pytest.raises(NotMappable):
            decode(msgspec.msgpack.encode(whole | wrong))
    assert decode(msgspec.msgpack.encode(whole | {"later": 1})) == SHARED, "a field of a later version"


def test_a_process_is_watched_until_it_ends() -> None:
    code = (
        "from kvflow.transport.mapped.shared_memory import *; print(encode(own_process()).hex(), flush=True); input()"
    )
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True) as child:
        assert child.stdout is not None
        told = bytes.fromhex(child.stdout.readline())
        process = msgspec.msgpack.decode(told, type=shared_memory.ProcessIdentity)
        watched = WatchedProcess(process)
        assert not watched.has_ended
        child.kill()
        child.wait(WAIT_S)
        assert watched.has_ended
        watched.close()
        with pytest.raises(NotMappable):
            WatchedProcess(process)


def test_another_machine_is_told_apart_from_what_cannot_be_mapped() -> None:
    own = own_process()
    with pytest.raises(OnOtherMachine):
        WatchedProcess(msgspec.structs.replace(own, machine="another"))
    files = len(os.listdir("/proc/self/fd"))
    with pytest.raises(NotMappable, match=f"process {own.pid} has ended"):
        WatchedProcess(msgspec.structs.replace(own, started=own.started + 1))
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_system_that_does_not_tell_maps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: object) -> str:
        raise PermissionError("no")

    monkeypatch.setattr(shared_memory.os, "readlink", refuse)
    with pytest.raises(NotMappable, match="does not tell which process this is: no"):
        own_process()
