"""Facts of a CUDA machine: from nvidia-smi, /proc and /sys, and from a child process that loads torch and NIXL.

All calls of the driver are in other processes, so a driver that hangs or crashes only leads to a finding.
"""

from __future__ import annotations

import contextlib
import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from kvflow.bench.child import BenchError, call_in_child
from kvflow.doctor.cuda.nvidia import Gpu, major_minor, read_devices, read_nic_distances, read_nvlinks
from kvflow.doctor.host import directory_entries
from kvflow.doctor.version import installed
from kvflow.transport.device.cuda import DriverError, load_driver

VARIABLES = (
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
    "CUDA_VISIBLE_DEVICES",
    "UCX_TLS",
    "UCX_CUDA_IPC_CACHE",
    "UCX_CUDA_IPC_ENABLE_GET_ZCOPY",
    "UCX_MAX_HCA_PER_GPU",
)
"""Environment variables that change how CUDA memory is allocated and moved."""
HOST_PID_NAMESPACE = "pid:[4026531836]"
"""Target of the link /proc/self/ns/pid in the host's PID namespace, the same on all hosts (PROC_PID_INIT_INO)."""
_IMEX_CHANNELS = "/dev/nvidia-caps-imex-channels"
_SMI_TIMEOUT_S = 30
_NIXL_BUILDS = ("nixl-cu12", "nixl-cu13")


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """Facts found by a child process that has loaded torch, NIXL and the CUDA driver."""

    torch: str = ""
    torch_cuda: str | None = None
    """CUDA version that torch is built for; None: built without CUDA."""
    devices: int = 0
    nixl: str = ""
    """Loaded build of NIXL, such as "nixl_cu13"."""
    attributes: Mapping[str, int | None] = field(default_factory=dict)
    """Values of the GPU's attributes from the driver, by attribute name."""
    problem: str = ""
    """Reason why the child process failed, or why the driver could not be loaded; "" if both succeeded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cuda:
    """Facts of a CUDA machine. A field is None if its fact is unknown."""

    driver: str | None
    driver_cuda: tuple[int, int] | None
    """Newest CUDA version that the driver supports."""
    gpus: tuple[Gpu, ...]
    nvlinks: Mapping[int, int]
    """Number of active NVLinks by GPU number."""
    nic_distances: Mapping[str, Mapping[str, str]]
    """Distance between GPU and NIC in nvidia-smi's words (PIX, PXB, ...), by GPU name, then by NIC name."""
    peermem: bool
    """True if the kernel module nvidia_peermem is loaded."""
    kernel: tuple[int, int] | None
    """Major and minor version of the Linux kernel."""
    iommu: bool
    pid_namespace: str
    """Target of this process's link /proc/self/ns/pid; `HOST_PID_NAMESPACE` outside of containers."""
    imex_channels: int
    """Number of IMEX channels (NVIDIA's memory sharing between containers and nodes) that this process sees."""
    nixl_builds: tuple[str, ...]
    """Names of the installed NIXL packages for CUDA, such as "nixl-cu13"."""
    environment: Mapping[str, str]
    """Values of those `VARIABLES` that are set, by name."""
    probe: Probe

    @property
    def writes_ordering(self) -> int | None:
        return self.probe.attributes.get("GPUDirect RDMA writes ordering")

    @property
    def dmabuf(self) -> bool:
        """True if RDMA can register GPU memory through dma-buf, without nvidia_peermem.

        The driver has to report support, and Linux has to be 5.12 or newer.
        """
        new_enough = self.kernel is not None and self.kernel >= (5, 12)
        return new_enough and bool(self.probe.attributes.get("DMA-BUF supported"))


def read_cuda() -> Cuda:
    driver, driver_cuda, gpus = read_devices(_nvidia_smi("-q", "-x"))
    return Cuda(
        driver=driver,
        driver_cuda=driver_cuda,
        gpus=gpus,
        nvlinks=read_nvlinks(_nvidia_smi("nvlink", "--status")),
        nic_distances=read_nic_distances(_nvidia_smi("topo", "-m")),
        peermem=os.path.isdir("/sys/module/nvidia_peermem"),
        kernel=major_minor(platform.release()),
        iommu=bool(directory_entries("/sys/class/iommu")),
        pid_namespace=_link_target("/proc/self/ns/pid"),
        imex_channels=len(directory_entries(_IMEX_CHANNELS)),
        nixl_builds=tuple(name for name in _NIXL_BUILDS if installed(name) != "not installed"),
        environment={name: os.environ[name] for name in VARIABLES if name in os.environ},
        probe=run_probe(),
    )


def _nvidia_smi(*arguments: str) -> str:
    """Run `nvidia-smi` with `arguments`, and return its output; "" if it cannot be run or hangs."""
    command = ["nvidia-smi", *arguments]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=_SMI_TIMEOUT_S, check=False).stdout
    return ""


def _link_target(path: str) -> str:
    with contextlib.suppress(OSError):
        return str(Path(path).readlink())
    return ""


def run_probe() -> Probe:
    """Start a child process that loads torch, NIXL and the CUDA driver, and return the facts that it finds."""
    try:
        return cast(Probe, call_in_child("CUDA", _read_in_child))
    except BenchError as error:
        return Probe(problem=error.reason)


def _read_in_child() -> Probe:
    import sys

    import torch

    from kvflow.transport.nixl.native import import_bindings

    import_bindings()  # loads the NIXL build for torch's CUDA version
    try:
        attributes, problem = load_driver().attributes(), ""
    except DriverError as error:
        attributes, problem = {}, str(error)
    return Probe(
        torch=torch.__version__,
        torch_cuda=torch.version.cuda,
        devices=torch.cuda.device_count(),
        nixl=next((name for name in ("nixl_cu13", "nixl_cu12") if name in sys.modules), ""),
        attributes=attributes,
        problem=problem,
    )
