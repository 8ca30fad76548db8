"""Release lines: versions that kvflow speaks with, how they are recognised, and versions that are refused by name."""

from __future__ import annotations

import itertools

import pytest

from kvflow.errors import RequestError
from kvflow.stock.versions import LINES, line_of, line_of_metadata, line_of_params

VERSIONS = [line.version for line in LINES]


def test_the_table_goes_from_the_oldest_to_the_newest() -> None:
    assert [f"0.{minor}" for minor in range(26, 34)] == VERSIONS
    for earlier, later in itertools.pairwise(LINES):
        assert set(earlier.metadata) <= set(later.metadata)
        assert set(earlier.params) <= set(later.params)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_line_is_found_by_any_of_its_versions(version: str) -> None:
    for full in (version, f"{version}.0", f"{version}.1.post2", f"{version}.0+cu130"):
        assert line_of(full).version == version


@pytest.mark.parametrize("version", ["0.25.1", "0.34.0", "1.0", "0.3", "0", "", "main", "0.32x"])
def test_other_versions_are_refused_by_name(version: str) -> None:
    with pytest.raises(RequestError, match=r"0\.26 to 0\.33") as caught:
        line_of(version)
    assert repr(version) in str(caught.value)


@pytest.mark.parametrize("line", LINES, ids=VERSIONS)
def test_what_a_line_says_tells_it_as_far_as_that_matters(line: object) -> None:
    known = next(one for one in LINES if one is line)
    for found in (line_of_params([*known.params, "kvflow"]), line_of_metadata([*known.metadata, "later"])):
        assert found.number <= known.number
        assert found.reports_tp_size == known.reports_tp_size or found.version == "0.26"
    assert line_of_metadata(known.metadata).metadata == known.metadata
    assert line_of_params(known.params).params == known.params


def test_readers_are_counted_in_two_ways() -> None:
    assert [line.version for line in LINES if line.reports_tp_size] == ["0.26", "0.27", "0.28"]


def test_parameters_of_before_are_refused_by_name() -> None:
    older = [key for key in LINES[0].params if key != "remote_blocks_expiry_time"]
    with pytest.raises(RequestError, match=r"before 0\.26, whose listener does not know"):
        line_of_params(older)
