"""Parsers of nvidia-smi's output: devices (`-q -x`), NVLinks (`nvlink --status`), distances to NICs (`topo -m`).

The formats differ between driver releases. A value that is missing or "N/A" becomes None, or is left out.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_MIB = re.compile(r"(\d+) MiB")
_GPU_LINE = re.compile(r"GPU (\d+):")
_ACTIVE_LINK = re.compile(r"Link \d+: [\d.]+ GB/s")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
_NIC_NAME = re.compile(r"(NIC\d+): (\S+)")
NEAR_DISTANCES = ("PIX", "PXB")
"""Distances with only PCIe switches between GPU and NIC. The others (PHB, NODE, SYS) cross a host bridge or a
socket.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as nvidia-smi describes it. `mig`: whether MIG is enabled; None if the GPU has no MIG mode."""

    name: str
    memory_mib: int | None
    bar1_mib: int | None
    """Size in MiB of BAR1, the PCIe window through which NICs and peer GPUs reach the GPU's memory."""
    mig: bool | None
    compute_mode: str


def read_devices(xml: str) -> tuple[str | None, tuple[int, int] | None, tuple[Gpu, ...]]:
    """Parse `xml`, the output of `nvidia-smi -q -x`.

    Return the driver's version (None if `xml` is something else), the newest CUDA version that the driver supports, and
    the GPUs.
    """
    try:
        root = ElementTree.fromstring(xml)
    except ElementTree.ParseError:
        return None, None, ()
    if root.tag != "nvidia_smi_log":
        return None, None, ()
    cuda = major_minor(_child_text(root, "cuda_version"))
    return _child_text(root, "driver_version") or "unknown", cuda, tuple(map(_parse_gpu, root.findall("gpu")))


def _parse_gpu(node: ElementTree.Element) -> Gpu:
    return Gpu(
        name=_child_text(node, "product_name") or "unknown",
        memory_mib=_parse_mib(_child_text(node, "fb_memory_usage/total")),
        bar1_mib=_parse_mib(_child_text(node, "bar1_memory_usage/total")),
        mig={"Enabled": True, "Disabled": False}.get(_child_text(node, "mig_mode/current_mig")),
        compute_mode=_child_text(node, "compute_mode") or "unknown",
    )


def _child_text(node: ElementTree.Element, path: str) -> str:
    return (node.findtext(path) or "").strip()


def _parse_mib(text: str) -> int | None:
    match = _MIB.fullmatch(text)
    return int(match[1]) if match else None


def major_minor(version: str) -> tuple[int, int] | None:
    """Return the first two numbers of a version, such as (12, 8) for "12.8.1"; None if it has another form."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else None


def read_nvlinks(text: str) -> dict[int, int]:
    """Parse the output of `nvidia-smi nvlink --status`. Return the number of active NVLinks, maybe 0, by GPU number."""
    found: dict[int, int] = {}
    device = -1
    for line in text.splitlines():
        if match := _GPU_LINE.match(line):
            device = int(match[1])
            found[device] = 0
        elif device in found and _ACTIVE_LINK.search(line):
            found[device] += 1
    return found


def read_nic_distances(text: str) -> dict[str, dict[str, str]]:
    """Parse the matrix that `nvidia-smi topo -m` prints.

    Return distances (PIX, PXB, ...) by GPU name, then by NIC name.
    """
    text = _ESCAPES.sub("", text)
    names = dict(_NIC_NAME.findall(text))
    rows = [line.split("\t") for line in text.splitlines()]
    headings = next((row for row in rows if any(cell.strip() == "GPU0" for cell in row[1:])), [])
    columns = {place: cell.strip() for place, cell in enumerate(headings)}
    return {
        row[0].strip(): dict(_distances_in_row(row, columns, names))
        for row in rows
        if row is not headings and re.fullmatch(r"GPU\d+", row[0].strip())
    }


def _distances_in_row(
    row: list[str], columns: Mapping[int, str], names: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    for place, cell in enumerate(row):
        heading = columns.get(place, "")
        if heading.startswith(("NIC", "mlx5_")):  # older drivers put the device's name in the heading
            yield names.get(heading, heading), cell.strip()
