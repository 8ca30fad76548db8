"""Which `CacheDevice` a cache gets, and which `Mapper`.

torch and the driver are imported for other devices than the CPU alone.
"""

from __future__ import annotations

from kvflow.core.cache.regions import Device
from kvflow.errors import ConfigError
from kvflow.transport.device.cache_device import CacheDevice, is_rocm
from kvflow.transport.device.mapper import Mapper

_WITHOUT_STREAMS = (
    "a cache on {name}: this torch ({version}) has no streams and events for {kind!r}, so kvflow cannot copy its "
    "blocks: {error}. Pass copy_blocks, the engine's own function, to register_kv_caches"
)


def make_device(where: Device, *, engine_copies: bool) -> CacheDevice:
    """Return the `CacheDevice` for a cache on the device `where`. Call this on the copy thread.

    `engine_copies`: True if `copy_blocks`, a function of the engine, copies the blocks, so that no streams are needed.

    Raises:
        ConfigError: kvflow cannot copy blocks on this device.
    """
    if where.kind == "cpu":
        return CacheDevice(where)
    import torch

    if where.kind == "cuda" and not is_rocm():
        from kvflow.transport.device.cuda_device import CudaDevice  # loads the driver

        return CudaDevice(where)
    try:
        from kvflow.transport.device.accelerator import AcceleratorDevice

        return AcceleratorDevice(where)
    except (RuntimeError, AttributeError, TypeError) as error:
        if engine_copies:
            return CacheDevice(where)
        name = f"{where.kind}:{where.number}"
        text = _WITHOUT_STREAMS.format(name=name, kind=where.kind, version=torch.__version__, error=error)
        raise ConfigError(text) from error


def make_mapper(where: Device) -> Mapper:
    """Return what maps memory on the device `where` between processes. Call this on the agents' thread.

    Raises:
        ConfigError: memory of this kind of device cannot be mapped.
    """
    if where.kind != "cuda" or is_rocm():
        raise ConfigError(f"memory on {where.kind!r} cannot be mapped by other processes, only memory of NVIDIA's GPUs")
    from kvflow.transport.device.cuda_mapper import CudaMapper

    return CudaMapper(where)
