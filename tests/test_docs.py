"""The docs say what the code does."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from kvflow import Config, errors
from kvflow.core.states import CONSUMER_TABLE, LEASE_TABLE, PEER_TABLE, PRODUCER_TABLE, TRANSFER_TABLE, mermaid

ROOT = Path(__file__).parents[1]
TABLES = {
    "peer": PEER_TABLE,
    "lease": LEASE_TABLE,
    "transfer": TRANSFER_TABLE,
    "consumer": CONSUMER_TABLE,
    "producer": PRODUCER_TABLE,
}
DIAGRAMS = {name: mermaid(table) for name, table in TABLES.items()}


@pytest.mark.parametrize("name", DIAGRAMS)
def test_state_diagrams_are_those_of_the_tables(name: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    match = re.search(rf"<!-- states:{name} -->\n(.*?)<!-- /states -->", text, re.DOTALL)
    assert match is not None
    assert match[1] == f"```mermaid\n{DIAGRAMS[name]}\n```\n", f"put this there:\n{DIAGRAMS[name]}"


def test_links_between_the_docs_lead_somewhere() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_modules_named_in_the_architecture_exist() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    house = text.split("## Tasks")[0]
    for folder, name in re.findall(r"`((?:core|transport|runtime)/)?(\w+\.py)`", house):
        found = list((ROOT / "kvflow" / folder).rglob(name))
        assert found, f"{folder}{name}"


def test_settings_named_in_operations_exist() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    tuned = text.split("## What to tune")[1].split("## ")[0]
    named = re.findall(r"^\| `(\w+)`", tuned, re.MULTILINE)
    assert len(named) > 5
    assert set(named) <= {field.name for field in fields(Config)}


GROUPS = {errors.KVFlowError, errors.InvalidInput, errors.RuntimeUnavailable, errors.PeerError, errors.LoadError}


def test_operations_says_of_each_error_what_the_error_says() -> None:
    text = (ROOT / "docs" / "operations.md").read_text()
    table = text.split("## What errors mean")[1].split("## ")[0]
    said = {}
    for names, whose, again in re.findall(r"^\| (`[^|]*) \| (\w+) \| (\w[\w ]*) \|", table, re.MULTILINE):
        said |= dict.fromkeys(re.findall(r"`(\w+)`", names), (whose, again))
    raised = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, errors.KVFlowError) and kind not in GROUPS
    }
    assert said == {kind.__name__: (str(kind.blame), "retry" if kind.retryable else "do not retry") for kind in raised}
    assert all(f"`{kind.__name__}`" in table for kind in GROUPS)
