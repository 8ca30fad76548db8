"""`Limits`: bounds of a runtime that few users change, with the unit in each name. `Config` has the other settings."""

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
"""Default limits: by the kind of device ("cpu", "cuda") on which the cache lies, then by field name."""

REQUEST_ID_CHARS_MAX = 1024
"""Maximum number of characters of a request id from a peer. Ids from local callers are shorter
(`checks.LOCAL_REQUEST_ID_CHARS_MAX`)."""
SEALS_MAX = 1 << 24
SEAL_HOLD_S_MAX = 60.0
WAIT_S_MAX = 3600.0
PAYLOAD_BYTES_MAX = 1 << 16
"""Maximum bytes of a payload (the bytes that `Lease.complete` passes to readers) that any version of the protocol can
carry. `GIVEN_PAYLOAD_BYTES_MAX` is the smaller maximum that this version accepts."""
GIVEN_PAYLOAD_BYTES_MAX = 1 << 12
"""Maximum bytes of a payload (`Lease.complete`) that this version accepts, from a local caller or from a peer."""
QUESTION_WAIT_S = 10.0
"""Maximum seconds after which a producer answers a reader's question about a lease. If the lease has not changed by
then, the producer answers that nothing is new, and the reader asks again."""

SealCount: TypeAlias = Annotated[int, Meta(ge=1, le=SEALS_MAX)]
SealHold: TypeAlias = Annotated[float, Meta(gt=0, le=SEAL_HOLD_S_MAX)]
ByDevice: TypeAlias = Count
"""Type of a bound for which 0 stands for the default of the device that holds the cache (`BY_DEVICE`)."""


def with_device_defaults(settings: T, kind: str) -> T:
    """Return a copy of `settings`, a Limits or a Config, with the defaults of a device in place of bounds that are 0.

    `kind`: kind of the device, such as "cuda". Caches on devices that `BY_DEVICE` lacks are copied through host memory,
    so they get the defaults of "cpu".
    """
    defaults = BY_DEVICE.get(kind, BY_DEVICE["cpu"])
    return replace(settings, **{name: value for name, value in defaults.items() if getattr(settings, name, None) == 0})


@checks.refuse_unknown_arguments
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of a runtime that are seldom changed.

    The constructor raises ConfigError for an unknown or invalid limit.
    """

    lease_wait_s: Seconds = 1.0
    """Maximum time that a reader waits for a rank to open a lease, if the ticket does not name that rank's lease."""
    seal_hold_s: SealHold = 0.05
    """Time for which a producer keeps blocks after their lease has ended. A load of one read that takes less than half
    of this time saves a round trip."""
    leases_max: SealCount = 1 << 14
    """Maximum number of leases that are open at the same time. Each has a 16-byte seal that readers check."""
    source_ranks_max: SealCount = 1 << 12
    """Maximum number of ranks that loads read from, summed over all loads in progress or in quarantine. Further loads
    wait."""
    load_ranks_max: Size = 256
    """Maximum number of a producer's ranks that one load reads from or reports to. A ticket that needs more is refused
    before any rank is contacted."""
    block_ids_max: Size = 1 << 18
    """Maximum number of block ids in a request, and in a ticket, for all its ranks together. All ids are checked in one
    turn of the event loop.
    """

    peer_backoff_first_s: Seconds = 0.2
    """Time for which a peer is not contacted after it has failed. Each further failure in a row doubles the time."""
    peer_backoff_max_s: Seconds = 10.0
    """Maximum time for which a peer is not contacted, however often it has failed in a row."""
    peer_idle_s: Seconds = 600.0
    """Time after which an unused connection to a peer is closed. If it is short, loads need new handshakes, and NIXL
    keeps one or two file descriptors of each closed connection."""
    peers_max: Size = 1024
    """Maximum number of peers (remote ranks) to remember. Peers that have never answered are evicted first."""
    first_contacts_max: Size = 16
    """Maximum number of never-connected peers that are contacted at the same time. Further new peers wait; the peer
    that began to wait last is contacted next. While a peer waits that was not contacted yet, a contacted peer that
    has not answered within a tenth of Config.handshake_timeout_s goes back and waits behind the others."""
    readers_max: Size = 1024
    """Maximum number of readers to remember. When this rank closes, it notifies them."""
    goodbye_timeout_s: Seconds = 1.0
    """Maximum time for which draining and closing wait until all readers are notified."""
    transport_close_timeout_s: Seconds = 10.0
    """Maximum time for which closing waits until reads have stopped. Then it waits, up to this time again, for a
    running copy.
    """

    slice_bytes_max: ByDevice = 0
    """Maximum bytes of one slice. Loads take turns by slices, so a small load waits for one slice of a huge load. 0: 8
    MiB for a cache in host memory, 32 MiB on CUDA."""
    slice_descriptors_max: Size = 8192
    """Maximum number of descriptors in one slice."""
    slices_in_flight_max: ByDevice = 0
    """Maximum number of slices of one load in flight; a second slice hides the completion latency of the first. 0: 2
    for a cache in host memory, 32 on CUDA."""
    peer_in_flight_bytes_max: ByDevice = 0
    """Maximum bytes in flight from one rank. 0: 20 MiB for a cache in host memory, 160 MiB on CUDA, which leaves room
    for small reads beside full slices; but not less than what the rank delivers in a millisecond."""
    scratch_slot_bytes_max: Size = 32 * _MIB
    """Size of one scratch buffer, in bytes."""
    scratch_slots_max: Size = 3
    """Maximum number of scratch buffers. Each is allocated when it is first needed."""

    side_channel_requests_per_s_max: Size = 1000
    """Maximum number of side-channel requests per second from one peer, which is an engine if CURVE is used, else an IP
    address. Readers are told when to ask further requests again. Ten times as many get no answer.
    """
    side_channel_connections_max: Size = 2048
    """Maximum number of connections to this rank's side channel at the same time. If there is one more, the rank drops
    all connections. Keep the maximum well above `readers_max`: after a restart of this rank each reader opens a
    connection and keeps it for some seconds.
    """
    digests_max: Size = 64
    """Maximum number of readers' requests for checksums of leased blocks that are processed at the same time. Further
    requests are refused as not ready."""
    notification_poll_interval_s: Seconds = 0.005
    """Shortest interval between polls for readers' notifications. The interval grows, up to ten times, with the time
    since the last notification, and since a lease has last become readable to its end.
    """

    def __post_init__(self) -> None:
        checks.normalize_fields(self, ConfigError)
