"""Which caches go through host buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kvflow.config import Config
from kvflow.errors import ConfigError
from kvflow.runtime.world import make_transport
from kvflow.transport.base import is_staged
from kvflow.transport.nixl import native

REACHED = {"cpu": True, "cuda": True, "xpu": False}
OTHERS = ("hpu", "npu", "tpu", "xla", "neuron", "privateuseone", "rbln", "gcu", "tape")


@pytest.mark.parametrize(("device", "reached"), [*REACHED.items(), *((kind, False) for kind in OTHERS)])
def test_staging(device: str, reached: bool) -> None:
    """A device of an unknown kind is staged as others are."""
    assert is_staged(device, "auto") is not reached
    assert is_staged(device, "always")
    if reached:
        assert not is_staged(device, "never")
    else:
        with pytest.raises(ConfigError, match=f"^staging: 'never', .* '{device}'"):
            is_staged(device, "never")


def test_the_transport_may_reach_more_and_less_than_usual() -> None:
    assert not is_staged("xpu", "never", True)
    assert is_staged("cuda", "auto", False)


def test_tensors_without_memory_are_refused() -> None:
    with pytest.raises(ConfigError, match="device 'meta' is not supported"):
        is_staged("meta", "auto", False)


# --- what NIXL's UCX was built for


@pytest.fixture
def loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of UCX's libraries that this process seems to have loaded."""
    library = tmp_path / "my libs" / "libuct-1141f529.so.0.0.0"
    (library.parent / "ucx").mkdir(parents=True)
    maps = tmp_path / "maps"
    maps.write_text(f"7f00-7f10 r-xp 00000000 fe:00 123    {library}\n7f20-7f30 rw-p 00000000 00:00 0\n")
    monkeypatch.setattr(native, "_MAPS", maps)
    return library.parent


def test_xpu_is_reached_by_a_ucx_that_was_built_for_it(loaded: Path) -> None:
    assert native.readable_kinds() == {"xpu": False}
    (loaded / "ucx" / "libuct_ze.so.0").touch()
    assert native.readable_kinds() == {"xpu": True}


@pytest.mark.parametrize("where", [".", "ucx"])
def test_amds_devices_are_called_cuda_and_need_a_ucx_of_their_own(
    loaded: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert native.readable_kinds() == {"xpu": False, "cuda": False}
    (loaded / where / "libuct_rocm.so").touch()
    assert native.readable_kinds() == {"xpu": False, "cuda": True}


@pytest.mark.nixl
async def test_what_nixl_says_here() -> None:
    """The wheel's UCX reaches CUDA's devices, and no others."""
    transport = make_transport(Config(engine_id="any", transport="nixl"), "any")
    await transport.open()
    assert {kind: transport.reaches(kind) for kind in (*REACHED, "tape")} == {**REACHED, "tape": False}
    await transport.aclose(60.0)
