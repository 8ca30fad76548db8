"""Open files of this process: the limit, how many are left, and how many kvflow needs.

Not all libraries survive it if a process runs out of open files: UCX 1.23 has closed its listener for good, so that no
new reader could connect, and ZeroMQ 4.3.5 has aborted the process. So kvflow stops earlier: it opens no runtime and
accepts no new reader while only a few files are left, and drops the connections of its side channel when still fewer
are left.

Counted with NIXL 1.5.1 (UCX 1.23) and ZeroMQ 4.3.5: a runtime alone has some 40 open files. A peer costs 1 over shared
memory and 2 over tcp, and so does a reader. A question on the side channel costs the asking side 4, the answering side
1.
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
"""Number of open files of a runtime without peers, together with its engine."""
PEER_FILES = READER_FILES = 2
QUESTION_FILES = 4
ANSWER_FILES = 1
READERS_STOP_AT = 8
"""Number of files that the process must still be able to open before a new reader or peer is connected."""
SIDE_CHANNEL_STOPS_AT = 4
"""If the process can open fewer further files than this, the side channel drops all its connections."""

_OPENING_FILES = {"nixl": 44, "inproc": 22}  # by transport
_CONTEXT_FILES = 8  # of a ZeroMQ context, which starts its threads with the first socket
_SOFT_MAX = 1 << 20  # with a limit of 10^9, programs that close every possible inherited file become slow
_NO_LIMIT = 1 << 30
_CONNECTING_S = 2.0
_WARN_AGAIN_S = 60.0
_OWN_FILES_DIR = "/proc/self/fd"


def limit() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return _NO_LIMIT if soft == resource.RLIM_INFINITY else soft


def left() -> int:
    """Return how many more files this process may open now."""
    most = limit()
    if most == _NO_LIMIT:
        return most
    try:
        count = os.stat(_OWN_FILES_DIR).st_size or len(
            os.listdir(_OWN_FILES_DIR)
        )  # the size is their number since Linux 6.2
    except OSError:  # no /proc, or no file left to list it with
        return _NO_LIMIT if not os.path.isdir(_OWN_FILES_DIR) else 0
    return max(most - count, 0)


def shortage(least: int) -> str:
    """Return "" if this process may open at least `least` more files, else a text for errors that says how many."""
    files_left = left()
    return f"Too many open files: {files_left} of {limit()} are left (ulimit -n)" if files_left < least else ""


def needed(config: Config) -> int:
    """Return how many files the runtime and its engine may have open in the worst case that `config` allows.

    In that case all `peers_max` peers are asked, and all `readers_max` readers and `side_channel_connections_max` side
    channel connections are open.
    """
    limits = config.limits
    peers, readers = limits.peers_max * (PEER_FILES + QUESTION_FILES), limits.readers_max * READER_FILES
    return RUNTIME_FILES + peers + readers + limits.side_channel_connections_max * ANSWER_FILES


def prepare(config: Config) -> None:
    """Raise this process's soft limit of open files to its hard limit. Log a warning if `config` may need more.

    ConfigError if too few files are left to open a runtime.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _SOFT_MAX if hard == resource.RLIM_INFINITY else min(hard, _SOFT_MAX)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        logger.info("open files: the limit of this process is %s now, it was %s", most, soft)
    least = _OPENING_FILES[config.transport]
    if why := shortage(least):
        raise ConfigError(f"{why}, and a runtime opens some {least}: raise the limit where the engine is started")
    if limit() < needed(config):
        logger.warning(
            "engine %r: open files: at most %s, %s left; the peers and readers that Config allows need %s: raise "
            "`ulimit -n`, or lower limits.peers_max and limits.readers_max",
            config.engine_id,
            limit(),
            left(),
            needed(config),
        )


def asking_shortage(*, first: bool) -> str:
    """Return "" if a socket for a question to a peer can be opened, else a text for errors that says why not.

    `first`: the question is the first of this process, and needs a ZeroMQ context too.
    """
    return shortage(QUESTION_FILES + SIDE_CHANNEL_STOPS_AT + (_CONTEXT_FILES if first else 0))


class ReaderAdmission:
    """Decides whether another reader may connect, by the number of files that this process may still open.

    Readers that were admitted during the last `_CONNECTING_S` seconds count as still connecting.
    """

    def __init__(self, engine_id: str) -> None:
        self._engine_id = engine_id
        self._admitted_s: deque[float] = deque()
        self._warn_s = 0.0
        self.refused = 0

    def refusal(self, now_s: float) -> str:
        """Return "" if a new reader may connect now, and count that reader as connecting. Else return why not."""
        while self._admitted_s and self._admitted_s[0] <= now_s - _CONNECTING_S:
            self._admitted_s.popleft()
        why = shortage(READERS_STOP_AT + (READER_FILES + QUESTION_FILES) * len(self._admitted_s))
        if not why:
            self._admitted_s.append(now_s)
            return ""
        self.refused += 1
        if now_s >= self._warn_s:
            self._warn_s = now_s + _WARN_AGAIN_S
            logger.warning(
                "engine %r accepts no new reader: %s; refused so far: %s", self._engine_id, why, self.refused
            )
        return why
