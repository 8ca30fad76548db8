#!/usr/bin/env bash
# Version:  sglang 0.5.23 (vllm 0.32.0 has the same lines, and did the same), pyzmq 27.3.0 (ZeroMQ 4.3.5), msgspec 0.22.0.
# Expected: a replay of KV events ("reliable publisher with a replay buffer") sends every batch that is kept, up to
#           `buffer_steps` = 10,000, and then the end marker -1; `hwm` = 100,000 is "the high-water-mark".
# Seen:     the replay socket keeps ZeroMQ's own limit of 1,000 messages, and a ROUTER drops what has no room, silently:
#           a subscriber that is busy for two seconds gets about half of 5,000 batches of 2,048 tokens and no end marker,
#           and one that reads at once may get a replay with a hole in its middle that *ends with the marker*:
#           "kept: 5000, replayed to a busy subscriber: about 2500 of 5000, end marker: False"
# Only SGLang's own module runs: its packages are not executed, so neither torch nor a GPU is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps sglang==0.5.23 pyzmq==27.3.0 msgspec==0.22.0 psutil==7.1.0 \
  pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-extensions==4.16.0 typing-inspection==0.4.5
cat > "$folder/replay.py" <<'PYTHON'
import importlib.util
import subprocess
import sys
import time
import types
from pathlib import Path

BATCHES, TOKENS = 5000, 2048
SUBSCRIBER = """
import sys, time, zmq
socket = zmq.Context().socket(zmq.DEALER)
socket.connect(sys.argv[1])
socket.send_multipart([b"", (0).to_bytes(8, "big")])
time.sleep(2)
found, marker = 0, False
while not marker and socket.poll(5000):
    number = int.from_bytes(socket.recv_multipart()[-2], "big", signed=True)
    marker = number == -1
    found += not marker
print(found, marker)
"""

root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
from sglang.srt.disaggregation.kv_events import BlockStored, KVEventBatch, ZmqEventPublisher

publisher = ZmqEventPublisher(0, endpoint="tcp://127.0.0.1:*", replay_endpoint="tcp://127.0.0.1:*")
tokens = list(range(TOKENS))
for number in range(BATCHES):
    stored = BlockStored([number], None, tokens, TOKENS, None)
    publisher.publish(KVEventBatch(ts=0.0, events=[stored]))
while len(publisher._buffer) < BATCHES:
    time.sleep(0.1)
command = [sys.executable, "-c", SUBSCRIBER, publisher._local_replay_endpoint]
found, marker = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
kept = len(publisher._buffer)
print(f"kept: {kept}, replayed to a busy subscriber: {found} of {BATCHES}, end marker: {marker}", flush=True)
publisher.shutdown()
sys.exit(not (kept == BATCHES > int(found) and marker == "False"))
PYTHON
"$folder/venv/bin/python" "$folder/replay.py"
