"""Which buffer devices serve which caches."""

from __future__ import annotations

import pytest

from kvflow.errors import ConfigError
from kvflow.transport.base import BUFFER_DEVICES, choose_buffer_device


@pytest.mark.parametrize(
    ("device", "best", "possible"),
    [("cpu", "cpu", {"cpu"}), ("cuda", "cuda", {"cuda", "cpu"}), ("tpu", "cpu", {"cpu"}), ("xpu", "cpu", {"cpu"})],
)
def test_the_table(device: str, best: str, possible: set[str]) -> None:
    assert choose_buffer_device(device, None) == best
    assert {choose_buffer_device(device, wanted) for wanted in possible} == possible
    for wanted in {"cpu", "cuda", "tpu"} - possible:
        with pytest.raises(ConfigError, match=f"'{wanted}' cannot serve a cache on '{device}'"):
            choose_buffer_device(device, wanted)


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device 'tape' is not supported") as caught:
        choose_buffer_device("tape", None)
    assert all(device in str(caught.value) for device in BUFFER_DEVICES)
