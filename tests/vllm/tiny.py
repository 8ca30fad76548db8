"""Tiny random models of each kind of KV cache, as folders that vLLM can serve: `python tests/vllm/tiny.py FOLDER`.

Weights come from a fixed seed, in float32, and are large enough that each generated token depends on every token before
it that its layers can see. There is no tokenizer: prompts and answers are token ids.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

VOCABULARY = 2048
WINDOW = 96  # tokens; shorter than the prompts of the tests
HIDDEN = 128
_SEED = 20
_GAIN = {"mla": 0.6, "qwen3-next": 0.8}
"""Gain of each layer's weights; 1.4 by default. Less where vLLM's prefill and decode compute slightly differently: a
large gain would turn small differences into large ones.
"""

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _pattern(layers: int, every: int) -> list[str]:
    """The last of every `every` layers attends to all tokens."""
    return ["sliding_attention" if (layer + 1) % every else "full_attention" for layer in range(layers)]


def configurations() -> dict[str, Any]:
    """The models by name, as transformers configures them."""
    import transformers as t

    sliding = {"sliding_window": WINDOW}
    mla = {
        "kv_lora_rank": 512,  # vLLM computes latents of 576 only
        "q_lora_rank": None,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 32,
        "num_key_value_heads": 4,
        "first_k_dense_replace": 8,
        "n_routed_experts": 2,
        "num_experts_per_tok": 1,
        "n_group": 1,
        "topk_group": 1,
        "moe_intermediate_size": 64,
    }
    mamba = {
        "mamba_d_ssm": HIDDEN,
        "mamba_n_heads": 4,
        "mamba_d_head": 32,
        "mamba_n_groups": 1,
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 1,
        "mamba_chunk_size": 32,
    }
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
        "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    }
    return {
        "full": t.LlamaConfig(**_COMMON, num_hidden_layers=4),
        "gemma3": t.Gemma3TextConfig(
            **_COMMON, **sliding, num_hidden_layers=6, layer_types=_pattern(6, 3), query_pre_attn_scalar=32
        ),
        "all-sliding": t.MistralConfig(**_COMMON, **sliding, num_hidden_layers=4),
        "gpt-oss": t.GptOssConfig(
            **_COMMON,
            **sliding,
            num_hidden_layers=4,
            layer_types=_pattern(4, 2),
            num_local_experts=2,
            num_experts_per_tok=1,
        ),
        "mla": t.DeepseekV2Config(**_COMMON | mla, num_hidden_layers=4),
        "falcon-h1": t.FalconH1Config(**_COMMON, **mamba, num_hidden_layers=4),
        "qwen3-next": t.Qwen3NextConfig(**_COMMON, **linear, num_hidden_layers=4),
    }


def prepare(folder: Path) -> Path:
    """Make the folders, once."""
    done = folder / "made.json"
    wanted = json.dumps({"seed": _SEED, "from": Path(__file__).read_text("utf-8")})
    if done.exists() and done.read_text("utf-8") == wanted:
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    for name, config in configurations().items():
        _save(folder / name, config, _GAIN.get(name, 1.4))
    done.write_text(wanted, "utf-8")
    return folder


def _save(folder: Path, config: Any, gain: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(_SEED)
    config.dtype = torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() >= 2 and "conv" not in name:
                inputs = HIDDEN if "embed" in name or "lm_head" in name else weight.shape[-1]
                weight.normal_(std=(1.0 if "embed" in name else gain * inputs**-0.5))
    model.save_pretrained(folder)


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
