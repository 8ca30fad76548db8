"""Tables of docs/figures.md: what was measured of kvflow beside other libraries, from the JSON files in docs/data.

`peers.json` is what `dev.py peers --json` writes, `goodput.json` what `tests/vllm/goodput.py --json` writes.
docs/site/tables.py puts the tables into the page. Each function returns a header and rows.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data"

NAMES = {
    "raw_tuned": "raw NIXL, tuned",
    "bare_hop": "raw NIXL behind a thread",
    "kvflow": "**kvflow**",
    "lmcache": "LMCache's NIXL channel",
    "nixl_connect": "Dynamo's nixl_connect",
    "ray_rdt": "Ray's direct transport",
    "torch_transport": "torch.distributed._transport",
    "mooncake_read": "Mooncake's engine, reads",
    "mooncake_write": "Mooncake's engine, writes",
}
KVFLOW, BASELINES = "kvflow", ("raw_tuned", "bare_hop")

Made = tuple[Sequence[str], Iterator[Sequence[str]]]


def peers() -> dict[str, Any]:
    """Return every number of `peers.json`."""
    found: dict[str, Any] = json.loads((DATA / "peers.json").read_text("utf-8"))
    return found


def goodput() -> dict[str, Any]:
    """Return every number of `goodput.json`."""
    found: dict[str, Any] = json.loads((DATA / "goodput.json").read_text("utf-8"))
    return found


def behind() -> Made:
    """Where a library is faster than kvflow, the largest difference first."""
    speeds = [row for row in peers()["speed"] if row["contender"] not in (KVFLOW, *BASELINES)]
    kvflow_s = {(row["transport"], row["size"]): row["median_s"] for row in peers()["speed"] if _is_kvflow(row)}
    slower = [
        (kvflow_s[row["transport"], row["size"]] / row["median_s"], f"{row['size']}, {row['transport']}", row)
        for row in speeds
    ]
    colds = {(row["transport"], row["blocks"]): row for row in peers().get("cold", ()) if _is_kvflow(row)}
    found = [(ratio, what, row["contender"], row["median_s"]) for ratio, what, row in slower]
    for row in peers().get("cold", ()):
        ours = colds.get((row["transport"], row["blocks"]))
        if ours and row["contender"] not in (KVFLOW, *BASELINES):
            what = f"first load, {row['blocks']:,} blocks, {row['transport']}"
            found.append((ours["cold_s"] / row["cold_s"], what, row["contender"], row["cold_s"]))
    rows = (
        (what, NAMES[contender], _ms(its_s), _ms(its_s * ratio), f"{ratio:.1f}")
        for ratio, what, contender, its_s in sorted(found, key=lambda entry: -entry[0])
        if ratio > 1
    )
    return ("", "", "it takes, ms", "kvflow takes, ms", "ratio"), rows


def speed() -> Made:
    """Median and 90th percentile of each load, by contender and size."""
    rows = peers()["speed"]
    sizes = list(dict.fromkeys((row["transport"], row["size"]) for row in rows))
    found = {(row["contender"], row["transport"], row["size"]): row for row in rows}

    def cells(contender: str) -> Iterator[str]:
        yield NAMES[contender]
        for transport, size in sizes:
            row = found.get((contender, transport, size))
            yield "-" if row is None else f"{_ms(row['median_s'])} ({_ms(row['p90_s'])})"

    header = ["ms: median (p90)", *(f"{size}, {transport}" for transport, size in sizes)]
    return header, (tuple(cells(contender)) for contender in _contenders(rows))


def cost() -> Made:
    """CPU of both processes, and how late the reader's loop was, at the largest loads."""
    rows = peers()["speed"]
    largest = max(row["size_bytes"] for row in rows)
    loads = list(dict.fromkeys((row["transport"], row["size"]) for row in rows if row["size_bytes"] == largest))
    found = {(row["contender"], row["transport"], row["size"]): row for row in rows}
    lags = {(row["contender"], row["transport"], row["size"]): row for row in peers()["loop_lag"]}

    def cells(contender: str) -> Iterator[str]:
        yield NAMES[contender]
        for load in loads:
            row, lag = found.get((contender, *load)), lags.get((contender, *load))
            if row is None:
                yield "-"
            else:
                late = "the loop is blocked" if lag is None else f"{_ms(lag['lag_p99_s'])} / {_ms(lag['lag_max_s'])}"
                yield f"{row['cpu_s_per_gb']:.2f}; {late}"

    header = ["CPU-seconds a GB; loop late, ms: p99 / max", *(f"{size}, {transport}" for transport, size in loads)]
    return header, (tuple(cells(contender)) for contender in _contenders([*found.values()]))


def idle() -> Made:
    """CPU of two connected processes without a load, and what both gain in many loads of one block."""
    growths = {(row["transport"], row["contender"]): row for row in peers().get("memory", [])}
    loads = next((row["loads"] for row in growths.values()), 0)

    def cells(row: dict[str, Any]) -> Iterator[str]:
        yield NAMES[row["contender"]]
        yield f"{row['reader_percent']:.1f} / {row['producer_percent']:.1f}"
        growth = growths.get((row["transport"], row["contender"]))
        yield "-" if growth is None else f"{growth['reader_kb']:.0f} / {growth['producer_kb']:.0f}"
        yield "-" if growth is None else f"{growth['reader_files']} / {growth['producer_files']}"

    after = f"after {loads} loads: reader / producer"
    header = ("", "idle, % of a core: reader / producer", f"KB {after}", f"open files {after}")
    return header, (tuple(cells(row)) for row in peers().get("idle", []))


def cold() -> Made:
    """The first load of two processes, and later loads of as many blocks."""
    rows = peers().get("cold", [])
    counts = list(dict.fromkeys((row["transport"], row["blocks"]) for row in rows))
    found = {(row["contender"], row["transport"], row["blocks"]): row for row in rows}

    def cells(contender: str) -> Iterator[str]:
        yield NAMES[contender]
        for key in counts:
            row = found.get((contender, *key))
            yield "-" if row is None else f"{_ms(row['cold_s'])} / {_ms(row['warm_s'])}"

    header = ["ms: first / later", *(f"{blocks:,} blocks, {transport}" for transport, blocks in counts)]
    return header, (tuple(cells(contender)) for contender in _contenders(rows))


def cancel() -> Made:
    """What a cancelled load promises, and what lands after the promise."""
    header = ("", "over", "the coroutine has ended, ms", "its memory is said to be safe, ms", "MB that land after")
    rows = (
        (
            NAMES[row["contender"]],
            row["transport"],
            f"{_ms(row['ended_s'])} (at most {_ms(row['ended_max_s'])})",
            "never" if row["safe_s"] is None else _ms(row["safe_s"]),
            f"{row['landed_mb']:.0f}",
        )
        for row in peers().get("cancel", [])
    )
    return header, rows


def faults() -> Made:
    """What becomes of a load whose producer is killed, or stopped."""
    rows = peers().get("faults", [])
    kinds = list(dict.fromkeys((row["fault"], row["transport"]) for row in rows))

    def cells(contender: str) -> Iterator[str]:
        yield NAMES[contender]
        for fault, transport in kinds:
            same = [
                row
                for row in rows
                if (row["contender"], row["fault"], row["transport"]) == (contender, fault, transport)
            ]
            yield "; ".join(dict.fromkeys(map(_fault, same))) or "-"

    header = ["", *(f"producer {fault}, {transport}" for fault, transport in kinds)]
    return header, (tuple(cells(contender)) for contender in _contenders(rows))


def left_out() -> Made:
    """What could not be measured here, and why."""
    rows = [(NAMES[row["contender"]], row["what"], row["why"]) for row in peers().get("left out", [])]
    return ("", "what", "why"), rows or [("-", "nothing: every library ran wherever it can", "-")]


def goodput_rates() -> Made:
    """Goodput over the rate of arrivals, and the two runs with two prefill engines."""
    header = ("run", "", "good / offered, a second", "lost", "wrong", "late", "TTFT p50 / p99, ms", "ms per token")
    rows = (
        (
            row["run"],
            row["contender"],
            f"{row['good_per_s']:.2f} / {row['offered_per_s']:.2f}",
            *(str(row[key]) for key in ("lost", "wrong", "late")),
            f"{row['ttft_p50_ms']:.0f} / {row['ttft_p99_ms']:.0f}",
            f"{row['tpot_p50_ms']:.0f}",
        )
        for row in goodput()["rows"]
    )
    return header, rows


FIGURES: dict[str, Callable[[], Made]] = {
    "figures_behind": behind,
    "figures_speed": speed,
    "figures_cost": cost,
    "figures_idle": idle,
    "figures_cold": cold,
    "figures_cancel": cancel,
    "figures_faults": faults,
    "figures_left_out": left_out,
    "figures_goodput": goodput_rates,
}


def _contenders(rows: Sequence[dict[str, Any]]) -> list[str]:
    measured = {row["contender"] for row in rows}
    return [name for name in NAMES if name in measured]


def _is_kvflow(row: dict[str, Any]) -> bool:
    return bool(row["contender"] == KVFLOW)


def _of(numbers: dict[str, Any], table: str, transport: str) -> list[dict[str, Any]]:
    return [row for row in numbers.get(table, []) if row["transport"] == transport]


def _fault(row: dict[str, Any]) -> str:
    if row["ended_s"] is not None:
        return f"{row['outcome']} after {_ms(row['ended_s'])} ms"
    cancelled_s = row["cancelled_s"]
    return row["outcome"] + ("" if cancelled_s is None else f"; a cancel ends it after {_ms(cancelled_s)} ms")


def _ms(seconds: float) -> str:
    milliseconds = 1e3 * seconds
    return (
        f"{milliseconds:.2f}"
        if milliseconds < 1
        else f"{milliseconds:.1f}"
        if milliseconds < 100
        else f"{milliseconds:,.0f}"
    )
