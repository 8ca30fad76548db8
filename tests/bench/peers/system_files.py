"""Get the libraries of RDMA that Mooncake's engine is linked to: `python tests/bench/peers/system_files.py FOLDER`.

They go into a folder of the environment; nothing is installed. Where the system has them, or has no `apt-get` and
`dpkg`, nothing is done; without them the contender is left out.
"""

from __future__ import annotations

import ctypes.util
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_PACKAGES = ("libibverbs1", "libnl-3-200", "libnl-route-3-200")


def get_files(folder: Path) -> None:
    if ctypes.util.find_library("ibverbs") or not (shutil.which("apt-get") and shutil.which("dpkg")):
        return
    with tempfile.TemporaryDirectory(prefix="kvflow-mooncake-") as name:
        temporary = Path(name)
        done = subprocess.run(["apt-get", "--quiet", "download", *_PACKAGES], cwd=temporary, check=False)
        if done.returncode != 0:
            print("libibverbs is not to be had: the bench leaves Mooncake's engine out")
            return
        for package in temporary.glob("*.deb"):
            subprocess.run(["dpkg", "-x", package, temporary / "files"], check=True)
        folder.mkdir(parents=True)
        for library in (temporary / "files").rglob("lib*.so.*"):
            shutil.copy(library, folder / library.name)  # a link becomes the file


if __name__ == "__main__":
    get_files(Path(sys.argv[1]))
