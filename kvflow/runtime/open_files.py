"""Open files of this process: how many it may have, has and needs.

Running out of them is not harmless. UCX closes its listener for ever at the first connection that it cannot accept
(UCX 1.23), so no new reader ever connects again; ZeroMQ aborts the process where it cannot make a context, and spins
where it cannot accept. So kvflow stops before: it takes no new reader while only a few files are left, and drops the
connections of its side channel when fewer are left.

What is needed was counted with NIXL 1.5.1 (UCX 1.23) and ZeroMQ 4.3.5: a runtime by itself has some 40; a peer that is
read from costs 1 over shared memory and 2 over tcp, and so does a reader; a question on the side channel has 4 while it
is asked, and its connection 1 where it is answered.
"""

from __future__ import annotations

import os
import resource
from collections import deque

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.logs import logger_of

logger = logger_of(__name__)

RUNTIME_FILES = 64
"""A runtime without any peer, and what the engine around it has open anyway."""
PEER_FILES = READER_FILES = 2
QUESTION_FILES = 4
ANSWER_FILES = 1
READERS_STOP_AT = 8
"""Files that must be left for a new reader, or peer, to be connected."""
SIDE_CHANNEL_STOPS_AT = 4
"""Files that must be left for the side channel to keep its connections."""

_OPENING = {"nixl": 44, "inproc": 22}  # by transport
_CONTEXT_FILES = 8  # of ZeroMQ, whose first socket makes threads
_SOFT_MAX = 1 << 20  # a limit of a thousand million makes programs slow that close all they might have inherited
_NO_LIMIT = 1 << 30
_CONNECTING_S = 2.0
_WARN_AGAIN_S = 60.0
_OURS = "/proc/self/fd"


def limit() -> int:
    """Return the number of files that this process may have open."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def left() -> int:
    """Return the number of files that this process may still open."""
    most = limit()
    if most == _NO_LIMIT:
        return most
    try:
        count = os.stat(_OURS).st_size or len(os.listdir(_OURS))  # the size is their number since Linux 6.2
    except OSError:  # no /proc, or no file left to list it with
        return _NO_LIMIT if not os.path.isdir(_OURS) else 0
    return max(most - count, 0)


def shortage(least: int) -> str:
    """Return how many files are left, as a text for errors, if they are fewer than `least`; else ""."""
    found = left()
    return f"Too many open files: {found} of {limit()} are left (ulimit -n)" if found < least else ""


def needed(config: Config) -> int:
    """Files open with as many peers, readers and connections as the config allows, and all peers asked at once."""
    limits = config.limits
    peers, readers = limits.peers_max * (PEER_FILES + QUESTION_FILES), limits.readers_max * READER_FILES
    return RUNTIME_FILES + peers + readers + limits.side_channel_connections_max * ANSWER_FILES


def prepare(config: Config) -> None:
    """Raise the soft limit to the hard one, and warn if it is lower than `config` may need.

    Raises:
        ConfigError: too few files are left for a runtime, such that a library would end the process.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, _SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        logger.info("open files: the limit of this process is %s now, it was %s", most, soft)
    least = _OPENING[config.transport]
    if why := shortage(least):
        raise ConfigError(f"{why}, and a runtime opens some {least}: raise the limit where the engine is started")
    if limit() < needed(config):
        logger.warning(
            "engine %r: open files: at most %s, left are %s; Config allows as many peers and readers as need "
            "%s: raise `ulimit -n`, or lower limits.peers_max and limits.readers_max",
            config.engine_id,
            limit(),
            left(),
            needed(config),
        )


def asking_shortage(*, first: bool) -> str:
    """Return why no socket for a question can be opened, or "". `first`: ZeroMQ has no threads for it yet."""
    return shortage(QUESTION_FILES + SIDE_CHANNEL_STOPS_AT + (_CONTEXT_FILES if first else 0))


class ReaderAdmission:
    """Says whether one more reader may connect. Those that were told so a moment ago count as if they still will."""

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._admitted_s: deque[float] = deque()
        self._warn_s = 0.0
        self.refused = 0
        """Readers that were refused because too few files were left."""

    def refusal(self, now_s: float) -> str:
        """Return why no new reader is taken now, or "" and count one as on its way."""
        while self._admitted_s and self._admitted_s[0] <= now_s - _CONNECTING_S:
            self._admitted_s.popleft()
        why = shortage(READERS_STOP_AT + (READER_FILES + QUESTION_FILES) * len(self._admitted_s))
        if not why:
            self._admitted_s.append(now_s)
            return ""
        self.refused += 1
        if now_s >= self._warn_s:
            self._warn_s = now_s + _WARN_AGAIN_S
            logger.warning("engine %r takes no new reader: %s; refused so far: %s", self._engine_id, why, self.refused)
        return why
