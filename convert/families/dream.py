"""Dream-7B, Dream-Coder and DiffuCoder: a Qwen2 body with full attention and shifted predictions.

The models began as causal ones, so the output at a position still predicts the next token. No
block length belongs to them; 32 is that of Fast-dLLM's script, and any other can be asked for.
"""

from __future__ import annotations

from typing import Any

from convert.families import llama_body
from convert.families.base import Family
from convert.fields import FieldReader


def parse_config(fields: FieldReader) -> dict[str, Any]:
    """The network fields of a Dream `config.json`."""
    fields.allow("attention_bias", True, None)
    fields.allow("use_mrope", False, None)
    return llama_body.read_sizes(fields) | {
        "head_dim": llama_body.read_head_dim(fields),
        "qkv_bias": True,
        "qk_norm": False,
    }


FAMILY = Family(
    name="dream",
    architectures=("DreamModel",),
    model_types=("Dream",),
    keys=llama_body.KEYS,
    ignored_keys=llama_body.IGNORED_KEYS,
    parse_config=parse_config,
    mask_token_id=151666,
    mask_tokens=("<|mask|>",),
    turn_end_tokens=("<|im_end|>",),
    stop_token_ids=(151643, 151645),
    block_length=32,
    attention="full",
    shifts_predictions=True,
    reference="qwen2",
    models=(
        "Dream-v0-Base-7B and -Instruct-7B",
        "Dream-Coder-v0-Base-7B and -Instruct-7B",
        "DiffuCoder-7B (Base, Instruct, cpGRPO)",
        "dParallel-Dream-7B-Instruct",
    ),
    checked=(
        "logits equal Qwen2ForCausalLM of transformers without a mask on tiny random weights",
        "conversion is bit for bit",
        "parameter count equals that of the published sizes",
    ),
    limits=(
        "a text is denoised in blocks from left to right; the published script takes positions "
        "from all of it, which a block as long as the text does here",
        "the published rules origin, topk_margin and alg_temp are not there",
        "Fast-dLLM's script commits the first token of a block from the refreshing pass whatever "
        "its confidence; here the rule decides, and the position before the block is part of "
        "every pass",
    ),
)
