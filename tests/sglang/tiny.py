"""Tiny random models that SGLang can serve: `python tests/sglang/tiny.py FOLDER`.

Weights are large enough that each token depends on all before it. The tokenizer has a token for each character of
ASCII; the ids that are left are words, so that any answer has a text.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

VOCABULARY = 512
WINDOW = 96
SPECIAL = ("<pad>", "<bos>", "<eos>")
CHAT = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"


def configurations() -> dict[str, Any]:
    """The models by name, as transformers configures them."""
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
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
    return {"llama": transformers.LlamaConfig(**common, num_hidden_layers=4)}


def tokenizer() -> Any:
    """Return a tokenizer with one token a character, and with the ids of the model's vocabulary."""
    import tokenizers
    import transformers

    characters = [*map(chr, range(33, 127)), "\u0120", "\u010a"]  # the last ones are a space and an end of line
    known = [*SPECIAL, *characters]
    known += [f"\u0120w{at}" for at in range(len(known), VOCABULARY)]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({token: at for at, token in enumerate(known)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    pad, bos, eos = SPECIAL
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token=pad, bos_token=bos, eos_token=eos, chat_template=CHAT
    )


def make(folder: Path) -> None:
    import torch
    import transformers

    for name, config in configurations().items():
        tokenizer().save_pretrained(folder / name)
        if (folder / name / "config.json").exists():
            continue
        torch.manual_seed(20)
        model = transformers.AutoModelForCausalLM.from_config(config).float()
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0.0, 1.4 / parameter.shape[-1] ** 0.5 if "embed" not in parameter_name else 1.0)
        model.save_pretrained(folder / name)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
