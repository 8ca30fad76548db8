#!/usr/bin/env bash
# Version:  nixl-cu12 1.5.1 (UCX 1.23 inside), Linux x86-64, over tcp.
# Expected: once a reader has released the handle of a running READ, its memory is its own again: the release cancels
#           the read, waits for it, or refuses.
# Seen:     `release_xfer_handle` returns within milliseconds and without an error while most of the bytes are missing,
#           and all the others land in the memory of the reader afterwards, without a handle to ask:
#           "running: True, release: None, landed at the release: below 100 %, 5 s later: 100 %"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps nixl-cu12==1.5.1 numpy==2.3.5
cat > "$folder/read.py" <<'PYTHON'
import json
import subprocess
import sys
import time

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

SIZE = 256 << 20


def agent_with(name, memory):
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    return agent, agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def produce():
    memory = np.full(SIZE, 5, np.uint8)
    agent, _ = agent_with("producer", memory)
    print(json.dumps([agent.get_agent_metadata().hex(), memory.ctypes.data]), flush=True)
    sys.stdin.read()


def read():
    command = [sys.executable, __file__, "producer"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        metadata, address = json.loads(next(line for line in producer.stdout if line.startswith('["')))
        memory = np.zeros(SIZE, np.uint8)
        agent, registered = agent_with("reader", memory)
        peer = agent.add_remote_agent(bytes.fromhex(metadata))
        remote = agent.get_xfer_descs([(address, SIZE, 0)], "DRAM")
        handle = agent.initialize_xfer("READ", registered.trim(), remote, peer)
        state = agent.transfer(handle)
        while state == "PROC" and not memory[0]:
            state = agent.check_xfer_state(handle)
        released = agent.release_xfer_handle(handle)
        before = np.count_nonzero(memory[::4096]) / len(memory[::4096])
        time.sleep(5)
        after = np.count_nonzero(memory[::4096]) / len(memory[::4096])
        running = state == "PROC"
        print(f"running: {running}, release: {released}, landed at the release: {before:.0%}, 5 s later: {after:.0%}")
        producer.stdin.close()
    return running and before < after == 1.0


sys.exit(produce() if sys.argv[1:] else not read())
PYTHON
UCX_TLS=tcp NIXL_LOG_LEVEL=ERROR UCX_LOG_LEVEL=error "$folder/venv/bin/python" "$folder/read.py"
