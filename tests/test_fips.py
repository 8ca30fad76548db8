"""Python on hosts in FIPS mode refuses unapproved hashes, unless they are marked as not used for security."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kvflow

SCRIPT = """
import asyncio
import hashlib


def refusing(make):
    def made(*args, usedforsecurity=True, **kwargs):
        if usedforsecurity:
            raise ValueError("not available in FIPS mode")
        return make(*args, **kwargs)

    return made


for name in ("blake2b", "blake2s", "md5", "sha1"):
    setattr(hashlib, name, refusing(getattr(hashlib, name)))

import torch

import kvflow
from kvflow.core.protocol.prompts import marked_by_keys
from kvflow.prefix import prefix_keys

PROMPT = marked_by_keys(range(30), {3: [("mm", "picture")]})


async def main():
    caches = {name: {"layer.0": torch.rand(2, 16, 8, 16, 64)} for name in ("prefill", "decode")}
    config = {name: kvflow.Config(engine_id=name, listen="tcp://127.0.0.1:0", transport="inproc") for name in caches}
    async with kvflow.Runtime(config["prefill"]) as prefill, kvflow.Runtime(config["decode"]) as decode:
        for runtime, cache in ((prefill, caches["prefill"]), (decode, caches["decode"])):
            await runtime.register_kv_caches(cache, kvflow.CacheLayout.infer(cache, order="HND", block_size=16))
        lease = prefill.serve_blocks(kvflow.ServeRequest("r", [3, 7], 30, prompt=PROMPT))
        await decode.load_blocks(kvflow.LoadRequest("r", lease.ticket.to_params(), [0, 1], prompt=PROMPT))
        print(await lease, len(prefix_keys(list(range(64)), 16)))


asyncio.run(main())
"""


def test_a_hand_over_of_a_prompt_and_keys_of_prefixes_need_no_hash_that_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"PYTHONPATH": str(Path(kvflow.__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout.split() == ["read", "4"], done.stderr
