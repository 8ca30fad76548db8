#!/usr/bin/env bash
# Version:  nixl-cu12 1.5.1 (UCX 1.23 inside), Linux x86-64, over shared memory.
# Expected: the notification of a READ reaches the producer when the bytes have been read: both agents have NIXL's
#           progress thread, which is there so that nobody has to poll.
# Seen:     all bytes have landed when `transfer` returns, but the producer hears nothing for as long as the reader asks
#           for nothing; one `check_xfer_state` of the reader, or the release of the handle, sends the notification:
#           "PROC, landed: True, heard in 5 s: [], after a check: [b'read']"
#           "PROC, landed: True, heard in 5 s: [], after the release: [b'read']"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps nixl-cu12==1.5.1 numpy==2.3.5
cat > "$folder/read.py" <<'PYTHON'
import sys
import time

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config


def agent_with(name, memory):
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    return agent, agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


theirs, ours = np.full(1 << 20, 5, np.uint8), np.zeros(1 << 20, np.uint8)
producer, offered = agent_with("producer", theirs)
reader, local = agent_with("reader", ours)
peer = reader.add_remote_agent(producer.get_agent_metadata())


def heard(seconds):
    found, until_s = [], time.monotonic() + seconds
    while time.monotonic() < until_s:
        found += [one for some in producer.get_new_notifs().values() for one in some]
    return found


def post():
    ours[:] = 0
    handle = reader.initialize_xfer("READ", local.trim(), offered.trim(), peer, b"read")
    return handle, reader.transfer(handle)


handle, state = post()  # the connection is made here
while state == "PROC":
    state = reader.check_xfer_state(handle)
heard(1)
found = []
for name, act in (("a check", reader.check_xfer_state), ("the release", reader.release_xfer_handle)):
    handle, state = post()
    time.sleep(1)
    landed, before, _, after = bool(ours.all()), heard(5), act(handle), heard(5)
    print(f"{state}, landed: {landed}, heard in 5 s: {before}, after {name}: {after}")
    found.append((landed, before, after))
sys.exit(found != [(True, [], [b"read"])] * 2)
PYTHON
NIXL_LOG_LEVEL=ERROR UCX_LOG_LEVEL=error "$folder/venv/bin/python" "$folder/read.py"
