"""Default settings of NIXL's backends, and for each kind of local device how long to poll for the end of a read."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import NamedTuple

_SETTINGS: Mapping[str, Mapping[str, str]] = {
    # Without the first setting UCX reads by cuda_ipc only over NVLink, and else emulates reads over tcp at a hundredth
    # of the speed. The second is the size of the frames that answer a read over tcp, by UCX's default 8 KiB; by default
    # UCX receives frames of up to 64 KiB. The third bounds a leak of UCX's cache of registrations, as in vLLM. The last
    # leaves out lanes that only a GPU's own kernels use: where one cannot connect, UCX gives up the whole peer.
    "UCX": {
        "CUDA_IPC_ENABLE_GET_ZCOPY": "on",
        "TCP_TX_SEG_SIZE": "64k",
        "RCACHE_MAX_UNRELEASED": "1024",
        "TLS": "^rc_gda",
    },
}
"""Default settings by NIXL backend. A key is the setting's environment variable without its prefix ("UCX_")."""

_EXCLUDED_BY: Mapping[str, str] = {"TCP_TX_SEG_SIZE": "TCP_RX_SEG_SIZE"}
"""Default settings (keys) that are left out if the user has set another setting (value).

UCX refuses to receive smaller frames than it sends.
"""

UNMAPPED_MEMORY: Mapping[str, str] = {"RCACHE_ENABLE": "n", "TLS": "^cuda_ipc"}
"""Settings of UCX for a cache whose memory is unmapped after `unregister`, as vLLM's NixlConnector has them.

UCX then keeps no registration in a cache, and peers on this machine do not map the memory, which would keep it in use.
NIXL separates settings by commas, so a setting has one value.
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
    "xpu": Polling(150e-6, 10e9),  # not tried: as CUDA
}


def backend_params(backend: str, params: Mapping[str, str]) -> dict[str, str]:
    """Return the parameters of NIXL backend `backend`: `params`, with default settings added to "engine_config".

    A default setting is left out if `params` or an environment variable has it.
    """
    config = add_settings(backend, params.get("engine_config", ""), _SETTINGS.get(backend, {}))
    return {**params, "engine_config": config} if config else dict(params)


def add_settings(backend: str, chosen: str, settings: Mapping[str, str]) -> str:
    """Return `chosen`, the value of "engine_config" of a NIXL backend, with `settings` added.

    A setting is left out if `chosen` or an environment variable has it.
    """
    known = {setting.partition("=")[0].strip() for setting in chosen.split(",")}
    known |= {name for name in (*settings, *_EXCLUDED_BY.values()) if f"{backend}_{name}" in os.environ}
    added = [
        f"{name}={value}" for name, value in settings.items() if known.isdisjoint({name, _EXCLUDED_BY.get(name, name)})
    ]
    return ",".join([chosen, *added] if chosen else added)
