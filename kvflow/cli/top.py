"""`kvflow top`: what the engines of a fleet do now, as tables of two scrapes."""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvflow.checks import counted
from kvflow.cli.scrape import RankName, Scrape, scrape

_PHASES = ("queued", "handshake", "plan", "post", "compute", "wire", "verify", "notify")
_FINE = ("loaded", "cancelled")
_ENGINE_RANKS_MAX = 32
"""Ranks beyond which each engine is one row."""

Values = Mapping[tuple[str, str], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One rank, or one engine with all its ranks."""

    name: str
    ranks: int
    ready: int
    peers: int
    loads: int
    leases: int
    reads: int
    free: int
    leased: int
    in_flight: int
    quarantined: int
    loads_per_s: float
    failed_per_s: float
    leases_per_s: float
    expired_per_s: float
    bytes_per_s: float
    phases_s: Mapping[str, float]
    """Mean of the loads that have ended between both scrapes."""
    errors: Mapping[str, int]
    """Loads that failed between both, by their error."""


def rows_of(before: Scrape, now: Scrape, *, engines: bool) -> list[Row]:
    """Rows by name: rates between two scrapes, and what is open now. Pure.

    What is new, or has begun to count anew, has no rates yet.
    """
    elapsed_s = max(now.at_s - before.at_s, 1e-9)
    members: dict[str, list[RankName]] = defaultdict(list)
    for rank in sorted(now.ranks):
        members[rank.engine if engines else " ".join((rank.engine, ".".join(rank[1:])))].append(rank)
    return [
        _row(name, len(ranks), _added([now.ranks[rank] for rank in ranks]), _since(before, now, ranks), elapsed_s)
        for name, ranks in members.items()
    ]


def watch(urls: Sequence[str], console: Console, *, interval_s: float, once: bool, engines: bool | None) -> bool:
    """Show tables, again and again or once, until interrupted. True if the last scrape has shown any rank."""
    now = scrape(urls)
    live = Live(render(now, now, engines=engines), console=console, screen=not once, auto_refresh=False)
    with live if console.is_terminal else contextlib.nullcontext():
        while True:
            time.sleep(interval_s)
            before, now = now, scrape(urls)
            tables = render(before, now, engines=engines)
            if console.is_terminal:
                live.update(tables, refresh=True)
            else:
                console.print(tables)
            if once:
                return bool(now.ranks)


def render(before: Scrape, now: Scrape, *, engines: bool | None) -> RenderableType:
    """Tables of two scrapes. `engines`: ranks are added up; None: if there are many."""
    rows = rows_of(before, now, engines=len(now.ranks) > _ENGINE_RANKS_MAX if engines is None else engines)
    parts: list[RenderableType] = [_states(rows), _phases(rows)] if rows else [Text("no ranks", "yellow")]
    errors = [(row.name, error, count) for row in rows for error, count in sorted(row.errors.items())]
    parts += [Text(f"{name}: {counted(count, 'load')} ended as {error}", "red") for name, error, count in errors]
    parts += [Text(f"{url}: {why}", "red") for url, why in now.problems.items()]
    return Group(*parts)


def _row(name: str, ranks: int, now: Values, since: Values, elapsed_s: float) -> Row:
    def open_now(metric: str, label: str = "") -> int:
        return round(now.get((metric, label), 0.0))

    def all_of(values: Values, metric: str) -> Iterator[tuple[str, float]]:
        return ((label, value) for (found, label), value in values.items() if found == metric)

    def rate(metric: str, *labels: str) -> float:
        return sum(since.get((metric, label), 0.0) for label in labels or ("",)) / elapsed_s

    ended = dict(all_of(since, "kvflow_loads_total"))
    failed = {label: round(count) for label, count in ended.items() if label not in _FINE and count > 0}
    counts = dict(all_of(since, "kvflow_load_phase_seconds_count"))
    sums = dict(all_of(since, "kvflow_load_phase_seconds_sum"))
    return Row(
        name=name,
        ranks=ranks,
        ready=open_now("kvflow_peers", "ready"),
        peers=round(sum(value for _, value in all_of(now, "kvflow_peers"))),
        loads=open_now("kvflow_open_loads"),
        leases=open_now("kvflow_open_leases"),
        reads=open_now("kvflow_open_reads"),
        free=open_now("kvflow_blocks", "free"),
        leased=open_now("kvflow_blocks", "leased"),
        in_flight=open_now("kvflow_blocks", "in_flight"),
        quarantined=open_now("kvflow_blocks", "quarantined"),
        loads_per_s=sum(ended.values()) / elapsed_s,
        failed_per_s=sum(failed.values()) / elapsed_s,
        leases_per_s=sum(value for _, value in all_of(since, "kvflow_leases_total")) / elapsed_s,
        expired_per_s=rate("kvflow_leases_total", "expired"),
        bytes_per_s=rate("kvflow_read_bytes_total"),
        phases_s={phase: sums.get(phase, 0.0) / count for phase, count in counts.items() if count > 0},
        errors=failed,
    )


def _since(before: Scrape, now: Scrape, ranks: Sequence[RankName]) -> Values:
    """Growth of counters, over ranks that were there before and have not begun anew."""
    grown = []
    for rank in ranks:
        old = before.ranks.get(rank)
        if old is not None:
            grown.append({key: max(value - old.get(key, 0.0), 0.0) for key, value in now.ranks[rank].items()})
    return _added(grown)


def _added(parts: Sequence[Values]) -> Values:
    total: dict[tuple[str, str], float] = defaultdict(float)
    for part in parts:
        for key, value in part.items():
            total[key] += value
    return total


_STATES: tuple[tuple[str, Callable[[Row], object]], ...] = (
    ("engine", lambda row: row.name),
    ("ranks", lambda row: row.ranks),
    ("peers ready", lambda row: f"{row.ready} of {row.peers}"),
    ("loads", lambda row: row.loads),
    ("/s", lambda row: f"{row.loads_per_s:.1f}"),
    ("failed/s", lambda row: f"{row.failed_per_s:.1f}"),
    ("MB/s", lambda row: f"{row.bytes_per_s / 1e6:.1f}"),
    ("reads", lambda row: row.reads),
    ("leases", lambda row: row.leases),
    ("/s", lambda row: f"{row.leases_per_s:.1f}"),
    ("expired/s", lambda row: f"{row.expired_per_s:.1f}"),
    ("blocks free", lambda row: row.free),
    ("leased", lambda row: row.leased),
    ("in flight", lambda row: row.in_flight),
    ("quarantined", lambda row: row.quarantined),
)


def _table(headings: Iterable[str], **looks: Any) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, **looks)
    for heading in headings:
        table.add_column(heading, justify="left" if heading == "engine" else "right")
    return table


def _states(rows: Sequence[Row]) -> Table:
    table = _table(heading for heading, _ in _STATES)
    for row in rows:
        cells = (Text(str(cell(row))) for _, cell in _STATES)
        table.add_row(*cells, style="red" if row.failed_per_s or row.quarantined else "")
    return table


def _phases(rows: Sequence[Row]) -> Table:
    table = _table(("engine", *_PHASES), title="mean ms of loads by phase", title_justify="left")
    for row in rows:
        cells = (f"{row.phases_s[name] * 1e3:.2f}" if name in row.phases_s else "" for name in _PHASES)
        table.add_row(Text(row.name), *cells)
    return table
