"""The form of the scripts in findings/, which nothing runs here."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "findings"
SCRIPTS = sorted(path for path in FOLDER.iterdir() if path.name != "README.md")
HEAD = ("# Version:  ", "# Expected: ", "# Seen:     ")
INSTALL = re.compile(r'pip" install --quiet --no-deps ((?:.+ \\\n)*.+)')
PINNED = re.compile(r"[a-z0-9-]+==[0-9][0-9a-z.]*")


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_finding_can_be_run_by_anybody_and_leaves_nothing(script: Path) -> None:
    text = script.read_text("utf-8")
    head = text.partition("\nset -euo pipefail\nfolder=$(mktemp -d)\ntrap 'rm -rf \"$folder\"' EXIT\n")[0]
    assert script.suffix == ".sh"
    assert os.access(script, os.X_OK)
    assert text.startswith("#!/usr/bin/env bash\n")
    assert [line for line in head.splitlines() if line.startswith(HEAD)], "what it is of, expected and seen"
    assert all(head.count(f"\n{begin}") == 1 for begin in HEAD)
    assert "kvflow" not in text.lower()
    assert "://" not in text.replace("tcp://", ""), "registries are pip's affair"
    installed = INSTALL.findall(text)
    assert len(installed) == 1
    assert all(map(PINNED.fullmatch, installed[0].replace("\\\n", "").split()))


def test_the_page_has_a_row_for_each_finding() -> None:
    rows = re.findall(r"^\| \[(\w+)\]\((\w+\.sh)\) \|.* \|.* \|.* \|$", (FOLDER / "README.md").read_text("utf-8"), re.M)
    assert rows == [(script.stem, script.name) for script in SCRIPTS]
    assert len(rows) >= 5
