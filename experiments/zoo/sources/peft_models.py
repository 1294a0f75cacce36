"""Adapters of peft on BERT, Llama, GPT-2 and ViT classifiers; the classifier is trained too."""

from __future__ import annotations

from functools import partial
from typing import Any

import peft
from torch import nn

from experiments.zoo.entry import Entry, pad_tokens, ragged_tokens
from experiments.zoo.sources.transformers_models import IMAGE, SEQUENCE, _image, _pixels, _sequence

_ATTENTION = {"target_modules": ["query", "value"]}

_BERT: dict[str, Any] = {
    "LoRA": partial(peft.LoraConfig, r=2, lora_alpha=4, **_ATTENTION),
    "LoRA, rank-stabilised": partial(peft.LoraConfig, r=2, use_rslora=True, **_ATTENTION),
    "DoRA": partial(peft.LoraConfig, r=2, use_dora=True, **_ATTENTION),
    "LoRA with bias": partial(peft.LoraConfig, r=2, bias="lora_only", **_ATTENTION),
    "AdaLoRA": partial(peft.AdaLoraConfig, init_r=2, target_r=2, total_step=10, **_ATTENTION),
    "IA3": partial(peft.IA3Config, target_modules=["value", "output.dense"], feedforward_modules=["output.dense"]),
    "LoHa": partial(peft.LoHaConfig, r=2, **_ATTENTION),
    "LoKr": partial(peft.LoKrConfig, r=2, **_ATTENTION),
    "VeRA": partial(peft.VeraConfig, r=4, **_ATTENTION),
    "OFT": partial(peft.OFTConfig, oft_block_size=4, **_ATTENTION),
    "prompt tuning": partial(peft.PromptTuningConfig, num_virtual_tokens=2),
    "LayerNorm tuning": partial(peft.LNTuningConfig, target_modules=["LayerNorm"]),
}


def _adapted(name: str, config: Any) -> nn.Module:
    return peft.get_peft_model(_sequence(name, SEQUENCE[name]), config(task_type="SEQ_CLS"))


def _vit() -> nn.Module:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj", "query", "value"], modules_to_save=["classifier"])
    return peft.get_peft_model(_image("ViT", IMAGE["ViT"]), config)


ENTRIES = [
    *(
        Entry(f"{title}, BERT", "peft", partial(_adapted, "Bert", config), ragged_tokens(), pad_tokens)
        for title, config in _BERT.items()
    ),
    Entry(
        "LoRA, Llama",
        "peft",
        partial(_adapted, "Llama", partial(peft.LoraConfig, r=2, target_modules=["q_proj", "v_proj", "up_proj"])),
        ragged_tokens(),
        pad_tokens,
    ),
    Entry(
        "LoRA, GPT-2",
        "peft",
        partial(_adapted, "GPT2", partial(peft.LoraConfig, r=2, target_modules=["c_attn"], fan_in_fan_out=True)),
        ragged_tokens(),
        pad_tokens,
    ),
    Entry("LoRA, ViT", "peft", _vit, _pixels(32)),
]
