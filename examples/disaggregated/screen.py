"""The output of the examples: a header, the conversation as it grows, a table of kvflow's numbers, a verdict.

The screen only prints, and computes nothing but rates and shares. Without a terminal it prints the final state as plain
text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.box import ROUNDED
from rich.console import Console
from rich.live import Live
from rich.panel import Panel
from rich.status import Status
from rich.table import Table
from rich.text import Text

from disaggregated.messages import Loaded

PREFILL_STYLE = "bold magenta"
DECODE_STYLE = "cyan"
BAR_WIDTH = 24
HEADS_WIDTH = 60


class Screen:
    """The terminal; everything that an example shows goes through it."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._errors = Console(highlight=False, stderr=True)
        self._model = ""

    def header(self, title: str, *, model: str, prefill: str, decode: Sequence[str], transport: str) -> None:
        self._model = model
        text = Text.assemble(
            (f"{model}, float32, greedy", "bold"),
            "\n",
            (prefill, PREFILL_STYLE),
            f"  ── KV cache, NIXL over {transport} ──▶  ",
            (", ".join(decode), DECODE_STYLE),
        )
        self._console.print(Panel(text, title=f"kvflow · {title}", box=ROUNDED))

    def busy(self, what: str) -> Status:
        """Return a context manager that shows a spinner with this text."""
        return self._console.status(what)

    def prompt(self, text: str) -> None:
        self._console.print(Panel(Text(text), title="you", title_align="left", box=ROUNDED))

    @contextmanager
    def answer(self, prefill: str, decode: str) -> Iterator[Answer]:
        """Yield the panel in which the answer of two engines grows."""
        try:
            with Live(console=self._console, auto_refresh=False) as live:
                yield Answer(live, self._model, prefill, decode)
        finally:
            if not self._console.is_terminal:
                # Without a terminal the panel is printed once, at the end, and without a line break.
                self._console.line()

    def hand_over(self, first: Loaded, second: Loaded, *, prompt_count: int, outcome: str) -> None:
        """Show kvflow's reports of two loads side by side. The first load had to connect the engines."""
        table = Table(title="hand-over", box=ROUNDED, title_style="bold")
        for name in ("", "first load", "second load"):
            table.add_column(name, justify="right" if name else "left", style="" if name else "bold")
        table.add_column("", style=DECODE_STYLE, width=BAR_WIDTH)
        loads = (first, second)
        table.add_row("prompt tokens", *(f"{prompt_count:,}" for _ in loads))
        table.add_row("blocks", *(f"{load.blocks:,}" for load in loads))
        table.add_row("bytes", *(f"{load.size:,}" for load in loads))
        if first.blocks_left:
            table.add_row("not moved: blocks", *(f"{load.blocks_left:,}" for load in loads), "before the windows")
            table.add_row("not moved: bytes", *(f"{load.size_left:,}" for load in loads))
        table.add_row("descriptors", *(f"{load.descriptors:,}" for load in loads))
        table.add_row("lease", outcome, outcome, end_section=True)
        for phase in first.seconds:
            times = [_milliseconds(load.seconds[phase]) for load in loads]
            table.add_row(phase, *times, _bar(second.seconds[phase], second.total_s))
        table.add_row("total", *(_milliseconds(load.total_s) for load in loads), end_section=True)
        table.add_row("post + wire", *map(_wire_rate, loads))
        table.add_row("all phases", *(_rate(load.size, load.total_s) for load in loads))
        table.caption = "the first load connects the engines; bars are the second's"
        self._console.print(table)

    def heads(self, engines: Mapping[str, int], *, kv_heads: int, padded: int) -> None:
        """Show which rank holds which KV heads. `engines` has each engine's rank count, the prefill engine first."""
        head_width = HEADS_WIDTH // padded
        names = [str(head) if head < kv_heads else "pad" for head in range(padded)]
        grid = Table.grid(padding=(0, 2))
        grid.add_row("KV head", "".join(name.center(head_width) for name in names), style="bold")
        for index, (engine_id, tp_size) in enumerate(engines.items()):
            width = padded // tp_size * head_width
            bars = ["├" + f" rank {rank} ".center(width - 2, "─") + "┤" for rank in range(tp_size)]
            grid.add_row(engine_id, "".join(bars), style=DECODE_STYLE if index else PREFILL_STYLE)
        self._console.print(Panel(grid, title="who holds what", title_align="left", box=ROUNDED))

    def ranks(self, prefill: str, decode: str, loaded: Sequence[Loaded], *, same: bool) -> None:
        """Show kvflow's report of the load of each decode rank."""
        table = Table(title=f"{prefill} ──▶ {decode}", box=ROUNDED, title_style="bold")
        table.caption = "each rank's first load; GB/s over post and wire"
        table.add_column("rank", style=DECODE_STYLE)
        table.add_column("read from", style=PREFILL_STYLE)
        for name in ("blocks", "bytes", "descriptors", "GB/s"):
            table.add_column(name, justify="right")
        table.add_column("text")
        for rank, load in enumerate(loaded):
            table.add_row(
                str(rank),
                "\n".join(_rank_name(prefill, source) for source in load.sources),
                f"{load.blocks:,}",
                f"{load.size:,}",
                f"{load.descriptors:,}",
                _wire_rate(load).removesuffix(" GB/s"),
                Text("✓ equal", style="green") if same else Text("✗ differs", style="bold red"),
            )
        self._console.print(table)

    def verdict(self, *, same: bool, token_count: int, alone: str, reference: str) -> None:
        """Show whether the texts are equal. `reference` is the answer of `alone`, without a hand-over."""
        if same:
            text = f"✓ same text: {token_count} tokens equal to {alone}'s own, without hand-over"
            self._console.print(Text(text, style="bold green"))
            return
        self._console.print(Text(f"✗ different text: without hand-over {alone} says", style="bold red"))
        self._console.print(Panel(Text(reference), box=ROUNDED, border_style="red"))

    def stale(self, bob: str, alice: str, block_ids: Sequence[int], lease_s: float) -> None:
        """Show what `stale.py` is going to do."""
        blocks = ", ".join(map(str, block_ids))
        lines = [
            ("Bob    ", PREFILL_STYLE, bob),
            ("Alice  ", DECODE_STYLE, alice),
            ("1  ", "bold", f"Bob's prompt is computed in blocks {blocks}; they are kept for {lease_s:g} s"),
            ("2  ", "bold", "his request waits longer: a queue, a frozen host, a slow router"),
            ("3  ", "bold", f"Alice's prompt is computed in blocks {blocks}"),
            ("4  ", "bold", f"the decode engine reads blocks {blocks} over NIXL, to answer Bob"),
        ]
        text = Text("\n").join(Text.assemble((mark, style), said) for mark, style, said in lines)
        self._console.print(Panel(text, title="kvflow · a hand-over that comes too late", box=ROUNDED))

    def stale_answers(self, answers: Mapping[tuple[str, str], tuple[str, str, bool]]) -> None:
        """Show Bob's answers: by way and moment, how the read ended, the text, and whether the text is right."""
        table = Table(title="what Bob is told", box=ROUNDED, title_style="bold", show_lines=True)
        for name in ("hand-over", "reader", "the read", "answer"):
            table.add_column(name)
        for (way, moment), (read, text, right) in answers.items():
            style = "green" if right else "bold red"
            table.add_row(way, moment, read, Text(f"{'✓' if right else '✗'} {text}", style=style))
        self._console.print(table)

    def error(self, message: str) -> None:
        self._errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


class Answer:
    """The panel with the answer, in two colours: the prefill engine's first token, then the decode engine's tokens."""

    def __init__(self, live: Live, model: str, prefill: str, decode: str) -> None:
        self._live = live
        self._model = model.partition("-")[0]
        self._legend = Text.assemble((prefill, PREFILL_STYLE), " ", (decode, DECODE_STYLE))
        self._first: str | None = None

    def show(self, text: str) -> None:
        """Show `text`, which is the whole answer so far."""
        if self._first is None:
            self._first = text
        body = Text.assemble((self._first, PREFILL_STYLE), (text.removeprefix(self._first), DECODE_STYLE))
        panel = Panel(
            body, title=self._model, title_align="left", subtitle=self._legend, subtitle_align="right", box=ROUNDED
        )
        self._live.update(panel, refresh=True)


def _wire_rate(loaded: Loaded) -> str:
    """Return the rate over the phases post and wire. Both count, because over shared memory NIXL copies in post."""
    return _rate(loaded.size, loaded.seconds["post"] + loaded.seconds["wire"])


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _bar(part: float, whole: float) -> str:
    return "█" * round(BAR_WIDTH * part / whole) if whole else ""


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.3f} GB/s" if seconds else "-"


def _rank_name(engine_id: str, source: str) -> str:
    """Shorten kvflow's name of a source, which has the rank and its address, to engine id and TP rank."""
    place = re.search(r"\btp (\d+)\)", source)
    return f"{engine_id}/{place[1]}" if place else source
