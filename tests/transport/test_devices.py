"""Which caches go through host buffers."""

from __future__ import annotations

import pytest

from kvflow.errors import ConfigError
from kvflow.transport.base import DEVICES, is_staged


@pytest.mark.parametrize(("device", "reached"), [("cpu", True), ("cuda", True), ("tpu", False), ("xpu", False)])
def test_staging(device: str, reached: bool) -> None:
    assert is_staged(device, "auto") is not reached
    assert is_staged(device, "always")
    if reached:
        assert not is_staged(device, "never")
    else:
        with pytest.raises(ConfigError, match=f"^staging: 'never', .* '{device}'"):
            is_staged(device, "never")


def test_an_unknown_device_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="device 'tape' is not supported") as caught:
        is_staged("tape", "auto")
    assert all(device in str(caught.value) for device in DEVICES)
