"""Stable-DiffCoder: a Llama body that denoises blocks in place.

Its `model_type` is `llama`, so only `architectures` tells it from a causal Llama.
"""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family
from convert.fields import FieldReader


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of a Llama `config.json`."""
    fields.allow("attention_bias", False, None)
    fields.allow("mlp_bias", False, None)
    return llama_body.read_sizes(fields) | {
        "head_dim": llama_body.read_head_dim(fields),
        "qkv_bias": False,
        "qk_norm": False,
    }


FAMILY = Family(
    name="stable_diffcoder",
    architectures=("StableDiffcoderForCausalLM",),
    model_types=(),
    keys=llama_body.KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_token_id=5,
    stop_token_ids=(2,),
    block_length=4,
    reference="llama",
    models=("Stable-DiffCoder-8B-Base", "Stable-DiffCoder-8B-Instruct"),
    checked=(
        "logits equal LlamaForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
    limits=(
        "the published script shortens the last block to the tokens asked for; here a whole block "
        "is denoised and cut",
    ),
)
