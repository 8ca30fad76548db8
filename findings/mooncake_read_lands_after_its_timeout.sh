#!/usr/bin/env bash
# Version:  mooncake-transfer-engine-non-cuda 0.3.13.post1, P2PHANDSHAKE, protocol "tcp", Linux x86-64.
#           It links the system's libibverbs; where there is none, Debian's package is unpacked in the folder.
# Expected: a `transfer_sync_read` that has returned -1, by its timeout (MC_TRANSFER_TIMEOUT), is over: the caller may
#           use its memory again.
# Seen:     the read goes on. When the other process, which had only been paused, continues, all missing bytes land in
#           the caller's memory, after the -1 and without anything that tells of it:
#           "result -1 after 10 s with less than 100 % landed; 5 s after the other side went on: 100 %"
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
import signal
import subprocess
import sys
import threading
import time

import numpy as np
from mooncake.engine import TransferEngine

SIZE = 256 << 20


def engine_with(memory):
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(memory.ctypes.data, memory.nbytes) == 0
    return engine


def produce():
    memory = np.full(SIZE, 5, np.uint8)
    engine = engine_with(memory)
    print("port", engine.get_rpc_port(), memory.ctypes.data, flush=True)
    sys.stdin.read()
    os._exit(0)


def read():
    command = [sys.executable, __file__, "producer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        _, port, address = next(line for line in producer.stdout if line.startswith("port ")).split()
        memory = np.zeros(SIZE, np.uint8)
        engine = engine_with(memory)
        results = []

        def transfer():
            arguments = (f"127.0.0.1:{port}", memory.ctypes.data, int(address), SIZE)
            results.append(engine.transfer_sync_read(*arguments))

        reading = threading.Thread(target=transfer)
        begun_s = time.monotonic()
        reading.start()
        while not memory[:: 1 << 20].any():
            pass
        os.kill(producer.pid, signal.SIGSTOP)
        reading.join()
        took_s = time.monotonic() - begun_s
        time.sleep(2)
        before = np.count_nonzero(memory[::4096]) / len(memory[::4096])
        os.kill(producer.pid, signal.SIGCONT)
        time.sleep(5)
        after = np.count_nonzero(memory[::4096]) / len(memory[::4096])
        print(f"result {results[0]} after {took_s:.0f} s with {before:.0%} landed; 5 s after the other side went on: {after:.0%}")
        producer.stdin.close()
    return results == [-1] and before < after == 1.0


sys.stdout.flush()
if sys.argv[1:]:
    produce()
seen = read()
sys.stdout.flush()
os._exit(not seen)
PYTHON
MC_TRANSFER_TIMEOUT=10 MC_LOG_LEVEL=ERROR "$folder/venv/bin/python" "$folder/read.py"
