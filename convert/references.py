"""The torch references of `--check`: classes of transformers itself, filled from a checkpoint.

Their configs are made here from the published fields, not from our description, so that a
misread config shows up as other logits. Code that a checkpoint brings along is never run.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from convert import canvas_reference
from convert.reader import HuggingFaceFolder
from convert.safetensors_file import FileStream
from herald_jax.configs import ModelConfig

_SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
)


def _shared(published: dict[str, Any], *names: str) -> dict[str, Any]:
    rope = published.get("rope_parameters") or {}
    theta = rope.get("rope_theta", published.get("rope_theta"))
    found = {name: published[name] for name in (*_SHARED, *names) if name in published}
    return found | {
        "hidden_act": published.get("hidden_act", "silu"),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "tie_word_embeddings": published.get("tie_word_embeddings", False),
    }


def _qwen3(published: dict[str, Any]) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = _shared(published, "head_dim", "attention_bias")
    return Qwen3ForCausalLM(Qwen3Config(**settings))


def _qwen2(published: dict[str, Any]) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_shared(published, "head_dim")))


def _llama(published: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_shared(published, "head_dim")))


def _llada(published: dict[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "d_model",
        "intermediate_size": "mlp_hidden_size",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "num_key_value_heads": "n_kv_heads",
        "max_position_embeddings": "max_sequence_length",
        "rms_norm_eps": "rms_norm_eps",
        "rope_theta": "rope_theta",
    }
    renamed = {ours: published[theirs] for ours, theirs in names.items()}
    return LlamaForCausalLM(LlamaConfig(**_shared(renamed)))


def _qwen3_moe(published: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob")
    settings = _shared(published, "head_dim", "attention_bias", *names)
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**settings))


def _glm4_moe(published: dict[str, Any]) -> Any:
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    names = (
        *("head_dim", "moe_intermediate_size", "num_experts_per_tok", "routed_scaling_factor"),
        *("n_group", "topk_group", "first_k_dense_replace", "norm_topk_prob"),
    )
    settings = _shared(published, *names)
    settings["num_key_value_heads"] = (
        published["num_key_value_heads"] or published["num_attention_heads"]
    )
    rope = published.get("rope_parameters") or published
    settings["rope_parameters"]["partial_rotary_factor"] = rope["partial_rotary_factor"]
    more = {
        "n_routed_experts": published["num_experts"],
        "n_shared_experts": published["num_shared_experts"],
        "use_qk_norm": True,
        "num_mtp_layers": 0,
    }
    return Glm4MoeForCausalLM(Glm4MoeConfig(**settings, **more))


BUILDERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "qwen3": _qwen3,
    "qwen2": _qwen2,
    "llama": _llama,
    "llada": _llada,
    "qwen3_moe": _qwen3_moe,
    "glm4_moe": _glm4_moe,
    "diffusion_gemma": canvas_reference.build,
}
"""Reference by the name that a family gives: from the published config to an empty model."""

_EXPERT = re.compile(r"(.*\.mlp\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
_STACK = re.compile(r"(.*\.mlp\.experts)\.(gate|up|down)_proj")
_RENAMED = {
    "llada": (
        ("model.transformer.wte.", "model.embed_tokens."),
        ("model.transformer.ln_f.", "model.norm."),
        ("model.transformer.ff_out.", "lm_head."),  # before the MLP's of the same name
        ("model.transformer.blocks.", "model.layers."),
        (".attn_norm.", ".input_layernorm."),
        (".ff_norm.", ".post_attention_layernorm."),
        (".q_proj.", ".self_attn.q_proj."),
        (".k_proj.", ".self_attn.k_proj."),
        (".v_proj.", ".self_attn.v_proj."),
        (".attn_out.", ".self_attn.o_proj."),
        (".ff_proj.", ".mlp.gate_proj."),
        (".up_proj.", ".mlp.up_proj."),
        (".ff_out.", ".mlp.down_proj."),
    ),
    "glm4_moe": (
        ("model.word_embeddings.", "model.embed_tokens."),
        (".attention.query_layernorm.", ".self_attn.q_norm."),
        (".attention.key_layernorm.", ".self_attn.k_norm."),
        (".attention.dense.", ".self_attn.o_proj."),
        (".mlp.gate.expert_bias", ".mlp.gate.e_score_correction_bias"),
    ),
}


def build(reference: str, published: dict[str, Any]) -> Any:
    """An fp32 model with the attention that takes an additive 4-D mask."""
    model = BUILDERS[reference](published).float().eval()
    model.set_attn_implementation("eager")
    if hasattr(model.config, "num_experts_per_tok"):
        model.set_experts_implementation("eager")  # the plain loop over experts
    return model


def fill(reference: str, model: Any, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Copies published tensors into the model; keys that it has no place for are passed over.

    Raises:
        AssertionError: If a parameter of the model was not filled.
    """
    import torch

    slots: dict[str, Any] = dict(model.state_dict())
    inner = getattr(model.config, "moe_intermediate_size", 0)
    heads = model.config.num_attention_heads, model.config.num_key_value_heads
    filled: dict[str, int] = {}

    def put(name: str, target: Any, array: np.ndarray) -> None:
        target.copy_(torch.from_numpy(array))
        filled[name] = filled.get(name, 0) + target.numel()

    def put_expert(prefix: str, kind: str, chosen: Any, array: np.ndarray) -> None:
        if kind == "down":
            put(f"{prefix}.down_proj", slots[f"{prefix}.down_proj"][chosen], array)
        else:
            rows = slice(0, inner) if kind == "gate" else slice(inner, None)
            name = f"{prefix}.gate_up_proj"
            put(name, slots[name][chosen][..., rows, :], array)

    with torch.no_grad():
        for key, array in tensors:
            for old, new in _RENAMED.get(reference, ()):
                key = key.replace(old, new)
            if match := _EXPERT.fullmatch(key):
                put_expert(match[1], match[3], int(match[2]), array)
            elif match := _STACK.fullmatch(key):
                put_expert(match[1], match[2], slice(None), array)
            elif key.endswith(".attention.query_key_value.weight"):
                dim = len(array) // (heads[0] + 2 * heads[1])
                parts = np.split(array, [heads[0] * dim, (heads[0] + heads[1]) * dim])
                for part, letter in zip(parts, "qkv", strict=True):
                    name = key.replace("attention.query_key_value", f"self_attn.{letter}_proj")
                    put(name, slots[name], part)
            elif key in slots:
                put(key, slots[key], array)
        for name, slot in slots.items():
            if name.endswith("o_proj.bias"):
                slot.zero_()  # Qwen3 puts a bias there too, these checkpoints do not
                filled[name] = slot.numel()
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    gaps = [n for n, slot in slots.items() if n not in tied and filled.get(n) != slot.numel()]
    assert not gaps, f"not filled: {gaps}"


def block_causal_logits(model: Any, tokens: np.ndarray, block_length: int) -> np.ndarray:
    """Logits [R, n, V] of whole texts under the block-causal mask.

    A block as long as the text makes attention full.
    """
    import torch

    blocks = torch.arange(tokens.shape[1]) // block_length
    hidden = blocks[None, :] > blocks[:, None]
    mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)
    with torch.no_grad():
        out = model(
            torch.from_numpy(tokens),
            attention_mask=mask.expand(len(tokens), 1, *hidden.shape),
            use_cache=False,
        )
    return out.logits.numpy()


def reference_logits(
    reference: str,
    hf: HuggingFaceFolder,
    config: ModelConfig,
    tokens: np.ndarray,
    dtype: np.dtype[Any],
) -> np.ndarray:
    """Logits [n, V] of one text by the reference, with the weights rounded to `dtype`.

    Routers are not rounded, because converted ones are not.
    """
    model = build(reference, hf.config)

    def tensors() -> Iterable[tuple[str, np.ndarray]]:
        for file in hf.files:
            with FileStream(file, digest=False) as stream:
                for entry in file.tensors:
                    if entry.dtype is not None:
                        is_wide = ".mlp.gate." in entry.key
                        array = stream.read(
                            entry, np.dtype(np.float32) if is_wide else dtype, transpose=False
                        )
                        yield entry.key, array.astype(np.float32)

    fill(reference, model, tensors())
    block_length = len(tokens) if config.is_bidirectional else config.block_length
    return block_causal_logits(model, tokens[None], block_length)[0]
