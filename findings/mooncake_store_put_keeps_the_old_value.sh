#!/usr/bin/env bash
# Version:  mooncake-transfer-engine-non-cuda 0.3.13.post1 (Mooncake Store: master and client), protocol "tcp".
#           It links the system's libibverbs; where there is none, Debian's package is unpacked in the folder.
# Expected: a second `put` under the same key replaces the value, or fails.
# Seen:     it returns 0, success, and the first value stays, also for `get_size`; nothing is written. Who stores other
#           bytes under an old key (KV blocks computed by other weights) reads the old ones:
#           "first put: 0, second put: 0, get: b'old old ', size: 8"
#           "after remove: put: 0, get: b'new'"
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
cat > "$folder/put.py" <<'PYTHON'
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import mooncake
from mooncake.store import MooncakeDistributedStore

with socket.socket() as one, socket.socket() as other:
    one.bind(("127.0.0.1", 0))
    other.bind(("127.0.0.1", 0))
    port, metrics_port = one.getsockname()[1], other.getsockname()[1]
program = Path(mooncake.__file__).parent / "mooncake_master"
command = [program, f"--rpc_port={port}", f"--metrics_port={metrics_port}"]
master = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
try:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s:
        with socket.socket() as knock:
            if knock.connect_ex(("127.0.0.1", port)) == 0:
                break
        time.sleep(0.1)
    store = MooncakeDistributedStore()
    sizes = 64 << 20, 16 << 20  # of its segment and of its buffer
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", *sizes, "tcp", "", f"127.0.0.1:{port}") == 0
    first, second = store.put("key", b"old old "), store.put("key", b"new")
    found, size = bytes(store.get("key")), store.get_size("key")
    print(f"first put: {first}, second put: {second}, get: {found}, size: {size}")
    until_s = time.monotonic() + 60
    while store.remove("key") != 0 and time.monotonic() < until_s:
        time.sleep(0.5)  # the read has a lease on the key for some seconds
    third, replaced = store.put("key", b"new"), bytes(store.get("key"))
    print(f"after remove: put: {third}, get: {replaced}", flush=True)
finally:
    master.kill()
    master.wait()
seen = (first, second, found, size, third, replaced) == (0, 0, b"old old ", 8, 0, b"new")
os._exit(not seen)
PYTHON
MC_LOG_LEVEL=ERROR GLOG_minloglevel=3 "$folder/venv/bin/python" "$folder/put.py"
