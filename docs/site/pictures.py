"""Draw every picture of the docs, light and dark, from data in the repository and from the code's own tables.

    python docs/site/pictures.py

Data is in docs/data: `handover.jsonl` and `stale.json` are recorded by docs/site/record.py, `transfer.json` is what
`dev.py bench transfer --json` writes, `peers.json` what `dev.py peers --json` writes, `fleet.json` what the fleet bench
writes, `dashboard.json` what docs/site/dashboard.py asks a Prometheus server. The states are the tables of
`kvflow.core.policy.states` and `kvflow.connector.request_states`. Pictures go to docs/pictures; a test draws them again
and compares. Plain SVG, no library.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from xml.sax.saxutils import escape

from kvflow.connector.request_states import CONSUMER_TABLE, PRODUCER_TABLE
from kvflow.core.policy.states import (
    LEASE_TABLE,
    PEER_TABLE,
    TRANSFER_TABLE,
)

Points: TypeAlias = Sequence[tuple[float, float]]

LOAD_MAX = 1.0
"""Load average before a bench above which its numbers are others' as well."""

DOCS = Path(__file__).resolve().parents[1]
DATA, PICTURES = DOCS / "data", DOCS / "pictures"
STATES: dict[str, Mapping[tuple[Any, Any], Any]] = {
    "peer": PEER_TABLE,
    "lease": LEASE_TABLE,
    "transfer": TRANSFER_TABLE,
    "consumer": CONSUMER_TABLE,
    "producer": PRODUCER_TABLE,
}


RINGS = {
    "core": ("runtime", "transport", "core"),
    "parts": ("failover", "growing", "prefix", "staging", "stock", "storage", "verify"),
    "integrations": ("blocking", "connector", "observe", "ray", "sglang", "vllm"),
    "tools": ("bench", "cli", "doctor", "testing"),
}
"""Folders of the package, from the inside out; tests/test_house.py compares."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Theme:
    """Colours by what they stand for."""

    name: str
    ground: str
    text: str
    faint: str
    line: str
    a: str
    b: str
    c: str
    bad: str


THEMES = (
    Theme(
        name="light",
        ground="#ffffff",
        text="#1f2328",
        faint="#59636e",
        line="#d1d9e0",
        a="#3f51b5",
        b="#1a7f6b",
        c="#b35900",
        bad="#c62828",
    ),
    Theme(
        name="dark",
        ground="#0d1117",
        text="#e6edf3",
        faint="#9198a1",
        line="#3d444d",
        a="#8c9eff",
        b="#4dd0b1",
        c="#ffb74d",
        bad="#ff7b72",
    ),
)


@dataclass(slots=True, kw_only=True)
class Canvas:
    """An SVG that is being drawn; coordinates are its own pixels."""

    width: int
    height: int
    theme: Theme
    title: str
    parts: list[str] = field(default_factory=list)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 14,
        color: str = "",
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        color = color or self.theme.text
        self.parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" fill="{color}" text-anchor="{anchor}"{weight}>'
            f"{escape(text)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, color: str, *, hollow: bool = False) -> None:
        paint = f'fill="none" stroke="{color}" stroke-width="1.5"' if hollow else f'fill="{color}"'
        self.parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="3" {paint}/>')

    def line(self, points: Points, color: str, *, width: float = 1.5, dashed: bool = False) -> None:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="4 4"' if dashed else ""
        self.parts.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="{width}"{dash}/>')

    def dot(self, x: float, y: float, color: str) -> None:
        self.parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{color}"/>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float, color: str) -> None:
        """With a head that points the way the line goes; lines are horizontal or vertical here, or nearly so."""
        self.line([(x, y), (to_x, to_y)], color)
        length = max(((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5, 1.0)
        along = ((to_x - x) / length, (to_y - y) / length)
        base = (to_x - 8 * along[0], to_y - 8 * along[1])
        corners = [(to_x, to_y), *((base[0] - s * along[1], base[1] + s * along[0]) for s in (4, -4))]
        path = " ".join(f"{corner[0]:.1f},{corner[1]:.1f}" for corner in corners)
        self.parts.append(f'<polygon points="{path}" fill="{color}"/>')

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" width="{self.width}" '
            f'height="{self.height}" role="img" font-family="system-ui, -apple-system, Segoe UI, sans-serif">'
        )
        ground = f'<rect width="{self.width}" height="{self.height}" fill="{self.theme.ground}"/>'
        return "\n".join([head, f"<title>{escape(self.title)}</title>", ground, *self.parts, "</svg>", ""])


# --- a hand-over in three lanes


def lanes(theme: Theme) -> str:
    lines = [json.loads(line) for line in (DATA / "handover.jsonl").read_text().splitlines()]
    of = {line["kind"]: line for line in lines if line["request_id"] == "req-1"}
    begin_s, end_s = of["compute"]["begin_s"], of["lease"]["ended_s"]
    left, right, tops = 150, 820, {"prefill engine": 66, "router": 158, "decode engine": 226}

    def ms(seconds: float) -> str:
        return f"{seconds * 1e3:.0f} ms"

    def x(at_s: float) -> float:
        return left + (right - left) * (at_s - begin_s) / (end_s - begin_s)

    record = next(line for line in lines if line["kind"] == "load" and line["request_id"] == "req-1" and "rank" in line)
    size_mb = record["details"]["bytes"] / 2**20
    canvas = Canvas(width=860, height=322, theme=theme, title="A hand-over between two engines, as it was recorded")
    canvas.text(20, 30, f"One hand-over of {size_mb:.0f} MB, recorded", size=17, bold=True)
    for name, top in tops.items():
        canvas.text(20, top + 17, name, bold=True)
        canvas.line([(20, top - 12), (840, top - 12)], theme.line, width=1)
    canvas.line([(20, 288), (840, 288)], theme.line, width=1)

    def bar(lane: float, begin: float, end: float, color: str, label: str, *, hollow: bool = False) -> None:
        wide = max(x(end) - x(begin), 3)
        canvas.box(x(begin), lane, wide, 24, color, hollow=hollow)
        fits = wide > 8 * len(label)
        place = (x(begin) + 7) if fits else min(x(begin) + wide + 6, right - 7 * len(label))
        canvas.text(place, lane + 17, label, size=13, color=theme.ground if fits and not hollow else theme.text)

    top, lease = tops["prefill engine"], of["lease"]
    offered_s = lease["ended_s"] - sum(lease["seconds"].values())
    read_s = offered_s + lease["seconds"]["offered"]
    bar(top, begin_s, of["compute"]["ended_s"], theme.faint, "compute")
    bar(top + 34, offered_s, read_s, theme.a, f"lease is open, {ms(read_s - offered_s)}: blocks keep their content")
    bar(top + 34, read_s, lease["ended_s"], theme.a, "hold", hollow=True)
    ticket = of["ticket"]
    bar(tops["router"], ticket["begin_s"], ticket["ended_s"], theme.c, "ticket, a dict of JSON types")
    top = tops["decode engine"]
    at_s = record["ended_s"] - sum(record["seconds"].values())
    bar(top, at_s, record["ended_s"], theme.b, f"load: blocks and seal are read, {ms(sum(record['seconds'].values()))}")
    canvas.arrow(x(record["ended_s"]), top, x(record["ended_s"]), tops["prefill engine"] + 60, theme.faint)
    canvas.text(x(record["ended_s"]) + 7, tops["router"] + 17, "“read”", size=13, color=theme.faint)
    canvas.text(x(at_s), 270, "the seal read with the blocks is intact: they are fresh", size=13, color=theme.b)
    canvas.text(right, 310, f"blocks free after {ms(end_s - begin_s)}", size=13, color=theme.faint, anchor="end")
    canvas.text(left, 310, "0 ms", size=13, color=theme.faint)
    return canvas.svg()


# --- a stale read in four frames


def stale(theme: Theme) -> str:
    frames = json.loads((DATA / "stale.json").read_text())
    canvas = Canvas(width=860, height=300, theme=theme, title="A read that comes after its lease, in four frames")
    canvas.text(20, 30, "A ticket that is used too late", size=17, bold=True)
    for index, frame in enumerate(frames):
        left, last = 20 + index * 210, index == len(frames) - 1
        is_open = frame["lease"] == "offered"
        canvas.box(left, 46, 196, 236, theme.line, hollow=True)
        canvas.text(left + 12, 72, f"{index + 1}", size=15, bold=True, color=theme.faint)
        for row, words in enumerate(_wrapped(frame["happens"], 18)):
            canvas.text(left + 34, 72 + 18 * row, words, size=14, bold=True)
        canvas.text(left + 12, 132, "blocks 3, 7, 9 hold", size=12, color=theme.faint)
        color = theme.a if frame["blocks_hold"] == "A" else theme.c
        for block in range(3):
            canvas.box(left + 12 + 46 * block, 140, 40, 34, color)
            held = frame["blocks_hold"]
            canvas.text(left + 32 + 46 * block, 163, held, color=theme.ground, anchor="middle", bold=True)
        canvas.text(left + 12, 196, f"lease: {frame['lease']}", size=13, color=theme.b if is_open else theme.bad)
        if not last:
            for row, words in enumerate(_wrapped(f"reader {frame['reader']}", 25)):
                canvas.text(left + 12, 222 + 17 * row, words, size=13, color=theme.faint)
            continue
        canvas.text(left + 12, 222, f"a plain read: “{frame['blocks_hold']}”", size=13, color=theme.bad, bold=True)
        canvas.text(left + 12, 239, "wrong text, no error", size=13, color=theme.bad)
        canvas.text(left + 12, 264, frame["reader"], size=13, color=theme.b, bold=True)
    return canvas.svg()


def _wrapped(text: str, width: int) -> Iterator[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > width:
            yield line
            line = ""
        line = f"{line} {word}".strip()
    yield line


# --- charts


def transfer(theme: Theme) -> str:
    """Speed in ratios to raw NIXL at its best; says so if others were at work on the machine."""
    measured = json.loads((DATA / "transfer.json").read_text())
    rows, machine = measured["speed"], measured["machine"]
    sizes = list(dict.fromkeys((row["transport"], row["size"]) for row in rows))
    names = {
        "raw_example": "raw NIXL, as its examples use it",
        "bare_hop": "raw NIXL at its best, behind one thread of an event loop",
        "kvflow": "kvflow",
    }
    colors = {"raw_example": theme.faint, "bare_hop": theme.c, "kvflow": theme.a}
    top, height = 84, 54 + 62 * len(sizes)
    canvas = Canvas(
        width=860, height=top + height, theme=theme, title="Speed of loads, in ratios to raw NIXL at its best"
    )
    canvas.text(20, 30, "How fast, against raw NIXL at its best (= 1)", size=17, bold=True)
    at = 20.0
    for name, label in names.items():
        canvas.box(at, 46, 14, 14, colors[name])
        canvas.text(at + 20, 58, label, size=13)
        at += 44 + 7.2 * len(label)
    most = max(1.0, *(row["ratio_to_b"] for row in rows))
    left, right = 170, 800

    def x(ratio: float) -> float:
        return left + (right - left) * ratio / most

    for index, (transport, size) in enumerate(sizes):
        y = top + 62 * index
        canvas.text(20, y + 29, f"{size}, {transport}", size=14)
        for place, name in enumerate(names):
            found = next(r for r in rows if (r["transport"], r["size"], r["contender"]) == (transport, size, name))
            ratio = found["ratio_to_b"]
            canvas.box(left, y + 16 * place, max(x(ratio) - left, 1), 13, colors[name])
            canvas.text(x(ratio) + 6, y + 11 + 16 * place, f"{ratio:.2f}", size=12)
    canvas.line([(x(1), top - 8), (x(1), top + height - 50)], theme.text, dashed=True)
    note, color = f"Ratios of medians; longer is faster. {machine['cpus']} cores, no GPU.", theme.faint
    if machine["load_average_1m"] > LOAD_MAX:
        note += f" OTHERS WERE AT WORK (load average {machine['load_average_1m']:.0f}): not to be quoted."
        color = theme.bad
    canvas.text(20, top + height - 14, note, size=13, color=color)
    return canvas.svg()


def peers(theme: Theme) -> str:
    """The largest load of each library: its time, how late the reader's loop was, and what lands after a cancel."""
    figures = runpy.run_path(str(DOCS / "site" / "figures.py"))
    measured, names = figures["peers"](), figures["NAMES"]
    rows = measured["speed"]
    most = max(row["size_bytes"] for row in rows)
    transport, size = next((row["transport"], row["size"]) for row in rows if row["size_bytes"] == most)

    def of_this_load(table: str) -> list[dict[str, Any]]:
        return [row for row in measured[table] if (row["transport"], row["size"]) == (transport, size)]

    lags = {row["contender"]: row for row in of_this_load("loop_lag")}
    cancels = {row["contender"]: row for row in measured["cancel"]}
    panels: dict[str, dict[str, float | None]] = {
        f"{size}, {transport}: ms": {row["contender"]: 1e3 * row["median_s"] for row in of_this_load("speed")},
        "the loop is late, ms (p99)": {name: 1e3 * row["lag_p99_s"] for name, row in lags.items()},
        "MB that land after a cancel": {name: row["landed_mb"] for name, row in cancels.items()},
    }
    contenders = [name for name in names if any(name in values for values in panels.values())]
    top, row_high, left, wide = 70.0, 30.0, 235.0, 150.0
    height = round(top + row_high * len(contenders) + 40)
    canvas = Canvas(width=900, height=height, theme=theme, title="Libraries beside one another: time, loop, cancel")
    canvas.text(20, 28, "What a transfer costs an event loop, and what a cancel promises", size=17, bold=True)
    for place, (title, values) in enumerate(panels.items()):
        at, largest = left + 222 * place, max(value or 0.0 for value in values.values())
        canvas.text(at, top - 14, title, size=12, color=theme.faint)
        for index, name in enumerate(contenders):
            y, value = top + row_high * index, values.get(name)
            if place == 0:
                canvas.text(20, y + 14, names[name].strip("*"), size=13, bold=name == figures["KVFLOW"])
            if value is None:
                blocks = place == 1 and any(row["contender"] == name for row in of_this_load("speed"))
                why = "its loop is blocked" if blocks else "tcp only"
                canvas.text(at, y + 14, why, size=12, color=theme.faint)
                continue
            color = theme.a if name == figures["KVFLOW"] else theme.faint
            length = max(wide * value / largest if largest else 0.0, 1.0)
            canvas.box(at, y + 3, length, 14, color)
            label = f"{value:,.1f}" if 0 < value < 10 else f"{value:,.0f}"
            canvas.text(at + length + 6, y + 14, label, size=12)
    machine = measured["machine"]
    note, color = f"Shorter is better. {machine['cpus']} cores, no GPU; medians.", theme.faint
    if machine["load_average_1m"] > LOAD_MAX:
        note += f" Load average before it: {machine['load_average_1m']:.1f}."
    canvas.text(20, height - 14, note, size=13, color=color)
    return canvas.svg()


def fleet(theme: Theme) -> str:
    numbers = json.loads((DATA / "fleet.json").read_text())
    phases = list(dict.fromkeys(row["phase"] for row in numbers["fleet"]))
    colors = (theme.a, theme.c, theme.b)

    def curve(phase: str, name: str) -> list[tuple[float, float]]:
        return [(row["ranks"], row[name]) for row in numbers["fleet"] if row["phase"] == phase]

    memory = {
        label: [(row["peers"], row[name] / 1024) for row in numbers["memory"]]
        for label, name in (("connected", "connected_bytes"), ("every length loaded", "loaded_bytes"))
    }
    axes = {
        "connections to the busiest rank": {phase: curve(phase, "connections") for phase in phases},
        "longest wait for an answer, s": {phase: curve(phase, "wait_s") for phase in phases},
        "KiB of memory for each peer": memory,
    }
    canvas = Canvas(width=860, height=300, theme=theme, title="A fleet: connections, waits and memory over its size")
    for place, (title, curves) in enumerate(axes.items()):
        _axes(canvas, 20 + place * 282, title, curves, colors)
    return canvas.svg()


def _axes(
    canvas: Canvas, left: float, title: str, curves: Mapping[str, list[tuple[float, float]]], colors: Sequence[str]
) -> None:
    theme, bottom, top, wide = canvas.theme, 200.0, 44.0, 210.0
    most_x = max(x for points in curves.values() for x, _ in points)
    most_y = max(y for points in curves.values() for _, y in points)
    canvas.text(left, 24, title, size=14, bold=True)
    for part in (0.0, 0.5, 1.0):
        y = bottom - (bottom - top) * part
        canvas.line([(left + 40, y), (left + 40 + wide, y)], theme.line, width=1)
        label_y, label_x = f"{round(most_y * part, 1 if most_y > 5 else 2):g}", f"{most_x * part:g}"
        canvas.text(left + 34, y + 4, label_y, size=11, color=theme.faint, anchor="end")
        canvas.text(left + 40 + wide * part, bottom + 17, label_x, size=11, color=theme.faint, anchor="middle")
    for number, ((label, points), color) in enumerate(zip(curves.items(), colors, strict=False)):
        scaled = [(left + 40 + wide * x / most_x, bottom - (bottom - top) * y / most_y) for x, y in points]
        canvas.line(scaled, color, width=2)
        for x, y in scaled:
            canvas.dot(x, y, color)
        canvas.box(left + 40, 232 + 20 * number, 12, 12, color)
        canvas.text(left + 58, 243 + 20 * number, label, size=12)


# --- the dashboard: the first panels of grafana.json, with what Prometheus answered


def dashboard(theme: Theme) -> str:
    panels = json.loads((DATA / "dashboard.json").read_text())
    wide, high = 420, 236
    canvas = Canvas(
        width=20 + 2 * wide, height=20 + high * -(-len(panels) // 2), theme=theme, title="The dashboard, recorded"
    )
    for number, panel in enumerate(panels):
        _panel(canvas, panel, 20.0 + wide * (number % 2), 20.0 + high * (number // 2), wide - 20, high - 20)
    return canvas.svg()


def _panel(canvas: Canvas, panel: Mapping[str, Any], x: float, y: float, wide: float, high: float) -> None:
    theme, series = canvas.theme, panel["series"]
    left, right, top, bottom = x + 72, x + wide - 20, y + 38, y + high - 62
    values = [value for one in series for _, value in one["points"]]
    last_s = max((at for one in series for at, _ in one["points"]), default=1.0)
    most = max(values, default=0.0) or 1.0
    canvas.box(x, y, wide, high, theme.line, hollow=True)
    canvas.text(x + 14, y + 22, panel["title"], bold=True)
    for part in (0.0, 0.5, 1.0):
        at = bottom - (bottom - top) * part
        canvas.line([(left, at), (right, at)], theme.line, width=1)
        canvas.text(left - 8, at + 4, _amount(most * part, panel["unit"]), size=11, color=theme.faint, anchor="end")
        along = left + (right - left) * part
        canvas.text(along, bottom + 16, f"{last_s * part:.0f} s", size=11, color=theme.faint, anchor="middle")
    colors = (theme.a, theme.b, theme.c, theme.bad, theme.text, theme.faint)
    label_x, label_y = x + 14, bottom + 25
    for number, one in enumerate(series):
        color, label_wide = colors[number % len(colors)], 28 + 6.2 * len(one["legend"])
        if label_x + label_wide > x + wide:
            label_x, label_y = x + 14, label_y + 18
        scaled = [
            (left + (right - left) * at / last_s, bottom - (bottom - top) * value / most) for at, value in one["points"]
        ]
        canvas.line(scaled, color, width=2)
        canvas.box(label_x, label_y, 10, 10, color)
        canvas.text(label_x + 14, label_y + 9, one["legend"], size=11)
        label_x += label_wide


def _amount(value: float, unit: str) -> str:
    """Return a value as Grafana writes it in this unit."""
    if unit == "Bps":
        return f"{value / 1e6:.3g} MB/s"
    if unit == "s":
        return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.3g} s"
    return f"{value:.2f} /s" if unit == "ops" else f"{value:,.0f}"


# --- states: a column for each state, a row for each way between two of them


def rings(theme: Theme) -> str:
    """The rings of the package, a band each; imports point down."""
    band, gap, height, left, top = 64, 14, 34, 150, 16
    canvas = Canvas(width=860, height=top + len(RINGS) * band + 16, theme=theme, title="The rings of the package")
    for number, (ring, folders) in enumerate(reversed(RINGS.items())):
        y, color = top + number * band, (theme.c, theme.b, theme.a, theme.text)[number]
        canvas.text(16, y + 23, ring, size=16, color=color, bold=True)
        x: float = left
        for folder in folders:
            width = 22 + 8.2 * len(folder)
            canvas.box(x, y, width, height, color, hollow=True)
            canvas.text(x + width / 2, y + 22, folder, color=theme.text, anchor="middle")
            x += width + gap
        if number + 1 < len(RINGS):
            canvas.arrow(70, y + 34, 70, y + 60, theme.faint)
            canvas.text(82, y + 53, "imports", size=12, color=theme.faint)
    return canvas.svg()


def states(table: Mapping[tuple[Any, Any], Any], name: str, theme: Theme) -> str:
    order = list(dict.fromkeys([*(str(state) for state, _ in table), *(str(state) for state in table.values())]))
    ways: dict[tuple[str, str], list[str]] = {}
    for (state, event), after in table.items():
        ways.setdefault((str(state), str(after)), []).append(str(event))
    column, left, top, row = 118, 70, 62, 34
    height = top + 20 + row * len(ways) + 16
    canvas = Canvas(width=left + column * len(order), height=height, theme=theme, title=f"The states of a {name}")
    final = set(order) - {state for state, _ in ways}

    def x(state: str) -> float:
        return left + column * order.index(state)

    for state in order:
        canvas.line([(x(state), 46), (x(state), height - 14)], theme.line, width=1)
        color = theme.b if state in final else theme.a
        canvas.box(x(state) - 54, 16, 108, 30, color, hollow=state != order[0])
        ink = theme.ground if state == order[0] else color
        canvas.text(x(state), 36, state.replace("_", " "), size=14, color=ink, anchor="middle", bold=True)
    for number, ((state, after), events) in enumerate(ways.items()):
        y = top + 20 + row * number
        canvas.arrow(x(state), y, x(after) - (2 if x(after) > x(state) else -2), y, theme.text)
        canvas.dot(x(state), y, theme.text)
        label = ", ".join(events).replace("_", " ")
        beside = min(x(state), x(after)) + column / 2
        canvas.text(beside, y - 6, label, size=13, color=theme.text, anchor="middle")
    return canvas.svg()


def pictures() -> Iterator[tuple[str, str]]:
    """Name and text of every file in docs/pictures."""
    drawn: dict[str, Callable[[Theme], str]] = {"handover": lanes, "stale": stale, "transfer": transfer, "fleet": fleet}
    drawn |= {"peers": peers, "rings": rings, "dashboard": dashboard}
    for theme in THEMES:
        for name, draw in drawn.items():
            yield f"{name}-{theme.name}.svg", draw(theme)
        for name, table in STATES.items():
            yield f"states-{name}-{theme.name}.svg", states(table, name, theme)


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, text in pictures():
        (PICTURES / name).write_text(text)


if __name__ == "__main__":
    main()
