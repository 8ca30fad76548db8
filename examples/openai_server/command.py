"""The command line: `serve` starts the whole service; `worker` and `router` each run one of its processes.

Each command imports only the modules that it needs, so that `serve` starts at once and stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from paged_engine.weights import CONFIG_NAME, REQUIRED_MODULES, MissingPackageError, require_modules


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    options = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {options.command} {options.name}: %(message)s")
    logging.getLogger("openai_server").setLevel(logging.INFO)
    try:
        require_modules("fastapi", "uvicorn", "aiohttp", "prometheus_client", *REQUIRED_MODULES)
        options.run(options)
    except MissingPackageError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, asyncio.CancelledError):
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="openai_server", description="An OpenAI-compatible prefill/decode service.")
    parser.set_defaults(name="")
    commands = parser.add_subparsers(required=True, metavar="command", dest="command")
    model = argparse.ArgumentParser(add_help=False)
    model.add_argument("--host", default="127.0.0.1", help="where to listen (default: 127.0.0.1)")
    what = "prefill workers load cached prefixes from each other"
    model.add_argument("--share-prefixes", action="store_true", help=what)
    front = argparse.ArgumentParser(add_help=False)
    front.add_argument("--port", type=int, default=8000, help="port of the router; 0: any free port (default: 8000)")
    front.add_argument("--deadline-s", type=float, default=60.0, help="deadline of a request in seconds (default: 60)")

    service = commands.add_parser("serve", parents=[model, front], help="start the whole service")
    router = commands.add_parser("router", parents=[model, front], help="the router")
    worker = commands.add_parser("worker", parents=[model], help="a worker, for prefill or decode")
    unpack = commands.add_parser("unpack", help="unpack the model, for --checkpoint")
    for role in ("prefill", "decode"):
        service.add_argument(f"--{role}", type=int, default=1, help=f"{role} workers (default: 1)")
        router.add_argument(f"--{role}", nargs="+", type=_named_url, required=True, metavar="NAME=URL")
    worker.add_argument("--name", required=True, help="its engine_id")
    worker.add_argument("--port", type=int, required=True)
    unpack.add_argument("directory", type=Path)
    for command, run in ((service, _serve), (router, _router), (worker, _worker)):
        command.set_defaults(run=run)
        needed, what = command is not service, "the model as `unpack` writes it (`serve` unpacks it if needed)"
        command.add_argument("--checkpoint", type=_unpacked, required=needed, help=what)
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
    from openai_server.serve import StartError, serve

    try:
        asyncio.run(serve(options))
    except* StartError as errors:
        sys.exit(f"error: {errors.exceptions[0]}")


def _router(options: argparse.Namespace) -> None:
    import uvloop

    from openai_server.router import run_router

    uvloop.run(run_router(options))


def _worker(options: argparse.Namespace) -> None:
    import uvloop

    from openai_server.worker import run_worker

    uvloop.run(run_worker(options))


def _unpack(options: argparse.Namespace) -> None:
    from paged_engine.weights import write_checkpoint

    options.directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.directory)
