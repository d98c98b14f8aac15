"""Qwen2 models turned into block diffusion by dLLM's A2D recipe (BD3LM).

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
    """The network fields of a Qwen2 `config.json`."""
    return llama_body.read_sizes(fields) | {
        "head_dim": llama_body.read_head_dim(fields),
        "qkv_bias": True,
        "qk_norm": False,
    }


FAMILY = Family(
    name="a2d_qwen2",
    architectures=("A2DQwen2LMHeadModel",),
    model_types=("a2d-qwen2",),
    keys=llama_body.KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_tokens=("<|mask|>",),
    turn_end_tokens=("<|im_end|>",),
    reference="qwen2",
    models=("Qwen2.5-Coder-0.5B BD3LM variants",),
    checked=(
        "logits equal Qwen2ForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
    ),
    limits=(
        "the published sampler pads the prompt on the left to whole blocks; here blocks count from "
        "the first token of the prompt",
    ),
)
