"""SDAR (dense) and TraDo: a Qwen3 body that denoises blocks in place."""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family
from convert.fields import FieldReader

KEYS = llama_body.KEYS


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of an SDAR `config.json`."""
    fields.allow("block_causal_prompt", True, None)
    fields.allow("num_experts", 0, None)
    return llama_body.read_sizes(fields) | {
        "head_dim": fields.integer("head_dim"),
        "qkv_bias": fields.flag("attention_bias", default=False),
        "qk_norm": True,
    }


FAMILY = Family(
    name="sdar",
    architectures=("SDARForCausalLM",),
    model_types=("sdar",),
    keys=KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_token_id=151669,
    mask_tokens=("<|MASK|>",),
    turn_end_tokens=("<|im_end|>",),
    stop_token_ids=(151645, 151643),
    reference="qwen3",
    models=("SDAR-1.7B, -4B and -8B (-b4 to -b64)", "TraDo-4B, -8B and -8B-Thinking"),
    checked=(
        "logits equal Qwen3ForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
        "byte counts equal the published ones of 1.7B, 4B and 8B",
    ),
)
