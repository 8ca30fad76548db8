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
    ("arguments", "ends"),
    [
        (("--disaggregation-transfer-backend", "kvflow"), True),
        (("--disaggregation-transfer-backend=kvflow",), True),
        (("--model-path", "kvflow/some-model"), False),
        ((), False),
    ],
)
def test_without_cuda_it_says_why_there_is_no_such_choice(
    tmp_path: Path, arguments: tuple[str, ...], ends: bool
) -> None:
    for name, text in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    command = [sys.executable, "-c", AS_SGLANG_DOES, *arguments]
    found = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ("arguments are parsed" in found.stdout) is not ends, "a server without kvflow is not stopped"
    assert "swallowed" not in found.stdout
    assert "Traceback" not in found.stderr
    assert "torchvision_that_only_cuda_has" in found.stderr
    assert "install SGLang with its dependencies" in found.stderr
