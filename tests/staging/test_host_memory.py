"""How much memory a process may have: control groups of both versions, nested, in and out of containers."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests_support import each

from kvflow.staging import host_buffers
from kvflow.staging.host_memory import host_memory_bytes

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
V2 = "29 23 0:26 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = "33 23 0:29 {root} /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory"
OTHER = "34 23 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct"
UNLIMITED = str((1 << 63) - 4096)
MIB = 1 << 20


def host(folder: Path, cgroup: str, mounts: str, limits: Mapping[str, str]) -> Path:
    """A folder that looks like a host's /proc and /sys."""
    (folder / "proc/self").mkdir(parents=True)
    (folder / "proc/self/cgroup").write_text(cgroup)
    (folder / "proc/self/mountinfo").write_text(f"22 1 0:2 / / rw - ext4 /dev/root rw\n{mounts}\n")
    for path, limit in limits.items():
        file = folder / "sys/fs/cgroup" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{limit}\n")
    return folder


@each(
    ("cgroup", "mounts", "limits", "expected"),
    [
        # version 2: a container with a namespace of its own, nested groups, one that only sees its own group
        ("0::/\n", V2.format(root="/"), {"memory.max": str(512 * MIB)}, 512 * MIB),
        ("0::/a/b\n", V2.format(root="/"), {"a/memory.max": str(256 * MIB), "a/b/memory.max": "max"}, 256 * MIB),
        ("0::/a/b\n", V2.format(root="/"), {"a/memory.max": "max", "a/b/memory.max": str(128 * MIB)}, 128 * MIB),
        ("0::/pod/c\n", V2.format(root="/pod/c"), {"memory.max": str(300 * MIB)}, 300 * MIB),
        ("0::/elsewhere\n", V2.format(root="/pod/c"), {"memory.max": str(300 * MIB)}, 300 * MIB),
        ("0::/\n", V2.format(root="/"), {"memory.max": "max"}, PHYSICAL),
        # version 1, beside other controllers
        (
            "4:cpu,cpuacct:/x\n5:memory:/docker/c\n",
            f"{OTHER}\n{V1.format(root='/docker/c')}",
            {"memory/memory.limit_in_bytes": str(200 * MIB), "cpu/memory.limit_in_bytes": "1"},
            200 * MIB,
        ),
        (
            "5:memory:/a/b\n0::/\n",
            V1.format(root="/"),
            {"memory/a/memory.limit_in_bytes": str(100 * MIB), "memory/a/b/memory.limit_in_bytes": UNLIMITED},
            100 * MIB,
        ),
        ("5:memory:/\n", V1.format(root="/"), {"memory/memory.limit_in_bytes": UNLIMITED}, PHYSICAL),
        # nothing to be read
        ("", "", {}, PHYSICAL),
        ("0::/gone\n", V2.format(root="/"), {}, PHYSICAL),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    tmp_path_factory: pytest.TempPathFactory, cgroup: str, mounts: str, limits: Mapping[str, str], expected: int
) -> None:
    assert host_memory_bytes(host(tmp_path_factory.mktemp("host"), cgroup, mounts, limits)) == expected


def test_host_buffers_are_sized_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "host_memory_bytes", lambda: 800 * MIB)
    assert host_buffers._default_bytes_max(64 << 30, ranks=2) == 50 * MIB
