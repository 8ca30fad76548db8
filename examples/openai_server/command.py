"""The command line: `serve` starts everything; the other commands are its parts, one process each.

Parts are imported by the command that needs them: the launcher is up at once and stays small.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from paged_engine.weights import CONFIG_NAME, REQUIRED_MODULES, MissingPackageError, require_modules

from openai_server.starts import CANNOT_START, StartError

if TYPE_CHECKING:
    from openai_server.launcher import ServiceSettings

PORT_MAX = 65535
SERVER_MODULES = ("fastapi", "uvicorn", "aiohttp", "prometheus_client", *REQUIRED_MODULES)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    options = _parser().parse_args(arguments)
    try:
        require_modules(*SERVER_MODULES)
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

    serve = commands.add_parser("serve", help="start the whole service")
    _add_service_options(serve, prefill=1, decode=1)
    serve.add_argument("--port", type=_port, default=8000, help="the router's port; 0 takes a free one (default: 8000)")
    serve.set_defaults(run=_serve)

    load = commands.add_parser("load-test", help="many clients against a service of its own; a worker is killed")
    _add_service_options(load, prefill=2, decode=2)
    load.add_argument("--clients", type=int, default=50, help="clients at the same time (default: 50)")
    load.add_argument("--requests", type=int, default=2, help="requests of each client (default: 2)")
    load.add_argument("--tokens", type=int, default=16, help="length of the answers (default: 16)")
    load.add_argument("--kill", choices=("prefill", "decode", "none"), default="decode", help="(default: decode)")
    load.set_defaults(run=_load_test, port=0)

    measure = commands.add_parser("measure", help="what stands between prefill and decode on an idle machine")
    _add_service_options(measure, prefill=1, decode=1)
    measure.add_argument("--requests", type=int, default=100, help="one after the other (default: 100)")
    measure.set_defaults(run=_measure, port=0)

    for role in ("prefill", "decode"):
        worker = commands.add_parser(role, help=f"one {role} worker")
        worker.add_argument("--name", required=True, help="its engine_id")
        _add_process_options(worker)
        worker.set_defaults(run=_worker, role=role)

    router = commands.add_parser("router", help="the router")
    _add_process_options(router)
    router.add_argument("--deadline-s", type=float, default=60.0)
    for role in ("prefill", "decode"):
        router.add_argument(f"--{role}", nargs="+", type=_named_url, required=True, metavar="NAME=URL")
    router.set_defaults(run=_router)

    unpack = commands.add_parser("unpack", help="unpack the model, for --checkpoint")
    unpack.add_argument("directory", type=Path)
    unpack.set_defaults(run=_unpack)
    return parser


def _add_service_options(parser: argparse.ArgumentParser, *, prefill: int, decode: int) -> None:
    parser.add_argument("--prefill", type=int, default=prefill, help=f"prefill workers (default: {prefill})")
    parser.add_argument("--decode", type=int, default=decode, help=f"decode workers (default: {decode})")
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="where the router listens, and the workers unless it is 0.0.0.0 or :: (default: 127.0.0.1)",
    )
    parser.add_argument("--checkpoint", type=_unpacked, help="the model as `unpack` writes it (default: unpack it now)")
    parser.add_argument("--deadline-s", type=float, default=60.0, help="bound of every answer (default: 60)")
    _add_sharing(parser)


def _add_process_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=_port, required=True)
    parser.add_argument("--checkpoint", type=_unpacked, required=True, help="the model as `unpack` writes it")
    _add_sharing(parser)


def _add_sharing(parser: argparse.ArgumentParser) -> None:
    what = "prefill workers load from each other what one has computed of a prompt"
    parser.add_argument("--share-prefixes", action="store_true", help=what)


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= PORT_MAX):
        raise argparse.ArgumentTypeError(f"expected 0 to {PORT_MAX}, got {text!r}")
    return int(text)


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
    from openai_server.launcher import run_service

    asyncio.run(run_service(_service_settings(options)))


def _load_test(options: argparse.Namespace) -> int:
    require_modules("openai", "rich")
    from openai_server.load_test import LoadSettings, run_load_test

    load = LoadSettings(clients=options.clients, requests=options.requests, tokens=options.tokens, kill=options.kill)
    return asyncio.run(run_load_test(_service_settings(options), load))


def _measure(options: argparse.Namespace) -> int:
    require_modules("openai", "rich")
    from openai_server.load_test import run_measurement

    return asyncio.run(run_measurement(_service_settings(options), options.requests))


def _service_settings(options: argparse.Namespace) -> ServiceSettings:
    from openai_server.launcher import ServiceSettings

    return ServiceSettings(
        prefill=options.prefill,
        decode=options.decode,
        host=options.host,
        port=options.port,
        checkpoint=options.checkpoint,
        deadline_s=options.deadline_s,
        share_prefixes=options.share_prefixes,
    )


def _worker(options: argparse.Namespace) -> None:
    import uvloop

    from openai_server.worker import WorkerSettings, run_worker

    _set_up_logging(options.name)
    settings = WorkerSettings(
        name=options.name,
        role=options.role,
        host=options.host,
        port=options.port,
        checkpoint=options.checkpoint,
        share_prefixes=options.share_prefixes,
    )
    uvloop.run(run_worker(settings))


def _router(options: argparse.Namespace) -> None:
    import uvloop

    from openai_server.front import run_router

    _set_up_logging("router")
    uvloop.run(
        run_router(
            host=options.host,
            port=options.port,
            checkpoint=options.checkpoint,
            deadline_s=options.deadline_s,
            prefill=dict(options.prefill),
            decode=dict(options.decode),
            share_prefixes=options.share_prefixes,
        )
    )


def _unpack(options: argparse.Namespace) -> None:
    from paged_engine.weights import write_checkpoint

    options.directory.mkdir(parents=True, exist_ok=True)
    write_checkpoint(options.directory)


def _set_up_logging(name: str) -> None:
    logging.basicConfig(level=logging.WARNING, format=f"%(asctime)s {name}: %(message)s")
    logging.getLogger("openai_server").setLevel(logging.INFO)
