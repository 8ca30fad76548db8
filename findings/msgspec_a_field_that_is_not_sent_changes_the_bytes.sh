#!/usr/bin/env bash
# Version:  msgspec 0.23.0, Struct with omit_defaults=True, msgpack.
# Expected: a message that does not carry an optional field is encoded as before the class had the field.
# Seen:     the map's header is chosen by how many fields the class has, tag included, not by how many are sent. With the
#           16th, every message grows by two bytes (0x82 becomes 0xde0002), valid, but other bytes: recorded messages,
#           digests and caches by encoded bytes no longer match. vLLM 0.33's KV events differ so from 0.32's:
#           "14 fields and a tag: 82 (16 bytes); 15 and a tag: de0002 (18 bytes); both decode to the same map"
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet --no-deps msgspec==0.23.0
cat > "$folder/encode.py" <<'PYTHON'
import msgspec


def encoded(fields):
    optional = [(f"f{index}", int | None, None) for index in range(fields)]
    return msgspec.msgpack.encode(msgspec.defstruct("Event", optional, omit_defaults=True, tag=True)(f0=1))


few, many = encoded(14), encoded(15)
assert msgspec.msgpack.decode(few) == msgspec.msgpack.decode(many) == {"type": "Event", "f0": 1}
print(f"14 fields and a tag: {few[:1].hex()} ({len(few)} bytes); 15 and a tag: {many[:3].hex()} ({len(many)} bytes); "
      "both decode to the same map")
PYTHON
seen=$("$folder/venv/bin/python" "$folder/encode.py")
echo "$seen"
[ "$seen" = "14 fields and a tag: 82 (16 bytes); 15 and a tag: de0002 (18 bytes); both decode to the same map" ]
