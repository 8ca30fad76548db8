"""`Limits`: bounds of a runtime that few users change, with units in their names. `Config` has the other settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, TypeAlias, TypeVar

from msgspec import Meta

from kvflow import checks
from kvflow.checks import Count, Seconds, Size
from kvflow.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")

_MIB = 1 << 20

# A slice takes about a millisecond on a link of the device's speed. Compared with that, the time from the end of one
# read to the post of the next is small.
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
"""Default limits by kind of device ("cpu", "cuda") of the memory that reads land in, then by field name."""

REQUEST_ID_CHARS_MAX = 1024
"""Maximum length of a request id from a peer, in characters. Ids from local callers are shorter
(`checks.LOCAL_REQUEST_ID_CHARS_MAX`)."""
SEALS_MAX = 1 << 24
SEAL_HOLD_S_MAX = 60.0
WAIT_S_MAX = 3600.0
PAYLOAD_BYTES_MAX = 1 << 16
"""Maximum bytes of a payload (`Lease.complete`) in the protocol. This version accepts only
`GIVEN_PAYLOAD_BYTES_MAX`."""
GIVEN_PAYLOAD_BYTES_MAX = 1 << 12
"""Maximum bytes that this version accepts as payload (`Lease.complete`), from a local caller or from a peer."""
QUESTION_WAIT_S = 10.0
"""Longest time after which a producer answers a reader's question about a lease, even if nothing has changed. Then the
reader asks again."""

SealCount: TypeAlias = Annotated[int, Meta(ge=1, le=SEALS_MAX)]
SealHold: TypeAlias = Annotated[float, Meta(gt=0, le=SEAL_HOLD_S_MAX)]
ByDevice: TypeAlias = Count
"""Type of a bound for which 0 means the default of the cache's device (`BY_DEVICE`)."""


def with_device_defaults(given: T, kind: str) -> T:
    """Return `given`, Limits or a Config, with the defaults for a device of `kind` in place of bounds that are 0.

    Caches on a device that is not in `BY_DEVICE` are copied through the host, so they get the defaults of "cpu".
    """
    defaults = BY_DEVICE.get(kind, BY_DEVICE["cpu"])
    return replace(given, **{name: value for name, value in defaults.items() if getattr(given, name, None) == 0})


@checks.refuse_unknown_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that are seldom changed. ConfigError names an unknown or invalid limit."""

    lease_wait_s: Seconds = 1.0
    """Longest time that a reader waits for a rank to open a lease, if the ticket does not name that rank's lease."""
    seal_hold_s: SealHold = 0.05
    """Time for which blocks are kept after their lease has ended. A load that takes less than half of it saves a round
    trip."""
    leases_max: SealCount = 1 << 14
    """Maximum number of leases open at once; each has a 16-byte seal that readers check."""
    source_ranks_max: SealCount = 1 << 12
    """Maximum number of ranks read from at once, summed over all loads, including quarantined loads. Further loads
    wait."""
    load_ranks_max: Size = 256
    """Maximum number of ranks of one engine in a load. A ticket that needs more is refused before any rank is
    contacted."""
    block_ids_max: Size = 1 << 18
    """Maximum number of block ids in a request, and in a ticket over all its ranks. The event loop checks them in one
    turn."""

    peer_backoff_first_s: Seconds = 0.2
    """Time for which a peer is not contacted after a failure; each further failure in a row doubles this time."""
    peer_backoff_max_s: Seconds = 10.0
    """Longest time for which a peer is not contacted after failures."""
    peer_idle_s: Seconds = 600.0
    """Time after which an unused connection is closed. Do not set it low: the next load needs a handshake, and NIXL
    keeps one or two file descriptors of each closed connection."""
    peers_max: Size = 1024
    """Maximum number of remote ranks to remember; ranks that have never answered are evicted first."""
    first_contacts_max: Size = 16
    """Maximum number of peers that have never answered and are contacted at once. Further new peers wait, and the
    latest is contacted first. While new peers wait, a contacted peer that is silent for a tenth of
    Config.handshake_timeout_s is given up."""
    readers_max: Size = 1024
    """Maximum number of readers to remember; these are notified when this rank closes."""
    goodbye_timeout_s: Seconds = 1.0
    """Longest time that draining and closing take to notify readers."""
    transport_close_timeout_s: Seconds = 10.0
    """Longest time for which closing waits until reads have stopped, and after that, again at most this time, until a
    running copy has ended."""

    slice_bytes_max: ByDevice = 0
    """Maximum bytes of one slice. Loads take turns by slices, so a small load waits for one slice of a huge one. 0: 8
    MiB for a cache in host memory, 32 MiB on CUDA."""
    slice_descriptors_max: Size = 8192
    """Maximum number of descriptors in one slice."""
    slices_in_flight_max: ByDevice = 0
    """Maximum number of slices of one load in flight; a second slice hides the completion latency of the first. 0: 2
    for a cache in host memory, 32 on CUDA."""
    peer_in_flight_bytes_max: ByDevice = 0
    """Maximum bytes in flight from one rank; the default leaves room for small reads beside full slices. 0: 20 MiB for
    a cache in host memory, 160 MiB on CUDA, or what the rank delivers in a millisecond if that is more."""
    scratch_slot_bytes_max: Size = 32 * _MIB
    """Size of one scratch buffer, in bytes."""
    scratch_slots_max: Size = 3
    """Maximum number of scratch buffers; each is allocated when first needed."""

    side_channel_requests_per_s_max: Size = 1000
    """Maximum number of requests per second from one peer (with CURVE an engine, else an IP address). Further requests
    get no answer."""
    side_channel_connections_max: Size = 2048
    """Maximum number of connections to the side channel at once. One more drops all connections. Keep it well above
    `readers_max`: after a restart each reader opens a connection and keeps it for some seconds."""
    digests_max: Size = 64
    """Maximum number of requests for checksums of leased blocks that are answered at once. Further requests are refused
    as not ready."""
    notification_poll_interval_s: Seconds = 0.005
    """Interval between polls for readers' notifications; ten times longer after a while without any."""

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError)
