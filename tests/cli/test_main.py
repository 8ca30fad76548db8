"""The entry point: its message without the extra `cli`, and its help."""

from __future__ import annotations

import shlex
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kvflow
from kvflow import extras
from kvflow.cli import main
from kvflow.cli.app import app
from kvflow.doctor.version import installed, versions
from tests.support.tests_support import each


def test_a_bare_installation_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "missing_modules", lambda: ("typer", "rich"))
    with pytest.raises(SystemExit, match="needs typer and rich") as caught:
        main.main()
    given = shlex.split(str(caught.value).partition("pip install ")[2])
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert given == project["optional-dependencies"]["cli"], "not kvflow[cli]: a checkout is on no index"


def test_a_checkout_that_is_not_installed_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(name: str) -> list[str]:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", unknown)
    assert extras.install_command("ray") == "pip install '.[ray]'"


def output_of(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    return done.stdout


def test_the_extra_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, kvflow.cli.main; print('typer' in sys.modules, 'rich' in sys.modules)"
    assert output_of(code).split() == ["False", "False"]


@each(
    ("words", "options"),
    [
        ("", ""),
        ("doctor", ""),
        ("bench transfer", "--transport --sizes --pairs --rounds --layers --backend --json"),
    ],
)
def test_help_names_the_options_and_shows_flags_as_flags(words: str, options: str) -> None:
    done = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": "120", "NO_COLOR": "1"})
    assert done.exit_code == 0
    assert [option for option in ["--help", *options.split()] if option not in done.output] == []
    assert [line for line in done.output.splitlines() if "<bool>" in line or "BOOLEAN" in line] == []


@each(
    ("words", "message"),
    [
        (("transfer", "--sizes", "3.5"), "--sizes: expected 'block' or a number of MB, such as 16, got '3.5'"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["bench", *words])
    assert done.exit_code == 1
    assert message in " ".join(done.stderr.split())  # a busy machine is told of first, and lines are cut at 80 columns
    assert isinstance(done.exception, SystemExit), "no traceback"


@pytest.mark.parametrize("words", [("--version",), ("--version", "doctor")], ids=["alone", "before a command"])
def test_the_versions_are_told_without_importing_what_they_are_of(words: tuple[str, ...]) -> None:
    code = f"""
import contextlib, sys
sys.argv[1:] = {words!r}
from kvflow.cli.main import main
with contextlib.suppress(SystemExit): main()
print(*sorted({{'torch', 'nixl'}} & set(sys.modules)))
"""
    *told, imported = output_of(code).splitlines()
    assert told[0] == f"kvflow {kvflow.__version__}"
    assert f"torch {version('torch')}" in told
    assert [line.split()[0] for line in told] == ["kvflow", "nixl", "torch", "python"]
    assert imported == ""


def test_a_bare_installation_can_say_its_version(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(main, "missing_modules", lambda: ("typer", "rich"))
    monkeypatch.setattr(sys, "argv", ["kvflow", "--version"])
    main.main()
    assert capsys.readouterr().out.startswith(f"kvflow {kvflow.__version__}\n")


def test_what_is_not_installed_is_said() -> None:
    assert installed("no-such-package-of-ours") == "not installed"
    assert list(versions()) == ["kvflow", "nixl", "torch", "python"]


def test_the_package_has_one_version() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["version"] == kvflow.__version__
