"""The text of an answer as its tokens come: which part can be shown already, and where a stop string ends it.

A stop string may arrive in pieces, so text that may be the beginning of one is held back until it is clear that it is
not. The division into tokens makes no difference: the answer is cut at the stop string that is complete first when the
text is read character by character.
"""

from __future__ import annotations

from collections.abc import Sequence

from disaggregated.messages import FinishReason, Step
from paged_engine.tokenizer import ChatTokenizer, TextStream


class AnswerText:
    """The text of one answer. Push steps until `finish_reason` is set; the returned pieces together are the text."""

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
        """The text shown so far."""
        return self._stream.text[: self._shown_chars]

    def push(self, step: Step) -> str:
        """Add a step. Return the piece of text that can be shown now, perhaps ""."""
        text, shown_chars = self._stream.push(step.token), self._shown_chars
        cut = stop_start(text, self._stops, shown_chars)
        if cut is not None:
            self.finish_reason, self._shown_chars = "stop", cut
        elif step.finish_reason is not None:
            self.finish_reason, self._shown_chars = step.finish_reason, len(text)
        else:
            self._shown_chars = len(text) - withheld_chars(text, self._stops, shown_chars)
        return text[shown_chars : self._shown_chars]


def stop_start(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Return the start of the stop string that is complete first; None if no stop string begins at `start` or later."""
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def withheld_chars(text: str, stops: Sequence[str], start: int = 0) -> int:
    """Return how many characters at the end of `text[start:]` may be the beginning of a stop string."""
    beginnings = (stop[:count] for stop in stops for count in range(1, len(stop)))
    return max((len(beginning) for beginning in beginnings if text.endswith(beginning, start)), default=0)
