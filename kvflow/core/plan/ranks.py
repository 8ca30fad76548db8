"""The ranks of a producer's engine that a load concerns: which they are follows from how both engines are cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvflow.checks import counted
from kvflow.core.plan.topology import CacheShare, Parallelism, Rank, differences, of_model, sources_of, stages_max


class RankPlan(NamedTuple):
    """The ranks to reach, by the parallelism of the producer's engine, for one of its replicas."""

    impossible: str
    """The reason why no engine that we could read from is cut like this; "" if one may be."""
    problems: tuple[str, ...]
    """Differences for which one that is cut like this does not go with ours."""
    ranks: tuple[Rank, ...]
    """The ranks that we read from or report to."""


def plan_ranks(ours: Sequence[CacheShare], parallelism: Parallelism, dp_rank: int, ranks_max: int) -> RankPlan:
    """Plan which ranks to reach. They are counted before there is a list of them: a ticket can say a million.

    A ticket says what kinds of layers there are, not which layers: each of ours is looked at beside each of theirs that
    it could be, so that there may be ranks with which we turn out to have nothing to do. A draft's layers are left out
    on both sides: they may be on ours only.
    """
    stages = stages_max(ours)
    if parallelism.pp_size > stages:
        layers = counted(stages, "layer")
        return RankPlan(f"pp_size {parallelism.pp_size}, but the model has {layers}: each stage has one", (), ())
    problems: list[str] = []
    tp_ranks: set[int] = set()
    for mine in of_model(ours):
        theirs = [msgspec.structs.replace(mine, tp_rank=0, pp_rank=0, **kind) for kind in parallelism.kinds]
        unlike = [differences((mine,), (other,)) for other in theirs]
        for other, found in zip(theirs, unlike, strict=True):
            if not found:
                tp_ranks |= {source.tp_rank for source in sources_of(mine, other)}
        if all(unlike):
            problems += unlike[0]
    if problems:
        return RankPlan("", tuple(dict.fromkeys(problems)), ())
    count = parallelism.pp_size * len(tp_ranks)
    if count > ranks_max:
        engine = f"tp_size {parallelism.tp_size}, pp_size {parallelism.pp_size}"
        concerned = f"a load concerns {counted(count, 'rank')} of it"
        return RankPlan(f"{engine}: {concerned}, at most {ranks_max} (limits.load_ranks_max)", (), ())
    ranks = (Rank(dp_rank, pp, tp) for pp in range(parallelism.pp_size) for tp in sorted(tp_ranks))
    return RankPlan("", (), tuple(ranks))
