"""Limits: the bounds of a runtime that few users meet, each with its unit in the name; `Config` has those they do."""

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
"""Limits where nobody has chosen, by the kind of memory that is read into."""

REQUEST_ID_CHARS_MAX = 1024
"""Characters of a request id that peers take; callers here give shorter ones (`checks.GIVEN_ID_CHARS_MAX`)."""
SEALS_MAX = 1 << 24
SEAL_HOLD_S_MAX = 60.0
WAIT_S_MAX = 3600.0
PAYLOAD_BYTES_MAX = 1 << 16
"""Bytes of a payload that any version may send; engines of this one take `GIVEN_PAYLOAD_BYTES_MAX`."""
GIVEN_PAYLOAD_BYTES_MAX = 1 << 12
"""Bytes of a payload that comes with a lease's end (`Lease.complete`), as given here and as taken from a peer."""
QUESTION_WAIT_S = 10.0
"""Longest time a reader's question waits for something to tell; then the answer is that there is nothing yet, and the
reader asks again."""

SealCount: TypeAlias = Annotated[int, Meta(ge=1, le=SEALS_MAX)]
SealHold: TypeAlias = Annotated[float, Meta(gt=0, le=SEAL_HOLD_S_MAX)]
ByDevice: TypeAlias = Count
"""Bound that is 0 where the device decides (`BY_DEVICE`)."""


def by_device(given: T, kind: str) -> T:
    """Limits, or a Config, with what is 0 as the device wants it; kinds that go through the host are as "cpu"."""
    defaults = BY_DEVICE.get(kind, BY_DEVICE["cpu"])
    return replace(given, **{name: value for name, value in defaults.items() if getattr(given, name, None) == 0})


@checks.naming_unknown
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds that are seldom changed. ConfigError names a limit that is unknown, or cannot be."""

    lease_wait_s: Seconds = 1.0
    """Time a reader waits for a rank, not named by its ticket, to open its lease."""
    seal_hold_s: SealHold = 0.05
    """Time blocks are kept after their lease has ended: loads that take less than half of it save a round trip."""
    leases_max: SealCount = 1 << 14
    """Leases open at once; each has a 16-byte seal that readers check."""
    loads_max: SealCount = 1 << 12
    """Ranks read from at once, over all loads, with quarantined ones; further loads wait."""
    load_ranks_max: Size = 256
    """Ranks of one engine in a load; a ticket that needs more is refused before any is asked."""
    block_ids_max: Size = 1 << 18
    """Block ids in a request, and in a ticket over all its ranks: the event loop judges them in one go."""

    peer_backoff_first_s: Seconds = 0.2
    """Time a peer is not asked after a failure; each further one in a row doubles it."""
    peer_backoff_max_s: Seconds = 10.0
    """Longest time a failed peer is not asked."""
    peer_idle_s: Seconds = 600.0
    """Time after which an unused connection is given up. Do not set it low: another one costs a handshake, and NIXL
    keeps a file descriptor or two of each that was given up."""
    peers_max: Size = 1024
    """Remote ranks that are remembered; those that have never answered make room first."""
    first_contacts_max: Size = 16
    """Peers asked at once that have never answered. Others wait, the latest first; meanwhile one that is silent for a
    tenth of Config.handshake_timeout_s makes way."""
    readers_max: Size = 1024
    """Readers that are remembered, and told when this rank closes."""
    goodbye_timeout_s: Seconds = 1.0
    """Longest time that draining and closing take to tell readers."""
    transport_close_timeout_s: Seconds = 10.0
    """Longest time that closing waits for reads to stop, and then for a copy that still runs."""

    slice_bytes_max: ByDevice = 0
    """Bytes of one slice. Loads take turns by slices, so a small load waits for this much of a huge one. 0: 8 MiB for a
    cache in host memory, 32 MiB on CUDA."""
    slice_descriptors_max: Size = 8192
    """Descriptors in one slice."""
    slices_in_flight_max: ByDevice = 0
    """Slices of one load in flight: the second hides the completion latency of the first. 0: 2 for a cache in host
    memory, 32 on CUDA."""
    peer_in_flight_bytes_max: ByDevice = 0
    """Bytes in flight from one rank, with room for small reads; more if it delivers more in a millisecond. 0: 20 MiB
    for a cache in host memory, 160 MiB on CUDA."""
    scratch_slot_bytes_max: Size = 32 * _MIB
    """Bytes of a scratch buffer."""
    scratch_slots_max: Size = 3
    """Scratch buffers, made when first needed."""

    side_channel_requests_per_s_max: Size = 1000
    """Requests a second from one peer: an engine with CURVE, else an address. More get no answer."""
    side_channel_connections_max: Size = 2048
    """Connections to the side channel at once; with more, all are dropped. Keep it well above `readers_max`: after a
    restart each reader opens one and keeps it for some seconds."""
    digests_max: Size = 64
    """Questions for checksums of leased blocks answered at once; further ones are refused as not ready."""
    notification_poll_interval_s: Seconds = 0.005
    """Interval of looking for readers' notifications; ten times longer when none has come for a while."""

    def __post_init__(self) -> None:
        checks.settle(self, ConfigError)
