"""Checks of a CUDA machine: whether loads between GPUs will be fast, and which setting to change. Without I/O.

How UCX and NIXL use these facts was read in their sources (NIXL 1.5.1 and its UCX 1.23), not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from kvflow.bench.ucx import ReadPath
from kvflow.checks import counted
from kvflow.doctor.cuda.facts import HOST_PID_NAMESPACE, Cuda
from kvflow.doctor.cuda.nvidia import NEAR_DISTANCES
from kvflow.doctor.findings import Finding, fail, ok, warn
from kvflow.doctor.host import Host
from kvflow.doctor.nixl_transfer import path_not_logged
from kvflow.transport.device.cuda import WRITES_ORDERING_OWNER

_GET_ZCOPY = "UCX_CUDA_IPC_ENABLE_GET_ZCOPY"
_OFF_VALUES = ("n", "no", "off", "0")
_INSTALL_TORCH = "install a build of torch for a CUDA that the driver runs"


def check_driver(name: str, _: Host, cuda: Cuda) -> Finding:
    """Check that the driver supports torch's CUDA version, and that the loaded NIXL is the build for that version."""
    driver, probe = cuda.driver, cuda.probe
    if driver is None:
        return fail(name, "nvidia-smi does not answer", "containers: --gpus all, with the NVIDIA container toolkit")
    says = "unknown" if cuda.driver_cuda is None else ".".join(map(str, cuda.driver_cuda))
    found = f"driver {driver} for CUDA {says}; torch {probe.torch or 'not loaded'} for CUDA {probe.torch_cuda}"
    if probe.problem:
        return fail(name, f"{found}; {probe.problem}", "torch and NIXL must load: see NIXL above")
    if probe.torch_cuda is None:
        return fail(name, f"{found}: a build without CUDA", _INSTALL_TORCH)
    if not probe.devices:
        return fail(name, f"{found}; torch sees no device", "check CUDA_VISIBLE_DEVICES, and that the driver is as new")
    torch_major = int(probe.torch_cuda.partition(".")[0])
    if cuda.driver_cuda is not None and torch_major > cuda.driver_cuda[0]:
        return fail(name, f"{found}: newer than the driver", f"update the driver, or {_INSTALL_TORCH}")
    wanted = f"nixl_cu{torch_major}"
    builds = ", ".join(cuda.nixl_builds) or "none"
    if probe.nixl != wanted:
        fix = f"pip install {wanted.replace('_', '-')}: UCX of another CUDA cannot reach torch's memory"
        return fail(name, f"{found}; NIXL loads {probe.nixl or 'nothing'} (installed: {builds})", fix)
    return ok(name, f"{found}; NIXL loads {probe.nixl}")


def check_gpus(name: str, _: Host, cuda: Cuda) -> Finding:
    """Check compute mode and MIG of the GPUs.

    Compute mode may forbid two engines on one GPU. MIG instances have no cuda_ipc.
    """
    gpus = cuda.gpus
    found = "; ".join(
        f"{number}: {gpu.name}, {gpu.memory_mib} MiB, {counted(cuda.nvlinks.get(number, 0), 'NVLink')}"
        for number, gpu in enumerate(gpus)
    )
    if any(gpu.compute_mode == "Prohibited" for gpu in gpus):
        return fail(name, f"{found}; compute mode Prohibited", "nvidia-smi -c DEFAULT")
    if any(gpu.compute_mode == "Exclusive_Process" for gpu in gpus):
        fix = "nvidia-smi -c DEFAULT where two engines share a GPU"
        return warn(name, f"{found}; compute mode Exclusive_Process: one process a GPU", fix)
    if any(gpu.mig for gpu in gpus):
        fix = "engines of one machine that are to use cuda_ipc need whole GPUs; RDMA works from MIG instances"
        return warn(name, f"{found}; MIG is on: instances have no cuda_ipc", fix)
    return ok(name, found or "none")


def check_allocator(name: str, _: Host, cuda: Cuda) -> Finding:
    """Check that torch's CUDA allocator does not use expandable segments.

    cuda_ipc cannot open expandable segments, and memory that a segment gains later is not registered with NIXL.
    """
    given = [
        f"{key}={cuda.environment[key]}"
        for key in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
        if key in cuda.environment
    ]
    if any("expandable_segments:true" in one.lower().replace(" ", "") for one in given):
        fix = "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False for engines: cuda_ipc cannot open such memory"
        return fail(name, ", ".join(given), fix)
    return ok(name, ", ".join(given) or "torch's default")


def check_ucx_variables(name: str, _: Host, cuda: Cuda) -> Finding:
    """Check the environment for UCX settings that prevent or slow down UCX's access to GPU memory."""
    given = {key: value for key, value in cuda.environment.items() if key.startswith("UCX_")}
    found = ", ".join(f"{key}={value}" for key, value in given.items()) or "none is set"
    lacking = left_out_transports(given.get("UCX_TLS", ""))
    if "cuda_copy" in lacking:
        return fail(
            name, found, "UCX_TLS without cuda_copy cannot touch GPU memory: unset it, or add cuda_copy,cuda_ipc"
        )
    if lacking:
        return warn(name, found, "UCX_TLS without cuda_ipc: engines of one machine fall back to tcp; add cuda_ipc")
    if given.get(_GET_ZCOPY, "").lower() in _OFF_VALUES:
        return warn(name, found, f"{_GET_ZCOPY}=on: kvflow reads, and without it GPUs without NVLink are read over tcp")
    if given.get("UCX_CUDA_IPC_CACHE", "").lower() in _OFF_VALUES:
        return warn(name, found, "unset UCX_CUDA_IPC_CACHE: without it every read opens and closes the peer's memory")
    return ok(name, found)


def left_out_transports(tls: str) -> tuple[str, ...]:
    """Return which of the transports cuda_copy and cuda_ipc a value of UCX_TLS does not enable.

    `tls`: the value; `cuda` and `all` in it enable both.
    """
    if not tls:
        return ()
    words = [word.strip() for word in tls.lstrip("^").split(",")]
    both = ("cuda_copy", "cuda_ipc")
    if tls.startswith("^"):
        return both if "cuda" in words else tuple(one for one in both if one in words)
    return () if {"all", "cuda"} & set(words) else tuple(one for one in both if one not in words)


def check_registration(name: str, host: Host, cuda: Cuda) -> Finding:
    """Check that RDMA can register GPU memory, through nvidia_peermem or dma-buf.

    gdrcopy is not checked: the UCX in NIXL's wheels is built without gdr_copy, and a read does not need it.
    """
    supported = {"nvidia_peermem is loaded": cuda.peermem, "dma-buf is supported": cuda.dmabuf}
    ways = [way for way, usable in supported.items() if usable]
    if not host.rdma_devices:
        return ok(name, "no RDMA devices; between machines reads go over tcp, which copies through host memory")
    if not ways:
        kernel = "unknown" if cuda.kernel is None else ".".join(map(str, cuda.kernel))
        fix = "modprobe nvidia_peermem, or the open kernel modules of the driver with Linux 5.12 or newer"
        return fail(name, f"neither nvidia_peermem nor dma-buf (kernel {kernel}): RDMA cannot reach GPU memory", fix)
    return ok(name, f"{' and '.join(ways)}; gdrcopy is not needed")


def check_bar1(name: str, host: Host, cuda: Cuda) -> Finding:
    """Check that BAR1, the PCIe window through which RDMA reaches GPU memory, is large enough.

    kvflow registers a cache twice; with some drivers both registrations take space in BAR1.
    """
    gpus = [gpu for gpu in cuda.gpus if gpu.bar1_mib and gpu.memory_mib]
    found = "; ".join(f"{gpu.bar1_mib} MiB for {gpu.memory_mib} MiB of memory" for gpu in gpus) or "unknown"
    if not host.rdma_devices:
        return ok(name, f"{found}; only RDMA needs it")
    if any((gpu.bar1_mib or 0) < (gpu.memory_mib or 0) for gpu in gpus):
        return fail(
            name, found, "caches larger than BAR1 cannot be registered: turn on Resizable BAR (Above 4G decoding)"
        )
    if any((gpu.bar1_mib or 0) < 2 * (gpu.memory_mib or 0) for gpu in gpus):
        half = min((gpu.bar1_mib or 0) // 2 for gpu in gpus)
        return warn(name, found, f"a cache above {half} MiB may not fit twice: if registering fails, make it smaller")
    return ok(name, found)


def check_nic_distances(name: str, host: Host, cuda: Cuda) -> Finding:
    """Check that each GPU reaches an RDMA device through PCIe switches only, and that no IOMMU is on."""
    if not host.rdma_devices:
        return ok(name, "no RDMA devices")
    best = {gpu: [f"{nic} {how}" for nic, how in nics.items()] for gpu, nics in cuda.nic_distances.items()}
    found = (
        "; ".join(f"{gpu}: {', '.join(nics) or 'none'}" for gpu, nics in best.items())
        or "nvidia-smi does not report it"
    )
    far = [gpu for gpu, nics in cuda.nic_distances.items() if not any(how in NEAR_DISTANCES for how in nics.values())]
    if far:
        fix = "reads cross a host bridge or a socket; choose the nearest NIC by UCX_NET_DEVICES for each rank"
        return warn(name, f"{found}; no near NIC for {', '.join(far)}", fix)
    if cuda.iommu:
        fix = "iommu=pt on the kernel's command line, and ACS off on the bridges, unless this is a virtual machine"
        return warn(name, f"{found}; an IOMMU is on: peer traffic may go through the root complex", fix)
    return ok(name, found)


def check_ordering(name: str, host: Host, cuda: Cuda) -> Finding:
    """Check that GPU kernels see the bytes of an RDMA read once the host has seen the end of the read.

    A load ends when the host sees the end of its last read.
    """
    ordering = cuda.writes_ordering
    if ordering is None:
        return ok(name, "the driver does not report it")
    if ordering >= WRITES_ORDERING_OWNER:
        return ok(name, f"{ordering}: seen by the device once the host has seen their end")
    if not host.rdma_devices:
        return ok(name, f"{ordering}; only RDMA depends on it, and there is no RDMA device")
    fix = "do not read into this device by RDMA: kernels may see old bytes; set staging='always'"
    return fail(name, f"{ordering}: a NIC's writes are not ordered with kernels", fix)


def check_sharing(name: str, _: Host, cuda: Cuda) -> Finding:
    """Check whether this engine can use cuda_ipc with engines in other containers.

    That needs a shared PID namespace or an IMEX channel.
    """
    where = "the machine's own" if cuda.pid_namespace == HOST_PID_NAMESPACE else "a container's"
    found = f"PID namespace: {where}; IMEX channels: {cuda.imex_channels}"
    if cuda.pid_namespace == HOST_PID_NAMESPACE or cuda.imex_channels:
        return ok(name, found)
    fix = (
        "engines in other containers have no cuda_ipc to this one: share the PID namespace and IPC "
        "(--pid=host --ipc=host; pods: hostPID and hostIPC, or shareProcessNamespace), or mount an IMEX channel"
    )
    return warn(name, found, fix)


CHECKS: Mapping[str, Callable[[str, Host, Cuda], Finding]] = {
    "CUDA": check_driver,
    "GPUs": check_gpus,
    "GPU memory allocator": check_allocator,
    "UCX and CUDA": check_ucx_variables,
    "GPUs and containers": check_sharing,
    "RDMA and GPU memory": check_registration,
    "BAR1": check_bar1,
    "NICs near GPUs": check_nic_distances,
    "order of RDMA writes": check_ordering,
}


def check_cuda(host: Host, cuda: Cuda) -> Iterator[Finding]:
    return (check(name, host, cuda) for name, check in CHECKS.items())


def judge_gpu_path(cuda: Cuda, name: str, path: ReadPath | None) -> Finding:
    """Return the finding `name` about `path`, the UCX path of reads between two processes with caches on GPUs.

    If the path is slow, the finding has the advice of `slow_path_advice`. `path` is None if UCX did not log it.
    """
    if path is None:
        return path_not_logged(name)
    if "software emulation" not in path.method and "tcp/" not in path.transport:
        return ok(name, str(path))
    return warn(name, f"{path}: the producer's process copies through host memory", "; ".join(slow_path_advice(cuda)))


def slow_path_advice(cuda: Cuda) -> list[str]:
    """Return advice for each fact that may keep two processes of one container from using cuda_ipc.

    Advice about the most certain cause comes first. The last advice is the fallback: staging in host memory.
    """
    found = []
    if any("expandable_segments:true" in value.lower() for value in cuda.environment.values()):
        found.append("expandable_segments is on: set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False")
    if left_out_transports(cuda.environment.get("UCX_TLS", "")):
        found.append("UCX_TLS leaves out transports of CUDA: unset it")
    if any(gpu.mig for gpu in cuda.gpus):
        found.append("MIG instances have no cuda_ipc: use whole GPUs")
    if not any(cuda.nvlinks.values()):
        found.append(f"without NVLink UCX reads by cuda_ipc only with {_GET_ZCOPY}=on")
    found.append(
        "if nothing else helps: staging='always' on both sides goes through shared host memory, which is faster"
    )
    return found
