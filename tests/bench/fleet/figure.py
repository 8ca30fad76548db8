"""The curves of `python3 dev.py bench fleet` as an SVG file; needs matplotlib (`pip install --group figures`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from kvflow.bench.loads import SettingsError

_PHASES = ("cold start", "rolling restart", "all decode restart")


def curves(results: Mapping[str, Sequence[Any]]) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return for each axis its curves, as points over the number of ranks."""
    fleet, memory = results["fleet"], results["memory"]
    found: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for axis, name in (("connections to the busiest rank", "connections"), ("longest wait for an answer, s", "wait_s")):
        found[axis] = {
            phase: [(row.ranks, float(getattr(row, name))) for row in fleet if row.phase == phase] for phase in _PHASES
        }
    found["KiB of memory for each peer"] = {
        "connected": [(row.peers, row.connected_bytes / 1024) for row in memory],
        "every length loaded": [(row.peers, row.loaded_bytes / 1024) for row in memory],
    }
    return found


def draw(results: Mapping[str, Sequence[Any]], path: Path) -> None:
    """Write the curves. Raises SettingsError where matplotlib is missing, OSError for a file that cannot be written."""
    if find_spec("matplotlib") is None:
        raise SettingsError("figure: needs matplotlib; install it with: pip install --group figures")
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams.update({"svg.hashsalt": "kvflow", "font.size": 9})  # the same file for the same numbers
    axes_of = curves(results)
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(axes_of)), axes_of.items(), strict=True):
        for label, points in lines.items():
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set(title=title, xlabel="prefill ranks, and as many decode ranks", ylim=(0, None))
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    figure.savefig(path, format="svg", metadata={"Date": None})
