"""vLLM's requests as `connector.scheduler` asks about them: above all, what tells their prompts apart.

vLLM finds a block in its prefix cache by its tokens and by all else that makes it another one (`extra_keys` in
`vllm.v1.core.kv_cache_utils`): adapter, pictures and where they begin, cache salt, embeddings. A ticket's prompt is
told apart by the same.
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


def names_pictures(vllm_config: VllmConfig) -> bool:
    """True if a picture's identifier says what is in it. Where vLLM caches nothing of pictures, it numbers them."""
    pictures = vllm_config.model_config.multimodal_config
    cached = pictures is None or pictures.mm_processor_cache_gb != 0
    return bool(cached or vllm_config.cache_config.enable_prefix_caching)


def spreads_samples(vllm_config: VllmConfig) -> bool:
    """True if this is one of several engines of a server (data parallel), which only the engine's id tells."""
    engine_id, rank = vllm_config.kv_transfer_config.engine_id, vllm_config.parallel_config.data_parallel_index
    return str(engine_id).endswith(f"_dp{rank}")


def sharing_of(request_id: str, *, spread: bool) -> Sharing:
    """Requests that have the ticket of this one, too: vLLM makes n samples of a prompt requests "0_ID" to "n-1_ID".

    With samples `spread` over several engines, each of which has its own scheduler, only the first one's engine uses
    the ticket. A request that is no sample and has such an id loses nothing: its producer is told a step later.
    """
    sample = _SAMPLE.match(request_id)
    if sample is None:
        return Sharing.ALONE
    return Sharing.FOLLOWS if spread and int(sample[1]) else Sharing.FIRST


def asked(request: Request, *, names_pictures: bool) -> EngineRequest:
    """Return the facts of a request that the scheduler's half asks for: its tokens only if it has parameters."""
    params, tokens = request.kv_transfer_params, None
    if params is not None:
        tokens = tokens_of(request, request.num_prompt_tokens, names_pictures=names_pictures)
    return EngineRequest(request.request_id, request.num_prompt_tokens, params, tokens)


def tokens_of(request: Request, num_tokens: int, *, names_pictures: bool) -> Sequence[int] | None:
    """Return the request's first tokens: those of its prompt, then those of its answer.

    They are marked with all else that vLLM takes into the hashes of their blocks. None if that says nothing, since
    identifiers of pictures do not name what is in them (`names_pictures`).
    """
    if request.mm_features and not names_pictures:
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
