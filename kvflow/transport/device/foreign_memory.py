"""Tensors over memory at an address that another library owns: on the CPU, CUDA, or a device with DLPack in torch."""

from __future__ import annotations

import ctypes

import torch

from kvflow.errors import ConfigError

# Device types of DLPack, from dlpack.h.
_XPU, _PRIVATEUSE1 = 14, 12
_NAME = b"dltensor"


class _Memory(ctypes.Structure):
    """The C struct DLManagedTensor for one axis of bytes. It has no deleter, since another library owns the memory."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_number", ctypes.c_int32),
        ("axes", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class OnCuda:
    """Memory on a CUDA device, with the `__cuda_array_interface__` from which torch makes a tensor of bytes."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"data": (pointer, False), "shape": (size,), "typestr": "|u1", "version": 3}


_described: list[_Memory] = []
"""DLPack structures that torch may still read. They are kept until the process ends."""


def bytes_at(pointer: int, size: int, device: str) -> torch.Tensor:
    """Return a tensor of bytes over the existing memory at address `pointer`, which must outlive the tensor.

    `device`: torch's name of the device; without a number, the current device of that kind.

    Raises:
        ConfigError: torch cannot make a tensor from an address on this kind of device.
    """
    where = torch.device(device)
    if where.type == "cpu":
        return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)
    if where.type == "cuda":
        return torch.as_tensor(OnCuda(pointer, size), device=device)
    kinds = {"xpu": _XPU, torch._C._get_privateuse1_backend_name(): _PRIVATEUSE1}
    if where.type not in kinds:
        known = sorted({"cpu", "cuda", *kinds})
        raise ConfigError(f"torch cannot make a tensor from an address on {device!r}, only on {known}")
    number = torch.accelerator.current_device_index() if where.index is None else where.index
    memory = _Memory(
        data=pointer,
        device_type=kinds[where.type],
        device_number=number,
        axes=1,
        type_code=1,  # unsigned integers
        type_bits=8,
        type_lanes=1,
        shape=ctypes.pointer(ctypes.c_int64(size)),
    )
    _described.append(memory)
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    tensor: torch.Tensor = torch.utils.dlpack.from_dlpack(capsule(ctypes.addressof(memory), _NAME, None))
    return tensor
