"""`python -m kvflow.bench.gpu`, which `python3 dev.py gpu` starts: the experiments' command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from kvflow.bench.gpu.catalogue import TOTAL_S, chosen
from kvflow.bench.gpu.runner import RESULTS, TABLE, run_all

_NEEDED = ("torch", "nixl", "zmq", "msgspec", "numpy", "uvloop")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dev.py gpu", description="Experiments on a machine with a GPU, ten minutes at most, the best first."
    )
    parser.add_argument("--only", default="", metavar="E2,...", help="these experiments; all if left out")
    parser.add_argument("--out", type=Path, default=default_out(), help="a folder for results; $OUT or build/gpu")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: small, which tries the experiments' code only"
    )
    parser.add_argument("--total-s", type=float, default=TOTAL_S, metavar="S", help="how long all may take together")
    return parser


def default_out() -> Path:
    """Where results go if nobody says so."""
    given = os.environ.get("OUT")
    return Path(given) if given else Path("build") / "gpu"


def main(arguments: Sequence[str]) -> int:
    """Run what is asked for; 0 if there is no device, or all is as it should be, 1 if somebody has to look at it."""
    parser = make_parser()
    options = parser.parse_args(arguments)
    try:
        experiments = chosen(options.only)
    except ValueError as error:
        parser.error(str(error))
    if reason := missing(options.device):
        print(f"gpu: nothing was run: {reason}")
        return 0
    records = run_all(experiments, options.device, options.out, options.total_s, lambda text: print(text, flush=True))
    print("", (options.out / TABLE).read_text(encoding="utf-8"), f"every number: {options.out / RESULTS}", sep="\n")
    return int(any(record.wrong for record in records))


def missing(device: str) -> str:
    """What keeps every experiment from running; "" if nothing does."""
    lacking = [package for package in _NEEDED if find_spec(package) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed (dev.py gpu --wheels DIR installs from a folder of wheels)"
    return "" if device == "cpu" else without_cuda()


def without_cuda() -> str:
    """Why torch cannot use a CUDA device; "" if it can."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    return "" if torch.cuda.is_available() else f"torch {torch.__version__} sees no CUDA device"
