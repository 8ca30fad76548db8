"""Events behind what an engine has launched, on whatever device its cache is."""

from __future__ import annotations

from kvflow.core.cache.regions import Device
from kvflow.core.policy.events import DeviceEvent


def record_event(where: Device) -> DeviceEvent | None:
    """Record an event behind all that this thread has launched on its current stream of a device, its current one.

    Returns:
        The event, as `ServeRequest.ready` and `LoadRequest.after` take it. None for the CPU, which has done what it was
        told, and for a kind of device for which torch has no events: copies of such a device are the engine's own.
    """
    if where.kind == "cpu":
        return None
    import torch

    if where.kind == "cuda":  # torch's own name for AMD's devices, too
        on_cuda = torch.cuda.Event()  # type: ignore[no-untyped-call]
        on_cuda.record()
        return on_cuda
    name = f"{where.kind}:{where.number}"
    try:
        event = torch.Event(name)
        event.record(torch.accelerator.current_stream(name))
    except (RuntimeError, AttributeError):
        return None
    return event
