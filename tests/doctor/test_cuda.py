"""`kvflow doctor` on machines with GPUs: what it reads from nvidia-smi, its findings, and one transfer.

The outputs of nvidia-smi here were written by hand, after its documented formats; they were not recorded on a machine.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests_support import each

from kvflow.bench.ucx import ReadPath
from kvflow.doctor.cuda.cuda_checks import check_cuda, judge_gpu_path, left_out_transports, slow_path_advice
from kvflow.doctor.cuda.facts import HOST_PID_NAMESPACE, Cuda, Probe, run_probe
from kvflow.doctor.cuda.nvidia import Gpu, major_minor, read_devices, read_nic_distances, read_nvlinks
from kvflow.doctor.findings import Status
from kvflow.doctor.host import Host
from kvflow.doctor.nixl_transfer import check_mapped_transfer, check_self_transfer, judge_mapping
from kvflow.doctor.run import examine
from kvflow.transport.device.cuda import DriverError, load_driver

from .test_doctor import CONFIG, GOOD, assert_found

OK, WARN, FAIL = Status.OK, Status.WARN, Status.FAIL

# --- what nvidia-smi prints

DEVICES = """<?xml version="1.0" ?>
<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">
<nvidia_smi_log>
    <timestamp>Mon Nov  2 10:15:03 2026</timestamp>
    <driver_version>580.159.04</driver_version>
    <cuda_version>13.0</cuda_version>
    <attached_gpus>2</attached_gpus>
    <gpu id="00000000:19:00.0">
        <product_name>NVIDIA H100 80GB HBM3</product_name>
        <mig_mode>
            <current_mig>Disabled</current_mig>
            <pending_mig>Disabled</pending_mig>
        </mig_mode>
        <fb_memory_usage>
            <total>81559 MiB</total>
            <used>0 MiB</used>
        </fb_memory_usage>
        <bar1_memory_usage>
            <total>131072 MiB</total>
            <used>1 MiB</used>
        </bar1_memory_usage>
        <compute_mode>Default</compute_mode>
    </gpu>
    <gpu id="00000000:3B:00.0">
        <product_name>NVIDIA L4</product_name>
        <mig_mode>
            <current_mig>N/A</current_mig>
            <pending_mig>N/A</pending_mig>
        </mig_mode>
        <fb_memory_usage>
            <total>23034 MiB</total>
        </fb_memory_usage>
        <bar1_memory_usage>
            <total>N/A</total>
        </bar1_memory_usage>
        <compute_mode>Exclusive_Process</compute_mode>
    </gpu>
</nvidia_smi_log>
"""

NVLINKS = (
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-01234567-89ab-cdef-0123-456789abcdef)\n"
    "\t Link 0: 26.562 GB/s\n"
    "\t Link 1: 26.562 GB/s\n"
    "\t Link 2: <inactive>\n"
    "GPU 1: NVIDIA L4 (UUID: GPU-11234567-89ab-cdef-0123-456789abcdef)\n"
)

TOPOLOGY = (
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tNIC1\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m\n"
    "GPU0\t X \tNV18\tPXB\tSYS\t0-47\t0\t\tN/A\n"
    "GPU1\tNV18\t X \tSYS\tNODE\t48-95\t1\t\tN/A\n"
    "NIC0\tPXB\tSYS\t X \tSYS\t\t\t\t\n"
    "NIC1\tSYS\tNODE\tSYS\t X \t\t\t\t\n"
    "\n"
    "Legend:\n\n"
    "  X    = Self\n"
    "  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)\n\n"
    "NIC Legend:\n\n"
    "  NIC0: mlx5_0\n"
    "  NIC1: mlx5_1\n"
)

H100 = Gpu(name="NVIDIA H100 80GB HBM3", memory_mib=81559, bar1_mib=131072, mig=False, compute_mode="Default")


def test_devices_are_read_from_the_report_in_xml() -> None:
    l4 = Gpu(name="NVIDIA L4", memory_mib=23034, bar1_mib=None, mig=None, compute_mode="Exclusive_Process")
    assert read_devices(DEVICES) == ("580.159.04", (13, 0), (H100, l4))
    older = DEVICES.replace("13.0", "N/A")
    assert read_devices(older) == ("580.159.04", None, (H100, l4))
    for nothing in ("", "NVIDIA-SMI has failed because it couldn't communicate with the driver.", "<html></html>"):
        assert read_devices(nothing) == (None, None, ())


def test_links_that_are_up_are_counted() -> None:
    assert read_nvlinks(NVLINKS) == {0: 2, 1: 0}
    assert read_nvlinks("") == {}


def test_how_near_nics_are_is_read_by_their_names() -> None:
    assert read_nic_distances(TOPOLOGY) == {
        "GPU0": {"mlx5_0": "PXB", "mlx5_1": "SYS"},
        "GPU1": {"mlx5_0": "SYS", "mlx5_1": "NODE"},
    }
    older = "\tGPU0\tmlx5_0\tCPU Affinity\nGPU0\t X \tPIX\t0-31\nmlx5_0\tPIX\t X \t\n"
    assert read_nic_distances(older) == {"GPU0": {"mlx5_0": "PIX"}}
    alone = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-15\tN/A\n"
    assert read_nic_distances(alone) == {"GPU0": {}}
    assert read_nic_distances("") == {}


def test_kernels_are_compared_by_numbers() -> None:
    assert [major_minor(told) for told in ("6.18.44-fc-v236-gpu", "5.4.0", "?")] == [(6, 18), (5, 4), None]


# --- what it means

ATTRIBUTES = {"DMA-BUF supported": 1, "GPUDirect RDMA writes ordering": 100}
PROBE = Probe(torch="2.11.0+cu130", torch_cuda="13.0", devices=1, nixl="nixl_cu13", attributes=ATTRIBUTES)
FINE = Cuda(
    driver="580.159.04",
    driver_cuda=(13, 0),
    gpus=(replace(H100, bar1_mib=262144),),
    nvlinks={0: 18},
    nic_distances={"GPU0": {"mlx5_0": "PIX"}},
    peermem=False,
    kernel=(6, 8),
    iommu=False,
    pid_namespace=HOST_PID_NAMESPACE,
    imex_channels=0,
    nixl_builds=("nixl-cu12", "nixl-cu13"),
    environment={},
    probe=PROBE,
)
NO_RDMA = replace(GOOD, rdma_devices=())


def gpu(**changes: Any) -> dict[str, Any]:
    return {"gpus": (replace(FINE.gpus[0], **changes),)}


def probed(**changes: Any) -> dict[str, Any]:
    return {"probe": replace(PROBE, **changes)}


def given(**variables: str) -> dict[str, Any]:
    return {"environment": variables}


ALLOCATOR, UCX, NICS = "GPU memory allocator", "UCX and CUDA", "NICs near GPUs"
EXPANDABLE = "max_split_size_mb:64,expandable_segments:True"
REGISTRATION, SHARING, ORDER = "RDMA and GPU memory", "GPUs and containers", "order of RDMA writes"
WITHOUT_DMABUF = probed(attributes={**ATTRIBUTES, "DMA-BUF supported": 0})
UNORDERED = probed(attributes={**ATTRIBUTES, "GPUDirect RDMA writes ordering": 0})


@each(
    ("host", "changes", "name", "status", "found", "fix"),
    [
        (GOOD, {}, "CUDA", OK, "NIXL loads nixl_cu13", ""),  # and no word of warning
        (GOOD, {"driver": None}, "CUDA", FAIL, "does not answer", "--gpus all"),
        (GOOD, probed(problem="cuInit failed: CUDA error 802"), "CUDA", FAIL, "CUDA error 802", "must load"),
        (GOOD, probed(torch_cuda=None), "CUDA", FAIL, "without CUDA", "build of torch"),
        (GOOD, probed(devices=0), "CUDA", FAIL, "torch sees no device", "CUDA_VISIBLE_DEVICES"),
        (GOOD, probed(torch_cuda="14.1"), "CUDA", FAIL, "newer than the driver", "update the driver"),
        (GOOD, probed(nixl="nixl_cu12"), "CUDA", FAIL, "NIXL loads nixl_cu12", "pip install nixl-cu13"),
        (GOOD, {}, "GPUs", OK, "0: NVIDIA H100 80GB HBM3, 81559 MiB, 18 NVLinks", ""),
        (GOOD, gpu(mig=True), "GPUs", WARN, "MIG is on", "whole GPUs"),
        (GOOD, gpu(compute_mode="Exclusive_Process"), "GPUs", WARN, "one process a GPU", "nvidia-smi -c DEFAULT"),
        (GOOD, gpu(compute_mode="Prohibited"), "GPUs", FAIL, "Prohibited", "nvidia-smi -c DEFAULT"),
        (
            GOOD,
            given(PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE),
            ALLOCATOR,
            FAIL,
            "expandable_seg",
            "expandable_segments:False",
        ),
        (GOOD, given(PYTORCH_ALLOC_CONF="max_split_size_mb:64"), ALLOCATOR, OK, "max_split", ""),
        (GOOD, given(UCX_TLS="tcp,self"), UCX, FAIL, "UCX_TLS=tcp,self", "add cuda_copy"),
        (GOOD, given(UCX_TLS="rc,cuda_copy"), UCX, WARN, "UCX_TLS=rc", "add cuda_ipc"),
        (GOOD, given(UCX_CUDA_IPC_ENABLE_GET_ZCOPY="n"), UCX, WARN, "ZCOPY=n", "ZCOPY=on"),
        (GOOD, given(UCX_CUDA_IPC_CACHE="n"), UCX, WARN, "CACHE=n", "unset UCX_CUDA_IPC_CACHE"),
        (GOOD, given(UCX_TLS="rc,cuda"), UCX, OK, "UCX_TLS=rc,cuda", ""),
        (GOOD, {}, SHARING, OK, "the machine's own", ""),
        (GOOD, {"pid_namespace": "pid:[4026532888]"}, SHARING, WARN, "a container's", "--pid=host"),
        (GOOD, {"pid_namespace": "pid:[4026532888]", "imex_channels": 1}, SHARING, OK, "channels: 1", ""),
        (GOOD, {}, REGISTRATION, OK, "dma-buf is supported; gdrcopy is not needed", ""),
        (GOOD, {"peermem": True, **WITHOUT_DMABUF}, REGISTRATION, OK, "nvidia_peermem is loaded", ""),
        (GOOD, WITHOUT_DMABUF, REGISTRATION, FAIL, "neither", "modprobe nvidia_peermem"),
        (GOOD, {"kernel": (5, 4)}, REGISTRATION, FAIL, "kernel 5.4", "Linux 5.12"),
        (NO_RDMA, WITHOUT_DMABUF, REGISTRATION, OK, "no RDMA devices", ""),
        (GOOD, gpu(bar1_mib=256), "BAR1", FAIL, "256 MiB for 81559 MiB", "Resizable BAR"),
        (GOOD, gpu(bar1_mib=131072), "BAR1", WARN, "131072 MiB", "above 65536 MiB"),
        (NO_RDMA, gpu(bar1_mib=256), "BAR1", OK, "only RDMA", ""),
        (GOOD, {"nic_distances": {"GPU0": {"mlx5_0": "SYS"}}}, NICS, WARN, "no near NIC for GPU0", "UCX_NET_DEV"),
        (GOOD, {"iommu": True}, NICS, WARN, "an IOMMU is on", "iommu=pt"),
        (GOOD, {"nic_distances": {}}, NICS, OK, "does not report it", ""),
        (GOOD, UNORDERED, ORDER, FAIL, "not ordered", "staging='always'"),
        (NO_RDMA, UNORDERED, ORDER, OK, "there is no RDMA device", ""),
        (GOOD, probed(attributes={"DMA-BUF supported": 1}), ORDER, OK, "does not report it", ""),
    ],
)
def test_each_trouble_of_a_gpu_machine_is_found_and_has_its_fix(
    host: Host, changes: dict[str, Any], name: str, status: Status, found: str, fix: str
) -> None:
    findings = check_cuda(host, replace(FINE, **changes))
    assert_found(findings, name, status, found, fix, besides=["BAR1"] if "gpus" in changes else ())


def test_what_ucx_tls_leaves_out() -> None:
    lacking = dict.fromkeys(("tcp", "^cuda"), ("cuda_copy", "cuda_ipc"))
    lacking |= dict.fromkeys(("tcp,cuda_copy,self", "^cuda_ipc"), ("cuda_ipc",))
    lacking |= dict.fromkeys(("", "all", "rc,cuda", "^tcp"), ())
    assert {tls: left_out_transports(tls) for tls in lacking} == lacking


def test_a_slow_way_between_gpus_comes_with_its_reasons() -> None:
    assert judge_gpu_path(FINE, "way", ReadPath("zero-copy", "cuda_ipc/cuda")).status is OK
    assert judge_gpu_path(FINE, "way", ReadPath("zero-copy", "rc_mlx5/mlx5_0:1")).status is OK
    slow = ReadPath("software emulation", "tcp/eth0")
    alone = judge_gpu_path(FINE, "way", slow)
    assert (alone.status, alone.fix.startswith("if nothing else helps: staging='always'")) == (WARN, True)
    troubles = given(UCX_TLS="tcp", PYTORCH_CUDA_ALLOC_CONF=EXPANDABLE)
    said = slow_path_advice(replace(FINE, nvlinks={0: 0}, **gpu(mig=True), **troubles))
    for number, word in enumerate(("expandable_segments:False", "UCX_TLS", "MIG", "GET_ZCOPY=on", "staging")):
        assert word in said[number]
    assert judge_gpu_path(FINE, "way", None).status is WARN


# --- with real processes


def test_a_machine_without_cuda_is_asked_in_a_child_and_says_so() -> None:
    try:
        load_driver().attributes()
    except DriverError as error:
        reason = str(error)
    else:
        pytest.skip("this machine has a CUDA driver, so there is something to see")
    found = run_probe()
    assert (found.devices, found.problem) == (0, reason)
    assert found.torch


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_children")
def test_two_processes_hand_blocks_over_and_say_which_way() -> None:
    """On a CPU, to test the check's own code.

    Thorough: see `test_the_doctor_hands_blocks_over_and_says_which_way_they_went` of `doctor/test_doctor.py`.
    """
    check = partial(check_self_transfer, partial(judge_gpu_path, FINE), where=" on GPUs")
    transfer, way = check(device="cpu")
    assert "every byte compared" in transfer.found, transfer
    assert way.name == "path of the bytes on GPUs"
    (failed,) = check(device="no-device")
    assert (failed.name, failed.status) == ("self-transfer on GPUs", FAIL)


@pytest.mark.parametrize(
    ("mapped", "problem", "status", "found"),
    [
        (True, "", OK, "mapped: 300.00 GB/s; every byte compared"),
        (False, "it is in another container", WARN, "not mapped: it is in another container"),
        (False, "", WARN, "not mapped: there is no device memory"),
    ],
)
def test_memory_is_mapped_or_the_doctor_says_why_not(mapped: bool, problem: str, status: Status, found: str) -> None:
    finding = judge_mapping("memory mapped on GPUs", mapped, problem, 300e9)
    assert (finding.status, finding.found) == (status, found)


@pytest.mark.thorough
@pytest.mark.nixl
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("forked_children")
def test_two_processes_map_memory_or_say_why_not() -> None:
    """Thorough: see `test_memory_is_mapped_or_the_doctor_says_why_not` of this file."""
    assert check_mapped_transfer("mapped", "cpu").found == "not mapped: there is no device memory"
    assert check_mapped_transfer("mapped", "no-device").status == WARN


def test_a_machine_without_gpus_loads_nothing_of_this(monkeypatch: pytest.MonkeyPatch) -> None:
    code = """
import sys
from kvflow.config import Config
from kvflow.doctor import host, run
from kvflow.doctor.findings import ok
run.check_nixl = lambda: (ok("NIXL", "not asked"), ())
run.has_gpus = lambda host: False
names = [one.name for one in run.examine(Config(engine_id="e"), peer=None, peer_engine="", transfer=False, note=print)]
print(names[-1], *[name for name in sys.modules if name.startswith(("kvflow.doctor.cuda", "torch"))])
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "NIXL"


def test_a_machine_with_gpus_gets_the_other_findings_besides(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvflow.doctor import run
    from kvflow.doctor.cuda import facts
    from kvflow.doctor.findings import ok

    monkeypatch.setattr(run, "check_nixl", lambda: (ok("NIXL", "not asked"), ()))
    monkeypatch.setattr(run, "has_gpus", lambda host: True)
    monkeypatch.setattr(facts, "read_cuda", lambda: FINE)
    found = examine(CONFIG, peer=None, peer_engine="", transfer=False, note=lambda _: None)
    names = [one.name for one in found]
    assert names[names.index("NIXL") + 1 :][:2] == ["CUDA", "GPUs"]
