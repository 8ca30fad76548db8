"""The command line: `serve` starts the whole service; `prefill`, `decode` and `router` each run one of its processes.

Each command imports only the modules that it needs, so that `serve` starts at once and stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from paged_engine.weights import CONFIG_NAME, REQUIRED_MODULES, MissingPackageError, require_modules

CANNOT_START = 3
"""Exit code of a process that cannot start and has printed why. `serve` does not restart it."""


class StartError(Exception):
    """The service, or one of its processes, cannot start. The message says why."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    try:
        require_modules("fastapi", "uvicorn", "aiohttp", "prometheus_client", *REQUIRED_MODULES)
        return int(options.run(options) or 0)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        return CANNOT_START
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openai_server", description="An OpenAI-compatible prefill/decode service.")
    commands = parser.add_subparsers(required=True, metavar="command")
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    what = "prefill workers load cached prefixes from each other"
    shared.add_argument("--share-prefixes", action="store_true", help=what)

    service = commands.add_parser("serve", parents=[shared], help="start the whole service")
    for role in ("prefill", "decode"):
        service.add_argument(f"--{role}", type=int, default=1, help=f"{role} workers (default: 1)")
    service.add_argument("--checkpoint", type=_unpacked, help="the model as `unpack` writes it (default: unpack it)")
    service.add_argument(
        "--deadline-s", type=float, default=60.0, help="deadline of a request in seconds (default: 60)"
    )
    service.add_argument("--port", type=int, default=8000, help="port of the router; 0: any free port (default: 8000)")
    service.set_defaults(run=_serve)

    for role in ("prefill", "decode", "router"):
        process = commands.add_parser(role, parents=[shared], help=f"one {role}{'' if role == 'router' else ' worker'}")
        process.add_argument("--port", type=int, required=True)
        process.add_argument("--checkpoint", type=_unpacked, required=True, help="the model as `unpack` writes it")
        if role == "router":
            process.add_argument("--deadline-s", type=float, default=60.0)
            for kind in ("prefill", "decode"):
                process.add_argument(f"--{kind}", nargs="+", type=_named_url, required=True, metavar="NAME=URL")
        else:
            process.add_argument("--name", required=True, help="its engine_id")
        process.set_defaults(run=_router if role == "router" else _worker, role=role)

    unpack = commands.add_parser("unpack", help="unpack the model, for --checkpoint")
    unpack.add_argument("directory", type=Path)
    unpack.set_defaults(run=_unpack)
    return parser


def _unpacked(text: str) -> Path:
    if not Path(text, CONFIG_NAME).is_file():
        raise argparse.ArgumentTypeError(f"there is no unpacked model in {text!r}; the command `unpack` makes one")
    return Path(text)


def _named_url(text: str) -> tuple[str, str]:
    name, separator, url = text.partition("=")
    if not (name and separator and url.startswith("http")):
        raise argparse.ArgumentTypeError(f"expected NAME=http://HOST:PORT, got {text!r}")
    return name, url


def _serve(options: argparse.Namespace) -> None:
    from openai_server.processes import run_service

    asyncio.run(run_service(options))


def _listening(options: argparse.Namespace) -> socket.socket:
    """Configure logging and listen, before any slow import: clients can connect already, and wait to be served."""
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {options.role} {options.port}: %(message)s")
    logging.getLogger("openai_server").setLevel(logging.INFO)
    try:
        family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
        return socket.create_server((options.host, options.port), family=family)
    except OSError as error:
        raise StartError(f"cannot listen at {options.host}:{options.port}: {error.strerror}; see --port") from error


def _worker(options: argparse.Namespace) -> None:
    import uvloop

    listening = _listening(options)
    from openai_server.worker import run_worker

    uvloop.run(run_worker(options.name, options.role, listening, options.checkpoint, share=options.share_prefixes))


def _router(options: argparse.Namespace) -> None:
    import uvloop

    listening = _listening(options)
    from openai_server.router import run_router

    workers = {"prefill": dict(options.prefill), "decode": dict(options.decode)}
    uvloop.run(
        run_router(
            listening, options.checkpoint, deadline_s=options.deadline_s, share=options.share_prefixes, **workers
        )
    )


def _unpack(options: argparse.Namespace) -> None:
    from paged_engine.weights import write_checkpoint

    options.directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.directory)
