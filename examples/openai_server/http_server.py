"""uvicorn, as router and workers run it."""

from __future__ import annotations

import signal
import socket

import uvicorn
from fastapi import FastAPI

# Idle connections of the router's pool end on its side, never on ours: else a request might meet one that just ended.
CLIENT_KEEP_ALIVE_S = 30.0
SERVER_KEEP_ALIVE_S = 75
SHUTDOWN_TIMEOUT_S = 3


async def serve_http(app: FastAPI, listening: socket.socket) -> None:
    """Answer until the process is told to end (SIGTERM, Ctrl-C); streams get a moment to finish."""
    config = uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        timeout_keep_alive=SERVER_KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_TIMEOUT_S,
    )
    # uvicorn takes these while it serves, and raises them once more when it is done: by then we are leaving anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await uvicorn.Server(config).serve([listening])
