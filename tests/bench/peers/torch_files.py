"""Get the Python files of torch's one-sided transport: `python tests/bench/peers/torch_files.py FOLDER PYTHON`.

They are files of torch 2.15 that run over the torch of the environment. Of all builds that pip can name, the one for
macOS is the smallest; nothing of it is installed. PYTHON is one that has pip. Without the files the
contender is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

_VERSION = "2.15.0"
_PACKAGE = "torch/distributed/_transport/"
_BUILD = ("--no-deps", "--only-binary", ":all:", "--platform", "macosx_14_0_arm64", "--python-version", "3.11")


def get_files(folder: Path, python: str) -> None:
    with tempfile.TemporaryDirectory(prefix="kvflow-torch-") as temporary:
        command = [
            python,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--dest",
            temporary,
            *_BUILD,
            f"torch=={_VERSION}",
        ]
        # What a machine's constraints say of torch is meant for what is installed.
        done = subprocess.run(command, env=os.environ | {"PIP_CONSTRAINT": os.devnull}, check=False)
        wheels = list(Path(temporary).glob("torch-*.whl"))
        if done.returncode != 0 or not wheels:
            print(f"torch {_VERSION} is not to be had: the bench leaves torch_transport out")
            return
        with zipfile.ZipFile(wheels[0]) as wheel:
            wheel.extractall(folder, [name for name in wheel.namelist() if name.startswith(_PACKAGE)])


if __name__ == "__main__":
    get_files(Path(sys.argv[1]), sys.argv[2])
