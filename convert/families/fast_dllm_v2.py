"""Fast-dLLM v2: a Qwen2 body that denoises blocks with shifted predictions."""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family
from convert.fields import FieldReader


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of a Fast-dLLM v2 `config.json`."""
    fields.allow("attention_bias", True, None)
    return llama_body.read_sizes(fields) | {
        "head_dim": llama_body.read_head_dim(fields),
        "qkv_bias": True,
        "qk_norm": False,
    }


FAMILY = Family(
    name="fast_dllm_v2",
    architectures=("Fast_dLLM_QwenForCausalLM",),
    model_types=("Fast_dLLM_Qwen",),
    keys=llama_body.KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_token_id=151665,
    mask_tokens=("|<MASK>|",),
    turn_end_tokens=("<|im_end|>",),
    stop_token_ids=(151645,),
    block_length=32,
    shifts_predictions=True,
    reference="qwen2",
    models=("Fast_dLLM_v2_1.5B", "Fast_dLLM_v2_7B"),
    checked=(
        "logits equal Qwen2ForCausalLM of transformers on tiny random weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
    limits=(
        "with a sparse cache LLM and the server refuse it; prompts share no pages",
        "strategy sub_blocks is the published rule, sub_block_cache=True its cache",
        "a prompt of exactly one block is prefilled; the published loop loses it",
    ),
)
