"""Default settings of NIXL's backends, and for each kind of local device how long to poll for the end of a read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

_SETTINGS: Mapping[str, Mapping[str, str]] = {
    # Without the first setting UCX reads by cuda_ipc only over NVLink, and else emulates reads over tcp at a hundredth
    # of the speed. The second is the size of the frames that answer a read over tcp, by UCX's default 8 KiB; by default
    # UCX receives frames of up to 64 KiB.
    "UCX": {"CUDA_IPC_ENABLE_GET_ZCOPY": "on", "TCP_TX_SEG_SIZE": "64k"},
}
"""Default settings by NIXL backend. A key is the setting's environment variable without its prefix ("UCX_")."""

_EXCLUDED_BY: Mapping[str, str] = {"TCP_TX_SEG_SIZE": "TCP_RX_SEG_SIZE"}
"""Default settings (keys) that are left out if the user has set another setting (value).

UCX refuses to receive smaller frames than it sends.
"""


class Polling(NamedTuple):
    """How long to busy-poll for the end of a read: `spin_s`, plus a time that grows with the size of the read."""

    spin_s: float
    bytes_per_s: float
    """Expected speed of a read. Twice the time that the read takes at this speed is added to `spin_s`."""

    def until_s(self, size_bytes: int) -> float:
        return self.spin_s + 2 * size_bytes / self.bytes_per_s


POLLING: Mapping[str, Polling] = {
    # Shared memory is read by the call that posts the read; tcp is faster with pauses.
    "cpu": Polling(150e-6, math.inf),
    # NVLink and RDMA progress only while polled, and end soon: a read of 32 MiB is polled for 7 ms.
    "cuda": Polling(150e-6, 10e9),
}


def backend_params(backend: str, given: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of NIXL backend `backend`: `given`, with default settings added to "engine_config".

    A default setting is left out if `given` or an environment variable has it.
    """
    params = dict(given)
    chosen = params.get("engine_config", "")
    ours = [
        f"{name}={value}"
        for name, value in _SETTINGS.get(backend, {}).items()
        if not any(one in chosen or f"{backend}_{one}" in os.environ for one in (name, _EXCLUDED_BY.get(name, name)))
    ]
    if ours:
        params["engine_config"] = ",".join([chosen, *ours] if chosen else ours)
    return params
