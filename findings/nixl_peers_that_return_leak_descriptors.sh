#!/usr/bin/env bash
# Version:  nixl-cu12 1.5.1 (UCX 1.23 inside), Linux x86-64, over shared memory and over tcp.
# Expected: `remove_remote_agent` gives back what `add_remote_agent` and the reads have opened, on both sides.
# Seen:     each round of adding a living peer, one READ and removing the peer leaves open files behind in *both*
#           processes: 1 over shared memory, 2 over tcp, for as long as the agents live:
#           "shm: 20 rounds leave 20 open files at the reader, 20 at the producer"
#           "tcp: 20 rounds leave 40 open files at the reader, 40 at the producer"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps nixl-cu12==1.5.1 numpy==2.3.5
cat > "$folder/rounds.py" <<'PYTHON'
import json
import os
import subprocess
import sys
import time

import numpy as np
from nixl_cu12 import nixl_agent, nixl_agent_config

ROUNDS = 20


def open_files():
    return len(os.listdir("/proc/self/fd"))


def agent_with(name, memory):
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=True))
    return agent, agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")


def produce():
    memory = np.full(4096, 5, np.uint8)
    agent, _ = agent_with("producer", memory)
    print(json.dumps([agent.get_agent_metadata().hex(), memory.ctypes.data]), flush=True)
    for _ in sys.stdin:
        print(open_files(), flush=True)


def read(way, each):
    command = [sys.executable, __file__]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as producer:
        metadata, address = json.loads(next(line for line in producer.stdout if line.startswith('["')))
        memory = np.zeros(4096, np.uint8)
        agent, registered = agent_with("reader", memory)

        def both():
            time.sleep(2)
            print(file=producer.stdin, flush=True)
            return np.array([open_files(), int(producer.stdout.readline())])

        def meet():
            peer = agent.add_remote_agent(bytes.fromhex(metadata)).decode()
            remote = agent.get_xfer_descs([(address, 4096, 0)], "DRAM")
            handle = agent.initialize_xfer("READ", registered.trim(), remote, peer)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            agent.remove_remote_agent(peer)

        meet()
        before = both()
        for _ in range(ROUNDS):
            meet()
        ours, theirs = both() - before
        print(f"{way}: {ROUNDS} rounds leave {ours} open files at the reader, {theirs} at the producer", flush=True)
        producer.stdin.close()
    return ours == theirs == each * ROUNDS


sys.exit(produce() if not sys.argv[1:] else not read(sys.argv[1], int(sys.argv[2])))
PYTHON
export NIXL_LOG_LEVEL=ERROR UCX_LOG_LEVEL=error
"$folder/venv/bin/python" "$folder/rounds.py" shm 1
UCX_TLS=tcp "$folder/venv/bin/python" "$folder/rounds.py" tcp 2
