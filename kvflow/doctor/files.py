"""The limit of open files: what kvflow needs of it, roughly. Pure.

Counted with NIXL 1.5.1 (UCX 1.23) and ZeroMQ 4.3.5: a runtime by itself has some 40; a peer that is read from costs 1
over shared memory and 2 over tcp, and so does a reader; a question on the side channel has 4 while it is asked.
"""

from __future__ import annotations

from kvflow.config import Config
from kvflow.doctor.findings import Finding, fail, ok, warn

RUNTIME_FILES = 64
"""A runtime without any peer, and what the engine around it has open anyway."""
PEER_FILES = 2
QUESTION_FILES = 4
READER_FILES = 2
_ANSWER_FILES = 1
_NEIGHBOUR_FILES = PEER_FILES + QUESTION_FILES + READER_FILES + _ANSWER_FILES


def files_needed(config: Config) -> int:
    """With as many peers, readers and connections as the config allows, and all peers asked at once."""
    return (
        RUNTIME_FILES
        + config.limits.peers_max * (PEER_FILES + QUESTION_FILES)
        + config.limits.readers_max * READER_FILES
        + config.limits.side_channel_connections_max * _ANSWER_FILES
    )


def check_open_files(soft: int | None, hard: int | None, config: Config) -> Finding:
    """The limits of this process, which an engine started like it would have too; None is no limit."""
    name, needed = "open files", files_needed(config)
    if soft is None or soft >= needed:
        return ok(name, f"{'no limit' if soft is None else f'at most {soft}'}, {needed} needed at most")
    found = f"at most {soft} (hard limit {'none' if hard is None else hard})"
    fix = f"ulimit -n {needed} where the engine is started ({_elsewhere(needed)}){_hard_too(hard, needed)}"
    if soft < RUNTIME_FILES:
        return fail(name, f"{found}: too few for a runtime without any peer", fix)
    neighbours = (soft - RUNTIME_FILES) // _NEIGHBOUR_FILES
    return warn(
        name,
        f"{found}: enough for some {neighbours} other ranks, not for as many as Config allows "
        f"(peers_max {config.limits.peers_max}, readers_max {config.limits.readers_max})",
        fix,
    )


def _elsewhere(needed: int) -> str:
    return f"systemd: LimitNOFILE={needed}, containers: --ulimit nofile={needed}"


def _hard_too(hard: int | None, needed: int) -> str:
    if hard is None or hard >= needed:
        return ""
    return f"; only root can raise the hard limit of {hard}, for good in /etc/security/limits.conf"
