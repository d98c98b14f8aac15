"""Qwen3 models turned into block diffusion by dLLM's A2D recipe (BD3LM).

The same architecture is published for models that were trained with full attention (MDLM) and
for untrained conversions, and no field tells them apart. A table would decode those wrongly in
silence, so the block length has to be given: `--block-length 32` for the published BD3LM ones.
"""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family
from convert.fields import FieldReader


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of a Qwen3 `config.json`."""
    return llama_body.read_sizes(fields) | {
        "head_dim": fields.integer("head_dim"),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": True,
    }


FAMILY = Family(
    name="a2d_qwen3",
    architectures=("A2DQwen3LMHeadModel",),
    model_types=("a2d-qwen3",),
    keys=llama_body.KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_tokens=("<|mask|>",),
    turn_end_tokens=("<|im_end|>",),
    reference="qwen3",
    models=("Qwen3-0.6B-diffusion-bd3lm-v0.1",),
    checked=(
        "logits equal Qwen3ForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
    limits=(
        "the published sampler pads the prompt on the left to whole blocks; here blocks count from "
        "the first token of the prompt",
    ),
)
