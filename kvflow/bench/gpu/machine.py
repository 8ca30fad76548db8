"""E0 and E12: the machine as `kvflow doctor` and the driver see it, and the tests that are marked gpu."""

from __future__ import annotations

import json
import platform
import re
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from kvflow.bench.gpu.setting import Setting
from kvflow.device.cuda import DriverError, load_driver

_PACKAGES = ("torch", "nixl", "nixl-cu12", "nixl-cu13", "numpy", "uvloop")
_COUNTS = re.compile(r"(\d+) (passed|failed|errors?|skipped)")
_QUERY = (
    "name",
    "driver_version",
    "memory.total",
    "memory.used",
    "mig.mode.current",
    "compute_mode",
    "pcie.link.gen.max",
)


def facts(setting: Setting) -> None:
    """E0: versions, the device by nvidia-smi and by the driver, and what the doctor says without a transfer."""
    setting.facts.add("python", platform.python_version())
    setting.facts.add("kernel", platform.release())
    for package in _PACKAGES:
        setting.facts.add(package, _version(package))
    _driver_facts(setting)
    said = _output(["nvidia-smi", f"--query-gpu={','.join(_QUERY)}", "--format=csv,noheader"])
    for name, value in zip(_QUERY, said.split(","), strict=False):
        setting.facts.add(f"nvidia-smi {name}", value.strip())
    print(_output(["nvidia-smi", "-q"]), _output(["nvidia-smi", "topo", "-m"]), sep="\n", file=sys.stderr)
    doctor(setting, "--no-transfer")


def _driver_facts(setting: Setting) -> None:
    try:
        driver = load_driver()
        setting.facts.add("driver's CUDA", ".".join(map(str, driver.version())))
        for name, value in driver.attributes().items():
            setting.facts.add(name, value)
    except DriverError as error:
        setting.facts.add("driver's CUDA", str(error))


def doctor(setting: Setting, *options: str) -> None:
    """Every finding that is not OK as a fact."""
    command = [sys.executable, "-m", "kvflow.cli.main", "doctor", "--json", *options]
    said = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        findings = json.loads(said.stdout)["findings"]
    except (ValueError, KeyError):
        setting.facts.add("doctor", f"exit code {said.returncode}: {said.stderr.strip()[-200:]}")
        return
    print(json.dumps(findings, indent=1), file=sys.stderr)
    setting.facts.add("doctor", f"{len(findings)} findings")
    setting.facts.add("doctor fails", sum(one["status"] == "fail" for one in findings))
    for one in findings:
        if one["status"] != "ok" or one["name"] in ("self-transfer on GPUs", "way of the bytes on GPUs"):
            setting.facts.add(f"doctor, {one['name']}", f"{one['status']}: {one['found']}")


def tests(setting: Setting) -> None:
    """E12: the tests of the checkout that are marked gpu, and the doctor with its transfers."""
    doctor(setting)
    folder = Path(__file__).resolve().parents[3]
    files = sorted(map(str, (folder / "tests" / "nixl").glob("test_gpu*.py")))
    if not files:
        setting.facts.add("tests", "none here: this is no checkout")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-v", "--thorough", *files]
    said = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)  # what has been said by the limit is in the log
            said.append(line)
    setting.facts.add("tests: exit code", process.returncode)
    for word, count in counts("".join(said)).items():
        setting.facts.add(f"tests {word}", count)


def counts(output: str) -> dict[str, int]:
    """How many tests passed, failed and so on, by pytest's last line."""
    last = next((line for line in reversed(output.splitlines()) if _COUNTS.search(line)), "")
    return {word: int(count) for count, word in _COUNTS.findall(last)}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
