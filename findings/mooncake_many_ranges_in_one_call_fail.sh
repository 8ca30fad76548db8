#!/usr/bin/env bash
# Version:  mooncake-transfer-engine-non-cuda 0.3.13.post1, P2PHANDSHAKE, protocol "tcp", Linux x86-64.
#           It links the system's libibverbs; where there is none, Debian's package is unpacked in the folder.
# Expected: `batch_transfer_sync_read` of 4,096 ranges reads them, as four calls of 1,024 do, or says what is too much.
# Seen:     from some 3,000 ranges in one call on, of any size, the call returns -1, with no line in the log at
#           its level ERROR; a KV cache of 32 layers has that many pieces in 64 blocks:
#           "4096 ranges, 1,024 a call: [0, 0, 0, 0], 100% of the bytes; in one call: -1"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps mooncake-transfer-engine-non-cuda==0.3.13.post1 numpy==2.3.5
if ! "$folder/venv/bin/python" -c 'import ctypes; ctypes.CDLL("libibverbs.so.1")' 2> "$folder/missing"; then
  (cd "$folder" && apt-get download libibverbs1 libnl-3-200 libnl-route-3-200 > apt.log 2>&1)
  for package in "$folder"/*.deb; do dpkg -x "$package" "$folder/system"; done
  libraries=$(find "$folder/system" -name 'lib*.so.*' -printf '%h\n' | sort -u | paste -sd:)
  export LD_LIBRARY_PATH=$libraries
fi
cat > "$folder/read.py" <<'PYTHON'
import os
import subprocess
import sys

import numpy as np
from mooncake.engine import TransferEngine

RANGE, RANGES = 16 << 10, 4096


def engine_with(memory):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def produce():
    memory = np.full(RANGE * RANGES, 5, np.uint8)
    engine = engine_with(memory)
    print("port", engine.get_rpc_port(), memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)


def read():
    command = [sys.executable, __file__, "producer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        _, port, address = next(line for line in producer.stdout if line.startswith("port ")).split()
        memory = np.zeros(RANGE * RANGES, np.uint8)
        engine = engine_with(memory)

        def transfer(first, count):
            offsets = [RANGE * index for index in range(first, first + count)]
            here, there = ([base + offset for offset in offsets] for base in (memory.ctypes.data, int(address)))
            return engine.batch_transfer_sync_read(f"127.0.0.1:{port}", here, there, [RANGE] * count)

        in_turn = [transfer(first, 1024) for first in range(0, RANGES, 1024)]
        landed, at_once = (memory == 5).mean(), transfer(0, RANGES)
        print(f"{RANGES} ranges, 1,024 a call: {in_turn}, {landed:.0%} of the bytes; in one call: {at_once}")
        producer.stdin.close()
    return in_turn == [0] * len(in_turn) and landed == 1.0 and at_once == -1


sys.stdout.flush()
if sys.argv[1:]:
    produce()
seen = read()
sys.stdout.flush()
os._exit(not seen)
PYTHON
MC_LOG_LEVEL=ERROR "$folder/venv/bin/python" "$folder/read.py"
