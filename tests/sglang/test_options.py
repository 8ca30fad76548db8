"""No option of SGLang changes what a page index means unnoticed: each is handled, refused, or without effect."""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("sglang", reason="SGLang is not installed: python3 dev.py sglang")

import sglang.srt.disaggregation.utils  # noqa: F401 - first: its modules import each other
from sglang.srt.server_args import ServerArgs

from kvflow.sglang.server_settings import REFUSED_OPTIONS
from tests.sglang.options import HANDLED, INDIFFERENT


def test_each_field_of_the_installed_sglang_is_in_one_table() -> None:
    fields = {field.name for field in msgspec.structs.fields(ServerArgs)}
    refused = [option.option.lstrip("-").replace("-", "_") for option in REFUSED_OPTIONS]
    found = [*HANDLED, *refused, *(name for names in INDIFFERENT.values() for name in names.split())]
    assert len(found) == len({*found}), "in two tables"
    assert not fields - {*found}, "what does this mean for pages? Handle or refuse it, or say that it has no effect"
    assert not {*found} - fields, "SGLang has no such option"


@pytest.mark.parametrize("test", sorted({*HANDLED.values()}))
def test_what_is_handled_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    assert re.search(rf"^def {name}\(", (Path(__file__).parent / file).read_text(), re.MULTILINE)
