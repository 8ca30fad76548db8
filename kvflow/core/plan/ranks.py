"""Choice of the ranks of a producer's engine that a load has to reach, from the parallelism of both engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from kvflow.checks import counted
from kvflow.core.plan.topology import CacheShare, Parallelism, Rank, differences, model_shares, sources_of, stages_max


class RankPlan(NamedTuple):
    """Result of `plan_ranks`: the producer's ranks that a load has to reach, or why no load is possible.

    Two of the three fields, or all three, are empty.
    """

    impossible: str
    """Message if the producer's engine has too many pipeline stages, or too many ranks have to be reached; else ""."""
    problems: tuple[str, ...]
    """Differences that make the two engines incompatible, each as "field: ours X, theirs Y"."""
    ranks: tuple[Rank, ...]
    """The producer's ranks that the local rank reads from or reports to."""


def plan_ranks(local: Sequence[CacheShare], parallelism: Parallelism, dp_rank: int, ranks_max: int) -> RankPlan:
    """Return which ranks of replica `dp_rank` of a producer's engine a load has to reach.

    `local`: cache shares of the local rank. `parallelism`: that of the producer's engine, by a ticket. A load that has
    to reach more than `ranks_max` ranks is `impossible`; ranks are counted before they are listed, because a forged
    ticket can claim a million ranks. A ticket states block size and numbers of heads of each kind of layers
    (`Parallelism.kinds`), but not the layers. So each local cache share is planned against every compatible kind, and
    some of the returned ranks may have nothing to read. Layers of a draft model are left out, because the producer may
    lack them.
    """
    stages = stages_max(local)
    if parallelism.pp_size > stages:
        layers = counted(stages, "layer")
        return RankPlan(f"pp_size {parallelism.pp_size}, but the model has {layers}: each stage has one", (), ())
    problems: list[str] = []
    tp_ranks: set[int] = set()
    for mine in model_shares(local):
        candidates = [msgspec.structs.replace(mine, tp_rank=0, pp_rank=0, **kind) for kind in parallelism.kinds]
        unlike = [differences((mine,), (other,)) for other in candidates]
        for other, problem in zip(candidates, unlike, strict=True):
            if not problem:
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
