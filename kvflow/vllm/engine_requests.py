"""Converts vLLM's requests for `connector.scheduler`, with all keys that distinguish prompts.

vLLM's prefix cache distinguishes blocks by tokens and by further keys (`extra_keys` in `vllm.v1.core.kv_cache_utils`):
adapter, pictures and their positions, cache salt, embeddings. kvflow compares the prompts of tickets by the same keys.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.v1.utils import tensor_data

from kvflow.connector.scheduler import EngineRequest, Sharing
from kvflow.core.protocol.prompts import marked_by_keys

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

_SAMPLE = re.compile(r"([0-9]{1,9})_")


def picture_ids_from_content(vllm_config: VllmConfig) -> bool:
    """Return True if vLLM makes its identifiers of pictures from the pictures' content.

    If vLLM caches neither processed pictures nor prefixes, it only numbers the pictures.
    """
    pictures = vllm_config.model_config.multimodal_config
    cached = pictures is None or pictures.mm_processor_cache_gb != 0
    return bool(cached or vllm_config.cache_config.enable_prefix_caching)


def spreads_samples(vllm_config: VllmConfig) -> bool:
    """Return True if the engine id says that this engine is one of several in a data-parallel server.

    Such a server may give samples of one prompt to several engines.
    """
    engine_id, rank = vllm_config.kv_transfer_config.engine_id, vllm_config.parallel_config.data_parallel_index
    return str(engine_id).endswith(f"_dp{rank}")


def sharing_of(request_id: str, *, spread: bool) -> Sharing:
    """Return whether other requests may have the same ticket as the request `request_id`, by the form of that id.

    vLLM turns n samples of a prompt into requests "0_ID" to "n-1_ID" with the same ticket. `spread`: the samples may be
    on several engines; then only the engine with sample 0 uses the ticket. A request that is no sample, but has such an
    id, is treated as a sample: its producer is notified one step later or, with `spread`, its ticket may be refused.
    """
    sample = _SAMPLE.match(request_id)
    if sample is None:
        return Sharing.ALONE
    return Sharing.SAMPLES_ELSEWHERE if spread and int(sample[1]) else Sharing.SAMPLES


def engine_request_of(request: Request, *, picture_ids_from_content: bool) -> EngineRequest:
    """Return vLLM's `request` as an `EngineRequest`, with token ids only if it has `kv_transfer_params`.

    `picture_ids_from_content`: vLLM makes its identifiers of pictures from their content.
    """
    params, tokens = request.kv_transfer_params, None
    if params is not None:
        tokens = tokens_of(request, request.num_prompt_tokens, picture_ids_from_content=picture_ids_from_content)
    return EngineRequest(request.request_id, request.num_prompt_tokens, params, tokens)


def tokens_of(request: Request, num_tokens: int, *, picture_ids_from_content: bool) -> Sequence[int] | None:
    """Return the first `num_tokens` token ids of a request's prompt and answer, to compare with other prompts.

    Where an adapter, cache salt, picture or embedding begins, a hash of token id and vLLM's key for that input replaces
    the token id (`marked_by_keys`). Return None if the request has pictures, and `picture_ids_from_content` is False:
    then vLLM's identifiers do not depend on the pictures' content.
    """
    if request.mm_features and not picture_ids_from_content:
        return None
    keys: defaultdict[int, list[tuple[str | bytes, ...]]] = defaultdict(list)
    if request.lora_request is not None:
        keys[0].append(("lora", request.lora_request.lora_name, request.lora_request.lora_path))
    if request.cache_salt:
        keys[0].append(("cache_salt", request.cache_salt))
    for feature in request.mm_features:
        keys[feature.mm_position.offset].append(("mm", feature.identifier))
    if request.prompt_embeds is not None:
        for place, embedding in enumerate(request.prompt_embeds[:num_tokens]):
            keys[place].append(("prompt_embeds", bytes(tensor_data(embedding))))
    return marked_by_keys(request.all_token_ids[:num_tokens], keys)
