"""What the user sees: a header, the conversation as it grows, a table of kvflow's numbers, a verdict.

It prints what it is given and computes nothing but rates and shares. Without a terminal the same comes out
as plain text, once.
"""

from __future__ import annotations

from collections.abc import Iterator
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


class Screen:
    """Owns the terminal."""

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        self._errors = Console(highlight=False, stderr=True)

    def header(self, *, model: str, transport: str) -> None:
        text = Text.assemble(
            (f"{model}, float32, greedy", "bold"),
            "\n",
            ("prefill-0", PREFILL_STYLE),
            f"  ── KV cache, NIXL over {transport} ──▶  ",
            ("decode-0", DECODE_STYLE),
        )
        self._console.print(Panel(text, title="kvflow · disaggregated chat", box=ROUNDED))

    def busy(self, what: str) -> Status:
        """A spinner for as long as the `with`."""
        return self._console.status(what)

    def prompt(self, text: str) -> None:
        self._console.print(Panel(Text(text), title="you", title_align="left", box=ROUNDED))

    @contextmanager
    def answer(self) -> Iterator[Answer]:
        """The panel in which the answer grows."""
        try:
            with Live(console=self._console, auto_refresh=False) as live:
                yield Answer(live)
        finally:
            if not self._console.is_terminal:
                # Then the panel was printed once, at the end, and without a line break.
                self._console.line()

    def hand_over(self, loaded: Loaded, *, prompt_count: int, outcome: str) -> None:
        """kvflow's report of the load, as it is."""
        table = Table(title="hand-over", box=ROUNDED, title_style="bold", show_header=False)
        table.caption = "one load, the first between these engines"
        table.add_column(style="bold")
        table.add_column(justify="right")
        table.add_column(style=DECODE_STYLE, width=BAR_WIDTH)
        table.add_row("prompt tokens", f"{prompt_count:,}")
        table.add_row("blocks", f"{loaded.blocks:,}")
        table.add_row("bytes", f"{loaded.size:,}")
        table.add_row("descriptors", f"{loaded.descriptors:,}")
        table.add_row("lease", outcome, end_section=True)
        for phase, seconds in loaded.seconds.items():
            table.add_row(phase, _milliseconds(seconds), _bar(seconds, loaded.total_s))
        table.add_row("total", _milliseconds(loaded.total_s), end_section=True)
        # Over shared memory NIXL copies while it posts, so the two phases count together.
        table.add_row("post + wire", _rate(loaded.size, loaded.seconds["post"] + loaded.seconds["wire"]))
        table.add_row("all phases", _rate(loaded.size, loaded.total_s))
        self._console.print(table)

    def verdict(self, *, same: bool, token_count: int, reference: str) -> None:
        if same:
            text = f"✓ same text: {token_count} tokens equal to decode-0's own, without hand-over"
            self._console.print(Text(text, style="bold green"))
            return
        self._console.print(Text("✗ different text: without hand-over decode-0 says", style="bold red"))
        self._console.print(Panel(Text(reference), box=ROUNDED, border_style="red"))

    def error(self, message: str) -> None:
        self._errors.print(Text.assemble(("error: ", "bold red"), message), soft_wrap=True)


class Answer:
    """The assistant's text; the first token comes from the prefill engine, the others from the decode engine."""

    def __init__(self, live: Live) -> None:
        self._live = live
        self._first: str | None = None

    def show(self, text: str) -> None:
        """Show the text so far."""
        if self._first is None:
            self._first = text
        body = Text.assemble((self._first, PREFILL_STYLE), (text.removeprefix(self._first), DECODE_STYLE))
        legend = Text.assemble(("prefill-0", PREFILL_STYLE), " ", ("decode-0", DECODE_STYLE))
        panel = Panel(body, title="SmolLM2", title_align="left", subtitle=legend, subtitle_align="right", box=ROUNDED)
        self._live.update(panel, refresh=True)


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f} ms"


def _bar(part: float, whole: float) -> str:
    return "█" * round(BAR_WIDTH * part / whole) if whole else ""


def _rate(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.3f} GB/s" if seconds else "-"
