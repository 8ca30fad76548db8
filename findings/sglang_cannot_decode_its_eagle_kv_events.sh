#!/usr/bin/env bash
# Version:  sglang 0.5.23, msgspec 0.22.0.
# Expected: a KV event that SGLang publishes decodes by the type that SGLang publishes it with:
#           `BlockStored.token_ids: list[int]`, `block_size` token ids for each block.
# Seen:     with EAGLE or MTP, whose radix tree has bigrams for keys, `token_ids` is a list of *pairs*, and the last pair
#           reaches one token beyond the block. msgspec does not check types when it encodes, so the batch is sent, and
#           no subscriber with SGLang's own (or vLLM's) types can read it:
#           "plain: decodes, token_ids [1, 2, 3, 4]"
#           "EAGLE: sent as [[1, 2], [2, 3], [3, 4], [4, 5]], block_size 4; Expected `int`, got `array`"
# Only SGLang's own modules run: its packages are not executed and its kernels not loaded, so no torch is needed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps sglang==0.5.23 pyzmq==27.3.0 msgspec==0.22.0 psutil==7.1.0 \
  pydantic==2.14.4 pydantic-core==2.50.5 annotated-types==0.8.0 typing-extensions==4.16.0 typing-inspection==0.4.5
cat > "$folder/events.py" <<'PYTHON'
import importlib.util
import sys
import types
from pathlib import Path

import msgspec


class Kernels(types.ModuleType):
    """In place of GPU kernels, which nothing here calls."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)


root = Path(importlib.util.find_spec("sglang").submodule_search_locations[0])
for name in ("sglang", "sglang.srt", "sglang.srt.utils"):
    package = types.ModuleType(name)
    package.__path__ = [str(root.joinpath(*name.split(".")[1:]))]
    sys.modules[name] = package
sys.modules["sglang.kernels.ops.kvcache.mla_buffer"] = Kernels("mla_buffer")
from sglang.srt.disaggregation.kv_events import KVEventBatch
from sglang.srt.mem_cache.events import KVCacheEventRecorder


class Key:
    """A key of SGLang's radix tree (RadixKey): with EAGLE N + 1 raw tokens for N bigrams."""

    extra_key = cache_salt = None

    def __init__(self, token_ids, is_bigram):
        self.token_ids, self.is_bigram = token_ids, is_bigram

    def __len__(self):
        return len(self.token_ids) - self.is_bigram


def published(key):
    recorder = KVCacheEventRecorder(enabled=True, page_size=4)
    recorder.record_store(types.SimpleNamespace(key=key, parent=None, hash_value=["ab" * 32]))
    return msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=recorder._queue))


decoder = msgspec.msgpack.Decoder(KVEventBatch)
(plain,) = decoder.decode(published(Key([1, 2, 3, 4], False))).events
print(f"plain: decodes, token_ids {plain.token_ids}")
eagle = published(Key([1, 2, 3, 4, 5], True))
sent = msgspec.msgpack.decode(eagle)[1][0]
try:
    decoder.decode(eagle)
    problem = "decodes"
except msgspec.ValidationError as error:
    problem = str(error)
tokens, size = sent["token_ids"], sent["block_size"]
print(f"EAGLE: sent as {tokens}, block_size {size}; {problem}")
right = plain.token_ids == [1, 2, 3, 4] and (tokens, size) == ([[1, 2], [2, 3], [3, 4], [4, 5]], 4)
sys.exit(not (right and "Expected `int`, got `array`" in problem))
PYTHON
"$folder/venv/bin/python" "$folder/events.py"
