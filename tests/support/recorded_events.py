"""Batches of KV events, encoded by the engines' own classes. tests/vllm and tests/sglang encode them again to check."""

from __future__ import annotations

from typing import Any

VLLM = bytes.fromhex(
    "93cb3ff8000000000000958ba474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392c420000000000000000000"
    "0000000000000000000000000000000000000000000000c4200101010101010101010101010101010101010101010101010101010101"
    "010101b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f696473986465666768696a6baa626c6f636b5f73697a6504a7"
    "6c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0aa65787472615f6b6579739291a473616c74c0a967726f75"
    "705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6e8ba474797065ab426c6f636b5374"
    "6f726564ac626c6f636b5f68617368657391c4200202020202020202020202020202020202020202020202020202020202020202b170"
    "6172656e745f626c6f636b5f68617368c4200101010101010101010101010101010101010101010101010101010101010101a9746f6b"
    "656e5f696473946c6d6e6faa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65c0"
    "aa65787472615f6b657973919192a77069637475726501a967726f75705f69647800aa73657373696f6e5f6964a17388a474797065ab"
    "426c6f636b53746f726564ac626c6f636b5f68617368657391cfffffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9"
    "746f6b656e5f6964739401020304aa626c6f636b5f73697a6504a76c6f72615f696401a66d656469756da3435055a96c6f72615f6e61"
    "6d65a76164617074657284a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68617368657391c420000000000000000000"
    "0000000000000000000000000000000000000000000000a66d656469756da3475055a967726f75705f6964780081a474797065b0416c"
    "6c426c6f636b73436c656172656400"
)
"""`vllm_batch` as encoded by vLLM 0.32."""

SGLANG = bytes.fromhex(
    "93cb3ff80000000000009587a474797065ab426c6f636b53746f726564ac626c6f636b5f68617368657392fb07b1706172656e745f62"
    "6c6f636b5f68617368c0a9746f6b656e5f696473986465666768696a6baa626c6f636b5f73697a6504a76c6f72615f6964c0a66d6564"
    "69756da347505589a474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739109b1706172656e745f626c6f636b5f"
    "6861736807a9746f6b656e5f696473946c6d6e6faa626c6f636b5f73697a6504a76c6f72615f6964c0a66d656469756da3475055aa63"
    "616368655f73616c74a473616c74aa73657373696f6e5f6964a17387a474797065ab426c6f636b53746f726564ac626c6f636b5f6861"
    "73686573910bb1706172656e745f626c6f636b5f6861736807a9746f6b656e5f69647392920102920203aa626c6f636b5f73697a6502"
    "a76c6f72615f6964c0a66d656469756daa4350555f50494e4e454483a474797065ac426c6f636b52656d6f766564ac626c6f636b5f68"
    "617368657391fba66d656469756da347505581a474797065b0416c6c426c6f636b73436c656172656400"
)
"""`sglang_batch` as encoded by SGLang 0.5.23."""


def vllm_batch(kv_events: Any) -> Any:
    """Make the batch that `VLLM` encodes, from the classes of `vllm.distributed.kv_events`."""
    stored, first, second, third = kv_events.BlockStored, *(bytes([number]) * 32 for number in range(3))
    plain = {"lora_id": None, "medium": "GPU", "lora_name": None, "block_size": 4}
    events = [
        stored(
            block_hashes=[first, second],
            parent_block_hash=None,
            token_ids=list(range(100, 108)),
            extra_keys=[("salt",), None],
            group_idx=0,
            kv_cache_spec_kind="full_attention",
            **plain,
        ),
        stored(
            block_hashes=[third],
            parent_block_hash=second,
            token_ids=[108, 109, 110, 111],
            extra_keys=[(("picture", 1),)],
            group_idx=0,
            session_id="s",
            **plain,
        ),
        stored(
            block_hashes=[(1 << 64) - 1],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=4,
            lora_id=1,
            medium="CPU",
            lora_name="adapter",
        ),
        kv_events.BlockRemoved(block_hashes=[first], medium="GPU", group_idx=0),
        kv_events.AllBlocksCleared(),
    ]
    return kv_events.KVEventBatch(ts=1.5, events=events, data_parallel_rank=0)


def sglang_batch(kv_events: Any) -> Any:
    """Make the batch that `SGLANG` encodes, from the classes of `sglang.srt.disaggregation.kv_events`.

    kvflow ignores the page of token pairs in it.
    """
    stored, medium = kv_events.BlockStored, kv_events.StorageMedium
    plain = {"lora_id": None, "medium": medium.GPU, "block_size": 4}
    events = [
        stored(block_hashes=[-5, 7], parent_block_hash=None, token_ids=list(range(100, 108)), **plain),
        stored(
            block_hashes=[9],
            parent_block_hash=7,
            token_ids=[108, 109, 110, 111],
            cache_salt="salt",
            session_id="s",
            **plain,
        ),
        stored(
            block_hashes=[11],
            parent_block_hash=7,
            token_ids=[(1, 2), (2, 3)],
            block_size=2,
            lora_id=None,
            medium=medium.CPU,
        ),
        kv_events.BlockRemoved(block_hashes=[-5], medium=medium.GPU),
        kv_events.AllBlocksCleared(),
    ]
    return kv_events.KVEventBatch(ts=1.5, events=events, attn_dp_rank=0)
