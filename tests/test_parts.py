"""Each part can be deleted: its folder, its tests and its row in the list of public modules, and the core works."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("storage",)
CORE = ("tests/core", "tests/transport", "tests/runtime/test_lifecycle.py", "tests/runtime/test_ownership.py")

WITHOUT_INSTALLED = """import sys
sys.meta_path[:] = [finder for finder in sys.meta_path if "__editable__" not in getattr(finder, "__module__", "")]
"""
"""What is installed in this environment would be found where the copy has nothing."""


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package and its tests, without what is made of them."""
    unwanted = shutil.ignore_patterns("__pycache__", ".*")
    for name in ("kvflow", "tests", "examples"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=unwanted)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_INSTALLED)
    return tmp_path


@pytest.mark.thorough
@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", PARTS)
def test_the_core_works_without_a_part(copy: Path, part: str) -> None:
    """Thorough: see `test_imports_point_to_the_inner_rings` of `test_house.py`."""
    shutil.rmtree(copy / "kvflow" / part)
    shutil.rmtree(copy / "tests" / part)
    names = copy / "kvflow" / "__init__.py"
    names.write_text(re.sub(rf'\n    "kvflow\.{part}[\w.]*",', "", names.read_text("utf-8")))
    said = run(copy, "-c", f"import kvflow, importlib.util as u; print(kvflow.__file__, u.find_spec('kvflow.{part}'))")
    assert said.split() == [str(names), "None"]
    run(copy, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *CORE)
    run(copy, "-m", "kvflow.cli.main", "selftest")


def run(folder: Path, *command: str) -> str:
    """What it prints. It must succeed."""
    environment = {"PYTHONPATH": f"{folder}:{folder / 'examples'}", "PATH": "/usr/bin:/bin", "HOME": str(folder)}
    done = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
