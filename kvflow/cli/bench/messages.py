"""What the parent and its children say to each other, over pipes between processes that trust each other."""

from __future__ import annotations

from dataclasses import dataclass

Ticket = dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read block `remote_ids[i]` of the producer into block `local_ids[i]` of the reader."""

    request_id: str
    local_ids: tuple[int, ...]
    remote_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAddress:
    """A producer's first words. For kvflow it is empty: its tickets say where to go."""

    agent: str = ""
    metadata: bytes = b""
    bases: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Connect:
    """To a reader: this is your producer, and the process whose CPU time counts with yours."""

    address: PeerAddress
    producer_pid: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """To a producer: these loads come next. Answered by `Offered`."""

    loads: tuple[Load, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offered:
    """One ticket per load, from kvflow only."""

    tickets: tuple[Ticket, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTurn:
    """To a reader: do these loads, the first of them untimed. Answered by `TurnResult`."""

    loads: tuple[Load, ...]
    tickets: tuple[Ticket, ...]
    check_all: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnResult:
    """What a reader measured in one turn, and how many blocks it compared byte by byte.

    `cpu_s` is of reader and producer together. The last three come from kvflow: lags of the loop, phases of each load,
    and into how many descriptors its planner turned a load.
    """

    seconds: tuple[float, ...]
    cpu_s: float
    checked_blocks: int
    lags_s: tuple[float, ...] = ()
    phases_s: tuple[dict[str, float], ...] = ()
    descriptors: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Settle:
    """To a producer: the turn is over, forget its loads. Answered by `Done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Withdraw:
    """To a producer: the turn is over; end leases that nobody will report as read. Answered by `Done`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrepareLoad:
    """To a consumer of the topology bench: its rank `rank` will do this load, of which `layers` will be compared.

    Answered by `Done`.
    """

    rank: int
    load: Load
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """To a consumer: do this load and compare `layers` of it. Answered by `LoadResult`.

    There is one ticket from every producer rank that was asked.
    """

    rank: int
    load: Load
    tickets: tuple[Ticket, ...]
    remote_block_size: int
    layers: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadResult:
    """One load: `size_bytes` and `descriptors` are what was read, which may be more than what was wanted."""

    seconds: float
    size_bytes: int
    descriptors: int
    phases_s: dict[str, float]
    checked_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRound:
    """To the reader of the fairness bench: one round's loads (`fairness_bench.reader`). Answered by `RoundResult`."""

    wake: Load
    alone: tuple[Load, ...]
    slices: tuple[Load, ...]
    huge: tuple[Load, ...]
    behind: tuple[Load, ...]
    tickets: tuple[Ticket, ...] = ()
    """In the order of `loads`."""

    @property
    def loads(self) -> tuple[Load, ...]:
        return (self.wake, *self.alone, *self.slices, *self.huge, *self.behind)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundResult:
    """How long each load took: one block while nothing else ran, one slice, huge, one block behind the huge ones."""

    alone_s: tuple[float, ...]
    slice_s: tuple[float, ...]
    huge_s: tuple[float, ...]
    behind_s: tuple[float, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenLease:
    """To a producer: open a lease that nobody reads. Answered by `Done`."""

    load: Load


@dataclass(frozen=True, slots=True, kw_only=True)
class TickIdle:
    """To a kvflow reader: tick on the idle loop. Answered by `TurnResult` with lags only."""

    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginsFound:
    """From the doctor's look at NIXL: the plugins that can be loaded."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Quit:
    """To anybody: close everything and exit. Answered by the end of the process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A child's last words."""

    traceback: str


Message = (
    PeerAddress
    | Connect
    | Offer
    | Offered
    | RunTurn
    | TurnResult
    | Settle
    | Withdraw
    | PrepareLoad
    | RunLoad
    | LoadResult
    | RunRound
    | RoundResult
    | OpenLease
    | TickIdle
    | PluginsFound
    | Quit
    | Done
    | Failed
)
