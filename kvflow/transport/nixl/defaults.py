"""Defaults of NIXL and its polling: by backend, and by the kind of memory that is read into."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

_SETTINGS: Mapping[str, Mapping[str, str]] = {
    # UCX reads over cuda_ipc only where it finds NVLink; without this it emulates reads over tcp at a hundredth.
    # A read over tcp is answered in frames of so much, 8 KiB otherwise; UCX takes 64 KiB if it is told nothing.
    "UCX": {"CUDA_IPC_ENABLE_GET_ZCOPY": "on", "TCP_TX_SEG_SIZE": "64k"},
}
"""Settings by backend: the library's own, without the prefix that its environment variables have."""

_BESIDE: Mapping[str, str] = {"TCP_TX_SEG_SIZE": "TCP_RX_SEG_SIZE"}
"""Settings that are left alone, too, where another one was chosen: UCX refuses to receive less than it sends."""


class Polling(NamedTuple):
    """Polling for a read's end without a pause: for `spin_s`, and longer for a large one."""

    spin_s: float
    bytes_per_s: float
    """A read of this speed is polled for twice as long as it takes."""

    def until_s(self, size_bytes: int) -> float:
        return self.spin_s + 2 * size_bytes / self.bytes_per_s


POLLING: Mapping[str, Polling] = {
    # Shared memory is read by the call that posts; tcp is faster when it is left alone.
    "cpu": Polling(150e-6, math.inf),
    # NVLink and RDMA need polling to go on, and end soon: a read of 32 MiB is polled for 7 ms.
    "cuda": Polling(150e-6, 10e9),
}


def backend_params(backend: str, given: Mapping[str, str]) -> dict[str, str]:
    """The backend's parameters: those that were given, and our settings that neither they nor the environment have."""
    params = dict(given)
    chosen = params.get("engine_config", "")
    ours = [
        f"{name}={value}"
        for name, value in _SETTINGS.get(backend, {}).items()
        if not any(one in chosen or f"{backend}_{one}" in os.environ for one in (name, _BESIDE.get(name, name)))
    ]
    if ours:
        params["engine_config"] = ",".join([chosen, *ours] if chosen else ours)
    return params
