"""The entry point: what it says without its extra, and what help it gives with it."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvflow.cli import main


def test_a_bare_installation_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "missing_modules", lambda: ("typer", "rich"))
    with pytest.raises(SystemExit, match=r"needs typer and rich; .*pip install 'kvflow\[cli\]'"):
        main.main()


def test_the_extra_is_imported_only_when_it_is_needed() -> None:
    code = "import sys, kvflow.cli.main; print('typer' in sys.modules, 'rich' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        (
            "transfer",
            ("--transport", "--sizes", "--pairs", "--pattern", "--layers", "--kv-heads", "--idle-s", "--json"),
        ),
        ("topology", ("--transport", "--size", "--rounds", "--layers", "--json", "--quick")),
        ("fairness", ("--transport", "--size", "--huge-loads", "--rounds", "--json", "--quick")),
        ("planning", ("--repeats", "--json", "--quick")),
    ],
)
def test_help_names_the_options(name: str, options: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvflow.cli.main", "bench", name, "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, env={"COLUMNS": "120", "NO_COLOR": "1"}
    )
    for option in options:
        assert option in done.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("transfer", "--sizes", "3.5"), "--sizes: expected 'block' or a number of MB, got '3.5'"),
        (("topology", "--size", "3"), "--size: 3 MB is no multiple of 64 tokens"),
        (("fairness", "--size", "8"), "--size: 8 MB is no multiple of a block"),
    ],
)
def test_options_that_cannot_be_measured_are_refused(words: tuple[str, ...], message: str) -> None:
    command = [sys.executable, "-m", "kvflow.cli.main", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr
