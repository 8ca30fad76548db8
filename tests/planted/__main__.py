"""Plant each bug of `bugs` in a copy of the checkout, one after the other, and see whether its finders fail.

    python -m tests.planted [NAME ...]

One line each: found, and by which test, or NOT FOUND, or GONE, where the package has not the text any more (or has it
twice). Before that the finders have to pass without a bug. Exits with 1 unless all are found.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path

from tests.planted.bugs import BUGS, Bug

ROOT = Path(__file__).parents[2]
_LEFT_OUT = shutil.ignore_patterns(".*", "build", "dist", "site", "__pycache__")
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
_STAMPS = count(int(time.time()) + 60, 60)
"""Of files that were changed: Python tells by their time whether it has to compile them anew."""


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
        results = {name: try_bug(tree, name, bug) for name, bug in chosen.items()}
    found = sum(results.values())
    print(f"{found} of {len(results)} planted bugs are found")
    return 0 if found == len(results) else 1


def try_bug(tree: Path, name: str, bug: Bug) -> bool:
    """Whether the finders notice."""
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
    """The one file that has a bug's text. Raises Gone."""
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


def run(tree: Path, finders: tuple[str, ...] | list[str]) -> tuple[list[str] | None, str]:
    """Which tests fail, up to the first few; None if they could not be run. And what pytest says."""
    command = (sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "--tb=no", "--timeout=60", "-p", "no:cacheprovider")
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run([*command, *finders], cwd=tree, env=environment, capture_output=True, text=True, check=False)
    output = done.stdout + done.stderr
    failed = _FAILED.findall(output) or (["a test that hangs"] if "+ Timeout +" in output else [])
    ran = done.returncode == 0 or (done.returncode == 1 and failed)
    return (failed if ran else None), output


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
