"""Which class of device a cache has: by what torch was built for, and by whether it has streams and events there."""

from __future__ import annotations

from kvflow.core.cache.regions import Device
from kvflow.errors import ConfigError
from kvflow.transport.device.cache_device import CacheDevice
from kvflow.transport.device.cuda import is_rocm

_WITHOUT_STREAMS = (
    "a cache on {name}: this torch ({version}) has no streams and events for {kind!r}, so kvflow cannot copy its "
    "blocks: {error}. Pass copy_blocks, the engine's own function, to register_kv_caches"
)


def make_device(where: Device, *, engine_copies: bool) -> CacheDevice:
    """Make the device of a cache, on the copy thread.

    Args:
        where: the device.
        engine_copies: whether the engine's own function copies blocks, so that a device without streams will do.

    Raises:
        ConfigError: kvflow cannot copy there.
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
