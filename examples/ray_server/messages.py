"""What ingress and decode replicas say to each other; the rest is `disaggregated.messages`.

Failures are values: an exception would arrive wrapped, or not at all.
"""

from __future__ import annotations

import asyncio

from disaggregated.messages import Count, Failure, Message, Seconds, TokenIds
from openai_server.attempts import Prompt
from paged_engine import GREEDY, Sampling


class AnswerRequest(Message, frozen=True, kw_only=True):
    """Answer a prompt: a stream of steps, or `Ended` where it ends without."""

    request_id: str
    prompt: TokenIds
    max_tokens: Count
    deadline_s: Seconds
    sampling: Sampling = GREEDY
    avoid: tuple[str, ...] = ()
    """Replicas that have failed this request."""

    @classmethod
    def of(cls, prompt: Prompt, request_id: str, avoid: set[str]) -> AnswerRequest:
        return cls(
            request_id=request_id,
            prompt=list(prompt.token_ids),
            max_tokens=prompt.max_tokens,
            deadline_s=prompt.remaining_s,
            sampling=prompt.sampling,
            avoid=tuple(sorted(avoid)),
        )

    def as_prompt(self) -> Prompt:
        """The same by this process's clock."""
        return Prompt(
            id=self.request_id,
            token_ids=self.prompt,
            max_tokens=self.max_tokens,
            deadline=asyncio.get_running_loop().time() + self.deadline_s,
            sampling=self.sampling,
        )


class Ended(Message, frozen=True, kw_only=True):
    """An answer came to nothing."""

    failure: Failure
    replica: str = ""
    """The decode replica whose own failure it was: another one may do better. "" if that would not help."""
