"""Registering where SGLang cannot run, as a newcomer meets it without CUDA: an SGLang of a few files."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "sglang/__init__.py": "",
    "sglang/srt/__init__.py": "",
    "sglang/srt/arg_groups/__init__.py": "",
    "sglang/srt/arg_groups/choices.py": "def add_disagg_transfer_backend_choices(names): pass",
    "sglang/srt/disaggregation/__init__.py": "",
    "sglang/srt/disaggregation/utils.py": "import torchvision_that_only_cuda_has",
    "sglang/srt/plugins/__init__.py": "",
    "sglang/srt/plugins/hook_registry.py": "HookRegistry = HookType = None",
}
AS_SGLANG_DOES = """
import sys
from kvflow.sglang import register
try:
    register()
except Exception:  # what SGLang does: a traceback, and on it goes
    print("swallowed")
print("arguments are parsed")
"""


@pytest.mark.parametrize(
    ("arguments", "switch", "ends"),
    [
        (("--disaggregation-transfer-backend", "kvflow"), "0", True),
        (("--disaggregation-transfer-backend=kvflow",), "", True),
        (("--model-path", "kvflow/some-model"), "", False),
        (("--disaggregation-transfer-backend", "nixl"), "", False),
        (("--disaggregation-transfer-backend", "nixl"), "1", True),
        ((), "1", False),
    ],
)
def test_without_cuda_it_says_why_there_is_no_such_choice(
    tmp_path: Path, arguments: tuple[str, ...], switch: str, ends: bool
) -> None:
    found = registered(tmp_path, arguments, switch)
    assert ("arguments are parsed" in found.stdout) is not ends, "a server without kvflow is not stopped"
    assert "swallowed" not in found.stdout
    assert "Traceback" not in found.stderr
    assert "torchvision_that_only_cuda_has" in found.stderr
    assert "install SGLang with its dependencies" in found.stderr


def test_another_value_of_the_switch_prevents_the_start(tmp_path: Path) -> None:
    found = registered(tmp_path, (), "yes")
    assert "arguments are parsed" not in found.stdout
    assert "KVFLOW_AS_NIXL: expected 1 (on) or 0 (off), got 'yes'" in found.stderr


def registered(folder: Path, arguments: tuple[str, ...], switch: str) -> subprocess.CompletedProcess[str]:
    """Return the output of a process that registers kvflow with the SGLang of FILES in `folder`."""
    for name, text in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)]), "KVFLOW_AS_NIXL": switch}
    command = [sys.executable, "-c", AS_SGLANG_DOES, *arguments]
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=120)
