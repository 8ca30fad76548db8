"""The text of each planted bug is in the package, and its finders exist. `python -m tests.planted` runs the finders."""

from __future__ import annotations

import ast

import pytest

from tests.planted.__main__ import ROOT, find
from tests.planted.bugs import BUGS, Bug
from tests.support.source_trees import parsed


@pytest.mark.parametrize("bug", BUGS.values(), ids=BUGS)
def test_a_bug_can_be_planted_and_has_finders(bug: Bug) -> None:
    assert find(ROOT, bug).is_file()
    for finder in bug.finders:
        path, _, name = finder.partition("::")
        names = {node.name for node in ast.walk(parsed(ROOT / path)) if hasattr(node, "name")}
        assert not name or {part.partition("[")[0] for part in name.split("::")} <= names, finder
