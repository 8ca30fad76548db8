"""The faults of each load, drawn by the run's seed and the load's number: both engines draw the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from random import Random

STOCK_WIRE = "stock wire"
"""The home of an engine without kvflow: it speaks vLLM's own wire."""
WAYS = {
    ("plain", "plain"): 40,
    ("plain", "staged"): 8,
    ("staged", "plain"): 8,
    ("staged", "staged"): 4,
    ("windowed", "windowed"): 18,
    ("stock", "stock"): 6,
    (STOCK_WIRE, "stock"): 8,
    ("stock", STOCK_WIRE): 8,
}
"""From which home of the producer to which of the consumer, and how often."""
LONG_TTL_S, SHORT_TTL_S = 10.0, 3.0
TOKENS_MAX = {"stock": 40, STOCK_WIRE: 40}  # blocks of four tokens
_TOKENS_MAX = 120
_SOON_S = 0.01


class End(StrEnum):
    """The early end of a load or its lease. Most loads have none."""

    NONE = "none"
    CANCELLED = "cancelled"
    LATE = "late"
    EXPIRED = "expired"
    REVOKED = "revoked"
    RELEASED = "released"


ENDS = {End.NONE: 76, End.CANCELLED: 8, End.LATE: 4, End.EXPIRED: 4, End.REVOKED: 4, End.RELEASED: 4}
RAISED = {
    End.CANCELLED: {"cancelled", "LeaseExpired"},
    End.LATE: {"DeadlineExceeded", "LeaseExpired"},
    End.EXPIRED: {"LeaseExpired"},
    End.REVOKED: {"LeaseExpired"},
}
"""Errors of a load, by its fault. Leases of loads that end early are short, and expire if the machine stands still."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One load: its prompt, its options, and the faults that happen to it."""

    number: int
    producer: str
    consumer: str
    tokens: int
    cached: float
    """The share of the prompt's blocks that the consumer has already; 1 is a hit."""
    steps: tuple[int, ...]
    """So many tokens are computed when the lease opens, then, ...; none: all are."""
    extends: bool
    payload: bool
    fails: bool
    """Whether its prefill breaks off after the last step but one."""
    rendezvous: bool
    declined: bool
    prompt: str
    """Which token ids the load gives: "", "right" or "wrong" ones."""
    verify: bool
    follow: bool
    """Whether the load's progress is followed, and compared with the bytes."""
    end: End
    soon_s: float
    """When that happens; of a load that is late, its time."""
    ttl_s: float
    ready_s: float | None
    after_s: float | None
    priority: int
    keep: bool
    """Whether `keep_leases` holds the offer while the load waits."""
    store: bool
    release: bool
    """Whether a failed load's offer is given back; else its lease runs out."""

    @property
    def name(self) -> str:
        return f"r{self.number}"

    @property
    def hit(self) -> bool:
        return self.cached == 1.0

    @property
    def features(self) -> list[str]:
        """Their names, as they are counted."""
        flags = {
            "growing": bool(self.steps),
            "extended": self.extends,
            "payload": self.payload,
            "prefill broke": self.fails,
            "rendezvous": self.rendezvous,
            "declined": self.declined,
            "prompt given": self.prompt == "right",
            "wrong prompt": self.prompt == "wrong",
            "verified": self.verify,
            "followed": self.follow,
            "ready event": self.ready_s is not None,
            "after event": self.after_s is not None,
            "kept waiting": self.keep,
            "stored and restored": self.store,
            "full hit": self.hit,
            "cached prefix": 0.0 < self.cached < 1.0,
            f"{self.producer} -> {self.consumer}": True,
            str(self.end): self.end is not End.NONE,
        }
        return [name for name, drawn in flags.items() if drawn]

    @property
    def outcomes(self) -> set[str]:
        """How it may end while nothing else befalls the engines."""
        if self.end is End.RELEASED:
            return {"released"}
        certain = {"PromptMismatch"} if self.prompt == "wrong" else set()
        if self.declined:
            certain |= {"PrefillFailed"}
        if self.fails:
            certain |= {"PrefillFailed", "LeaseExpired"}  # that, of who comes when it has long broken off
        if self.hit or not certain:
            certain |= {"loaded"}
        if self.store:
            certain |= {"NotStored"}  # evicted meanwhile
        return certain | RAISED.get(self.end, set())


def draw(seed: int, number: int) -> Plan:
    """The plan of a load."""
    random = Random(f"{seed} {number}")

    def chance(share: float) -> bool:
        return random.random() < share

    producer, consumer = random.choices(list(WAYS), list(WAYS.values()))[0]
    ours, stock = STOCK_WIRE not in (producer, consumer), "stock" in (producer, consumer)
    tokens = random.randint(1, TOKENS_MAX.get(producer, _TOKENS_MAX))
    growing = not stock and chance(0.3)
    steps = _steps(random, tokens) if growing else ()
    rendezvous = not stock and chance(0.15)
    end = random.choices(list(ENDS), list(ENDS.values()))[0]
    if consumer == STOCK_WIRE or (rendezvous and end is End.RELEASED):
        end = End.NONE  # who reads by that wire reads to the end
    prompt = random.choices(("", "right", "wrong"), (50, 46, 4))[0] if ours else ""
    cached = random.choices((0.0, random.random() * 0.99, 1.0), (60, 30, 10))[0]
    verify = ours and chance(0.15)
    return Plan(
        number=number,
        producer=producer,
        consumer=consumer,
        tokens=tokens,
        cached=0.0 if rendezvous and cached == 1.0 else cached,
        steps=steps,
        extends=growing and chance(0.5),
        payload=growing and chance(0.5),
        fails=growing and chance(0.1),
        rendezvous=rendezvous,
        declined=rendezvous and chance(0.1),
        prompt=prompt,
        verify=verify,
        follow=growing and not verify and chance(0.5),
        end=end,
        soon_s=random.random() * _SOON_S,
        ttl_s=LONG_TTL_S if end is End.NONE else SHORT_TTL_S,
        ready_s=random.random() * _SOON_S if ours and not stock and chance(0.1) else None,
        after_s=random.random() * _SOON_S if consumer != STOCK_WIRE and chance(0.1) else None,
        priority=random.randint(-2, 2),
        keep=consumer != STOCK_WIRE and not rendezvous and chance(0.1),
        store=consumer == "plain" and chance(0.1),
        release=end is End.NONE or consumer == "stock" or chance(0.5),
    )


def _steps(random: Random, tokens: int) -> tuple[int, ...]:
    """Return the numbers of tokens after each step of the computation, except the last step."""
    return tuple(sorted(random.randint(0, tokens - 1) for _ in range(random.randint(1, 4))))


def tables_upto(tables: Sequence[Sequence[int]], sizes: Sequence[int], tokens: int, num_tokens: int) -> list[list[int]]:
    """Return the blocks of each group that hold tokens before token `tokens`. The tables end with the prompt."""
    found = []
    for ids, size in zip(tables, sizes, strict=True):
        first = -(-num_tokens // size) - len(ids)
        found.append(list(ids[: max(-(-tokens // size) - first, 0)]))
    return found


def prompt_of(plan: Plan, which: str) -> list[int] | None:
    """Token ids; wrong ones differ in the last."""
    if not which:
        return None
    ids = [(plan.number * 31 + index) % 50_000 for index in range(plan.tokens)]
    return ids if which == "right" else [*ids[:-1], ids[-1] + 1]
