"""The text of an answer as its tokens come: what may be shown already, and where it ends.

A stop string may come in pieces, so whatever may be the beginning of one is held back until it is clear that it is
none. Which tokens a text comes in makes no difference: the answer is cut where a reader that takes it letter by letter
would have seen the first whole stop string.
"""

from __future__ import annotations

from collections.abc import Sequence

from disaggregated.messages import FinishReason, Step
from paged_engine.tokenizer import ChatTokenizer, TextStream


class AnswerText:
    """One answer. Push steps until it has a reason to end; the pieces together are the text."""

    def __init__(self, tokenizer: ChatTokenizer, stops: Sequence[str] = ()) -> None:
        self._stream = TextStream(tokenizer)
        self._stops = stops
        self._shown_chars = 0
        self.finish_reason: FinishReason | None = None

    @property
    def token_count(self) -> int:
        return len(self._stream.token_ids)

    @property
    def text(self) -> str:
        """What has been shown."""
        return self._stream.text[: self._shown_chars]

    def push(self, step: Step) -> str:
        """Add a step; what can be shown now that could not before."""
        text, shown_chars = self._stream.push(step.token), self._shown_chars
        cut = cut_of(text, self._stops, shown_chars)
        if cut is not None:
            self.finish_reason, self._shown_chars = "stop", cut
        elif step.finish_reason is not None:
            self.finish_reason, self._shown_chars = step.finish_reason, len(text)
        else:
            self._shown_chars = len(text) - held_chars(text, self._stops, shown_chars)
        return text[shown_chars : self._shown_chars]


def cut_of(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the stop string begins that is the first to be complete; None if there is none from `start` on."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def held_chars(text: str, stops: Sequence[str], start: int = 0) -> int:
    """How many characters at the end of a text, not before `start`, may be the beginning of a stop string."""
    return max((_held_by(text, stop, max(start, len(text) - len(stop) + 1)) for stop in stops), default=0)


def _held_by(text: str, stop: str, start: int) -> int:
    """How many characters at the end, not before `start`, may be the beginning of this one."""
    while (start := text.find(stop[0], start)) >= 0:
        if stop.startswith(text[start:]):
            return len(text) - start
        start += 1
    return 0
