"""Plant each bug of `bugs` in a copy of the checkout, one after the other, and check that its finders fail.

    python -m tests.planted [NAME ...]

Prints a line for each bug: found, and by which test; NOT FOUND; or GONE, if the package does not have the bug's text
exactly once. Before that, the finders have to pass without a bug. Exits with 1 unless all bugs are found.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Sequence
from itertools import count
from pathlib import Path

import pytest

from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "__pycache__")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_OPTIONS = ("-q", "-x", "--no-header", "--tb=no", "-p", "no:cacheprovider")
_TIMEOUT_S = 120
_STAMPS = count(int(time.time()) + 60, 60)
"""Modification times for changed files. Python compares them to decide whether to compile a file again."""


class Gone(Exception):
    """The text of a bug is not in the package exactly once."""


def main(names: list[str]) -> int:
    unknown = set(names) - BUGS.keys()
    if unknown:
        print(f"no such bugs: {sorted(unknown)}")
        return 2
    chosen = {name: bug for name, bug in BUGS.items() if not names or name in names}
    with tempfile.TemporaryDirectory(prefix="kvflow-planted-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, ignore=_LEFT_OUT)
        finders = sorted({finder for bug in chosen.values() for finder in bug.finders})
        failed, output = run(tree, finders)
        if failed is None or failed:
            print(f"{output[-4000:]}\nthe finders fail without a bug: {failed}")
            return 1
        print(f"without a bug {len(finders)} finders pass", flush=True)
        results = {name: try_bug(tree, name, bug) for name, bug in chosen.items()}
    found = sum(results.values())
    print(f"{found} of {len(results)} planted bugs are found")
    return 0 if found == len(results) else 1


def try_bug(tree: Path, name: str, bug: Bug) -> bool:
    """Plant `bug` in `tree`, run its finders, and remove it. Return whether a finder failed."""
    try:
        file = find(tree, bug)
    except Gone as error:
        print(f"GONE: {name}: {error}", flush=True)
        return False
    text = file.read_text()
    begun_s = time.monotonic()
    try:
        write(file, text.replace(bug.old, bug.new))
        failed, output = run(tree, bug.finders)
    finally:
        write(file, text)
    seconds = time.monotonic() - begun_s
    if failed is None:
        print(f"{output[-2000:]}\nNOT RUN: {name}", flush=True)
    else:
        print(f"{'found' if failed else 'NOT FOUND'}: {name}: {', '.join(failed)} ({seconds:.0f} s)", flush=True)
    return bool(failed)


def find(tree: Path, bug: Bug) -> Path:
    """Return the only file in `tree` with the text of `bug`. Raises Gone."""
    files = [file for file in sorted(tree.glob("kvflow/**/*.py")) if bug.within in file.as_posix()]
    places = {file.relative_to(tree).as_posix(): file.read_text().count(bug.old) for file in files}
    times = {place: number for place, number in places.items() if number}
    if sum(times.values()) != 1:
        raise Gone(f"{bug.old.strip().splitlines()[0]!r} is in {times or 'no file'}")
    return tree / next(iter(times))


def write(file: Path, text: str) -> None:
    file.write_text(text)
    stamp = next(_STAMPS)
    os.utime(file, (stamp, stamp))


def run(tree: Path, finders: Sequence[str]) -> tuple[list[str] | None, str]:
    """Run `finders` in a child of this process. Return the tests that failed, and pytest's output.

    The tests are None if they could not be run. The child is forked, so that it need not load torch and other large
    modules again.
    """
    log = tree.parent / "log"
    child = os.fork()
    if child == 0:
        code = 3
        try:
            with log.open("w") as stream:
                for number in (1, 2):
                    os.dup2(stream.fileno(), number)
            code = run_here(tree, finders)
        except BaseException:  # noqa: BLE001 - the parent reports any error
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    output = log.read_text()
    failed = _FAILED.findall(output) or (["a test that hangs"] if "+ Timeout +" in output else [])
    return (failed if code == 0 or (code == 1 and failed) else None), output


def run_here(tree: Path, finders: Sequence[str]) -> int:
    """Run `finders` in the child, with `kvflow` and `tests` imported from the copy in `tree`."""
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    sys.path[:] = [str(tree), *(path for path in sys.path if Path(path or ".").resolve() != ROOT)]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("kvflow", "tests")]:
        del sys.modules[name]
    return int(pytest.main([*_OPTIONS, *finders], plugins=[_Impatient()]))


class _Impatient:
    """A pytest plugin with which hypothesis does not shrink failures, and tests that hang time out early."""

    @pytest.hookimpl(trylast=True)
    def pytest_configure(self) -> None:
        from hypothesis import Phase, settings

        phases = [Phase.explicit, Phase.generate]
        settings.register_profile("impatient", settings.get_profile("kvflow"), phases=phases, database=None)
        settings.load_profile("impatient")

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Generator[None]:
        yield
        for item in items:
            item.add_marker(pytest.mark.timeout(_TIMEOUT_S), append=False)


if __name__ == "__main__":
    import torch  # noqa: F401

    sys.exit(main(sys.argv[1:]))
