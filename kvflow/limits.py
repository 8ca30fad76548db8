"""Limits: the bounds of a runtime that few users meet, each with its unit in the name; `Config` has those they do."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from kvflow import checks
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_KIB = 1 << 10
_MIB = 1 << 20

# Slices are what a link of the device's speed takes in about a millisecond, so that the time between an end that is
# seen and the next read that is posted does not count.
BY_DEVICE: Mapping[str, Mapping[str, int]] = {
    "cpu": {
        "slice_bytes_max": 8 * _MIB,
        "slices_in_flight_max": 2,
        "peer_in_flight_bytes_max": 20 * _MIB,
        "in_flight_bytes_max": 256 * _MIB,
    },
    "cuda": {
        "slice_bytes_max": 32 * _MIB,
        "slices_in_flight_max": 32,
        "peer_in_flight_bytes_max": 160 * _MIB,
        "in_flight_bytes_max": 1024 * _MIB,
    },
}
"""What limits are where nobody has chosen, by the kind of memory that is read into."""

REQUEST_ID_CHARS_MAX = 1024
SEALS_MAX = 1 << 24
SEAL_HOLD_S_MAX = 60.0
WAIT_S_MAX = 3600.0
PAYLOAD_BYTES_MAX = 1 << 16

# What peers take, and what seals are made for at once.
_MOST = {
    "leases_max": SEALS_MAX,
    "loads_max": SEALS_MAX,
    "seal_hold_s": SEAL_HOLD_S_MAX,
    "request_id_chars_max": REQUEST_ID_CHARS_MAX,
    "question_wait_s": WAIT_S_MAX,
    "payload_bytes_max": PAYLOAD_BYTES_MAX,
}

# How a limit is checked, by its type: all floats are seconds.
NUMBERS: Mapping[str, checks.Check] = {
    "int": partial(checks.whole, error=ConfigError),
    "float": partial(checks.seconds, error=ConfigError),
}


def check_bounds(given: object) -> None:
    """That every `_max` of a dataclass is at least 1, or 0 where the device decides."""
    for entry in fields(given):  # type: ignore[arg-type]
        value, least = getattr(given, entry.name), 0 if entry.default == 0 else 1
        if entry.name.endswith("_max") and value < least:
            raise ConfigError(f"{entry.name}: expected 1 or more, got {value}")


def by_device(given: T, kind: str) -> T:
    """Limits, or a Config, with what is 0 as the device wants it; kinds that go through the host are as "cpu"."""
    defaults = BY_DEVICE.get(kind, BY_DEVICE["cpu"])
    return replace(given, **{name: value for name, value in defaults.items() if getattr(given, name, None) == 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Raises ConfigError that names the limit for a value that cannot be."""

    clock_age_s: float = 60.0
    """How old a reader lets what it knows of a producer's clock become before it asks again, beside its loads."""
    lease_wait_s: float = 1.0
    """How long a reader waits for the lease of a rank that its ticket does not name: ranks open theirs one by one."""
    seal_hold_s: float = 0.05
    """How long blocks are kept after their lease has ended: loads that take less than half of it save a round trip."""
    leases_max: int = 1 << 14
    """Leases open at once; each has a 16-byte seal that readers check."""
    loads_max: int = 1 << 12
    """Ranks read from at once, over all loads, those with quarantined blocks included; further loads wait."""
    load_ranks_max: int = 256
    """Ranks of an engine that a load may concern; a ticket that needs more is refused before anybody is asked."""
    block_ids_max: int = 1 << 18
    """In one request, and in a ticket with those of all its ranks: they are judged at one go on the event loop."""
    request_id_chars_max: int = 512

    peer_backoff_first_s: float = 0.2
    """How long a peer is not asked after a failure; doubled with each further one in a row."""
    peer_backoff_max_s: float = 10.0
    peer_idle_s: float = 600.0
    """Connections that no load has used for so long are given up. Making one again costs a handshake, and NIXL keeps a
    file descriptor or two of each that it gives up, so do not set it low."""
    peers_max: int = 1024
    """Ranks of remote engines that are remembered at once; those that have never answered make room first."""
    first_contacts_max: int = 16
    """Peers that have never answered, and are asked at once. When more want to be, who came last goes first, and one
    that has not answered in a tenth of Config.handshake_timeout_s makes way."""
    readers_max: int = 1024
    """Readers that are remembered, to tell them."""
    goodbye_timeout_s: float = 1.0
    """How long draining and closing take at most to tell readers."""
    transport_close_timeout_s: float = 10.0
    """How long closing waits for reads to stop, and then for a copy that still runs."""

    slice_bytes_max: int = 0
    """What is read at once. Loads take turns by slices, so this is what a small one waits for behind a huge one. 0: by
    where the cache is, `BY_DEVICE`."""
    slice_descriptors_max: int = 8192
    slices_in_flight_max: int = 0
    """Slices of one load in flight: the second hides the completion latency of the first. 0: by where the cache is."""
    in_flight_descriptors_max: int = 1 << 17
    """In flight at once, over all loads, beside Config.in_flight_bytes_max."""
    in_flight_reads_max: int = 512
    peer_in_flight_bytes_max: int = 0
    """The same from one rank of an engine: two slices, and room for small reads beside them. More if the rank delivers
    more in a millisecond. 0: by where the cache is."""
    peer_in_flight_descriptors_max: int = 1 << 15
    peer_in_flight_reads_max: int = 128
    scratch_slot_bytes_max: int = 32 * _MIB
    scratch_slots_max: int = 3
    """Scratch buffers, each made when it is first needed."""

    side_channel_message_bytes_max: int = 4 * _MIB
    """An answer; it describes a whole cache."""
    side_channel_request_bytes_max: int = 64 * _KIB
    side_channel_requests_per_s_max: int = 1000
    """From one peer: an engine with CURVE, else an address. What comes faster gets no answer."""
    digests_max: int = 64
    """Questions for checksums of leased blocks that are answered at once; one more is refused, to be asked later."""
    reader_digests_max: int = 8
    """Of them, from one reader."""
    question_wait_s: float = 10.0
    """How long a reader's question waits at most for something to tell, such as that a lease is complete; then it is
    answered that there is nothing yet, and the reader asks again."""
    questions_waiting_max: int = 1 << 14
    """Such questions that wait at once; those beyond are answered at once, and asked again a little later."""
    reader_questions_waiting_max: int = 1 << 12
    """Of them, from one reader."""
    request_questions_waiting_max: int = 256
    """Of them, about one request."""
    payload_bytes_max: int = 4 * _KIB
    """What may come with a lease's end (`Lease.complete`), as it is given, and as it is taken from a peer."""
    side_channel_connections_max: int = 2048
    """When there are more at once, all are dropped. Keep it well above `readers_max`: after a restart each reader comes
    with a connection, and keeps it for `side_channel_idle_s`."""
    side_channel_idle_s: float = 5.0
    """How long a connection to a peer is kept after its last question, for the next one."""
    side_channel_kept_max: int = 32
    """Connections that are kept so: the one that was not used for longest goes first. Each has four files."""
    notification_bytes_max: int = 4 * _KIB
    notification_poll_interval_s: float = 0.005
    """How often readers' notifications are looked for; ten times less often when none has come for a while."""

    def __post_init__(self) -> None:
        checks.settle_fields(self, NUMBERS)
        check_bounds(self)
        for name, most in _MOST.items():
            if getattr(self, name) > most:
                raise ConfigError(f"{name}: expected at most {most}, got {getattr(self, name)!r}")
