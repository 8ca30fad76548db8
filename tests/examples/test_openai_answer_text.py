"""Stop strings: an answer ends before the first one, whatever tokens it comes in, and no beginning of one is shown."""

from __future__ import annotations

from collections.abc import Sequence

from disaggregated.messages import Step
from hypothesis import example, given
from hypothesis import strategies as st
from openai_server.answer_text import AnswerText

TEXTS = st.text("abc", max_size=30)
STOPS = st.lists(st.text("abc", min_size=1, max_size=4), max_size=4)


class Pieces:
    """A tokenizer. Its tokens are the pieces of one text."""

    def __init__(self, pieces: Sequence[str]) -> None:
        self._pieces = pieces

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(self._pieces[token_id] for token_id in token_ids)


def read_by_letters(text: str, stops: Sequence[str]) -> tuple[str, str]:
    """Return an answer and the reason of its end, by the plain rule: letter by letter."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], "stop"
    return text, "length"


def shown(pieces: Sequence[str], stops: Sequence[str]) -> tuple[AnswerText, list[str]]:
    answer = AnswerText(Pieces(pieces), stops)  # type: ignore[arg-type]
    parts = []
    for token in range(len(pieces)):
        parts.append(answer.push(Step(token=token, finish_reason="length" if token == len(pieces) - 1 else None)))
        if answer.finish_reason is not None:
            break
    return answer, parts


@given(pieces=st.lists(TEXTS, min_size=1, max_size=8), stops=STOPS)
@example(["Hel", "lo", "END", "more"], ["END"])
@example(["a E", "N", "D b"], ["END"])
@example(["a E", "N", "T b"], ["END"])
@example(["one END two"], ["END", "e"])
@example(["see the", " end"], ["end", "the end"])
def test_an_answer_is_what_a_reader_by_letters_makes_of_it(pieces: list[str], stops: list[str]) -> None:
    answer, parts = shown(pieces, stops)
    text, reason = read_by_letters("".join(pieces), stops)
    assert ("".join(parts), answer.text, answer.finish_reason) == (text, text, reason)


@given(pieces=st.lists(TEXTS, min_size=1, max_size=8), stops=STOPS)
@example(["a E", "N", "T b"], ["END"])
def test_nothing_is_held_back_that_cannot_become_a_stop_string(pieces: list[str], stops: list[str]) -> None:
    _, parts = shown(pieces, stops)
    for count in range(1, len(parts)):
        text = "".join(pieces[:count])
        held = len(text) - len("".join(parts[:count]))
        assert held == 0 or any(stop.startswith(text[-held:]) for stop in stops)
