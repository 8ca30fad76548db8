"""The versions that pyproject.toml allows: those at both ends, and beside the packages that people have with kvflow."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
import tomllib
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
DEPENDENCIES = {one.name: one for one in map(Requirement, PROJECT["dependencies"])}
WITH_VLLM = {one.name: one for one in map(Requirement, PROJECT["optional-dependencies"]["vllm"])}
NIXL_BUILD = "nixl-cu12"  # that `nixl` loads on a machine without CUDA, too
SMALL = [name for name in DEPENDENCIES if name != "torch"]  # torch is the environment's: it comes with GPU libraries
DEV = runpy.run_path(str(ROOT / "dev.py"))
VLLM = runpy.run_path(str(ROOT / "docs" / "site" / "vllm_versions.py"))
PIP = ("--disable-pip-version-check", "install", "--quiet", "--no-compile", "--no-deps", "--only-binary", ":all:")
# With an extra, as images of Dynamo have it. Ray's extra `llm` has a NIXL that is too old.
BESIDE = ["ai-dynamo[sglang]==1.6.1", "ai-dynamo[vllm]==1.6.1", "lmcache==0.5.6", "ray[serve]==2.60.0", "vllm==0.33.0"]
HAND_OVER = """
import json, sys
from importlib.metadata import version
from kvflow.cli.main import main
print(json.dumps({name: version(name) for name in sys.argv.pop().split()}))
main()
"""


def pip(*words: str | Path) -> None:
    command = [str(word) for word in DEV["pip"](Path(sys.executable), *PIP, *words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> None:
    try:
        pip("--dry-run", "--target", tmp_path_factory.mktemp("index"), "msgspec")
    except (AssertionError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"no package index: {str(error)[-200:]}")


def hand_over(folder: Path, tmp_path: Path) -> dict[str, Version]:
    """Run `kvflow selftest` with the packages in `folder`. Return the versions that it had."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
    command = [sys.executable, "-c", HAND_OVER, "selftest", " ".join(DEPENDENCIES)]
    done = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: Version(version) for name, version in json.loads(done.stdout.splitlines()[0]).items()}


def test_versions_of_vllm_are_those_of_the_table() -> None:
    oldest, newest = VLLM["OLDEST"], VLLM["NEWEST"]
    major, minor = newest.split(".")
    assert str(WITH_VLLM["vllm"].specifier) == str(SpecifierSet(f">={oldest},<{major}.{int(minor) + 1}"))
    assert f"vllm=={newest}.0" in {word for step in DEV["VLLM"].pip for word in step}, "dev.py brings the newest"


@pytest.mark.thorough
@pytest.mark.nixl
def test_the_newest_of_every_dependency_hands_over(index: None, tmp_path: Path) -> None:
    """The newest NIXL is the newest with a build.

    Thorough: see `test_versions_of_vllm_are_those_of_the_table` of this file.
    """
    folder = tmp_path / "packages"
    pip("--target", folder, NIXL_BUILD, *(name for name in SMALL if name != "nixl"))
    (built,) = distributions(name=NIXL_BUILD, path=[str(folder)])
    pip("--target", folder, f"nixl=={built.version}")
    assert hand_over(folder, tmp_path)["nixl"] == Version(built.version)


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="the lowest versions have wheels for the lowest Python")
def test_the_lowest_of_every_dependency_hands_over(index: None, tmp_path: Path) -> None:
    """Thorough: see `test_versions_of_vllm_are_those_of_the_table` of this file."""
    pins = {name: one.version for name in SMALL for one in DEPENDENCIES[name].specifier if one.operator == ">="}
    folder = tmp_path / "packages"
    pip("--target", folder, f"{NIXL_BUILD}=={pins['nixl']}", *(f"{name}=={pin}" for name, pin in pins.items()))
    had = hand_over(folder, tmp_path)
    assert {name: had[name] for name in SMALL} == {name: Version(pins[name]) for name in SMALL}


@pytest.mark.thorough
@pytest.mark.parametrize("package", BESIDE)
def test_kvflow_resolves_beside(package: str, index: None, tmp_path: Path) -> None:
    """For each common dependency a version suits both.

    Thorough: see `test_versions_of_vllm_are_those_of_the_table` of this file.
    """
    report = tmp_path / "report.json"
    pip("--dry-run", "--ignore-installed", "--report", report, package)
    (installed,) = json.loads(report.read_text())["install"]
    extra = "".join(Requirement(package).extras)
    theirs = [Requirement(line) for line in installed["metadata"]["requires_dist"]]
    theirs = [one for one in theirs if one.marker is None or one.marker.evaluate({"extra": extra})]
    common = [(ours, one) for one in theirs if (ours := (DEPENDENCIES | WITH_VLLM).get(canonicalize_name(one.name)))]
    assert common
    assert [pair for pair in common if not suited(pair[0].specifier & pair[1].specifier)] == []


def suited(wanted: SpecifierSet) -> bool:
    """Return whether a version satisfies `wanted`. The bounds are tried, and a version above all."""
    return any(wanted.contains(version) for version in ("9999", *(one.version for one in wanted)))
