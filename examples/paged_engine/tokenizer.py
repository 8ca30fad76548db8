"""Text to token ids and back, with the model's chat template, and text of a stream without broken characters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from paged_engine.weights import TEMPLATE_NAME, TOKENIZER_NAME, require_modules

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class ChatTokenizer:
    """The tokenizer that `write_checkpoint` wrote to `directory`, next to the weights."""

    def __init__(self, directory: Path) -> None:
        require_modules("tokenizers", "jinja2")
        from jinja2.sandbox import ImmutableSandboxedEnvironment
        from tokenizers import Tokenizer

        self._tokenizer = Tokenizer.from_file(str(directory / TOKENIZER_NAME))
        self.longest_token = max(map(len, self._tokenizer.get_vocab()))
        """Upper bound of the characters of a text that one token stands for."""
        self.token_count = int(self._tokenizer.get_vocab_size())
        """Size of the vocabulary; every token id is below it."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._template = environment.from_string((directory / TEMPLATE_NAME).read_text())

    def encode_chat(self, prompt: str) -> list[int]:
        """Return the tokens of one user message in the chat template, up to where the answer begins."""
        return self.encode_text(self.render([{"role": "user", "content": prompt}]))

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return a conversation in the chat template, up to where the next answer begins.

        Each message has "role" and "content".
        """
        return self._template.render(messages=[dict(message) for message in messages], add_generation_prompt=True)

    def encode_text(self, text: str) -> list[int]:
        """Return the tokens of a text without the chat template. Other Python threads can run meanwhile."""
        # Encoding one text holds the GIL until it is done; encoding a batch releases it.
        (encoded,) = self._tokenizer.encode_batch([text], add_special_tokens=False)
        token_ids: list[int] = encoded.ids
        return token_ids

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))


class TextStream:
    """Text that grows token by token. A character appears once all its bytes are there."""

    def __init__(self, tokenizer: ChatTokenizer, token_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self.token_ids = list(token_ids)

    @property
    def text(self) -> str:
        return self._tokenizer.decode(self.token_ids).rstrip(REPLACEMENT)

    def push(self, token_id: int) -> str:
        """Add a token, and return the whole text so far."""
        self.token_ids.append(token_id)
        return self.text
