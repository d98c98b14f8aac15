"""The torch reference of canvas models: transformers' own DiffusionGemma, text only.

It has two sets of logits: those of the encoder, which the published loop never asks for, and
those of a canvas that has a text before it and a step's logits behind it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from convert.reader import HuggingFaceFolder
from convert.safetensors_file import FileStream
from herald_jax.cache.canvas import canvas_attend, empty_cache, text_attend
from herald_jax.configs import ModelConfig
from herald_jax.models.decoder import Params, bind_canvas

_WIDE = (".router.", ".layer_scalar")
_TINY_VISION = {
    **{"model_type": "gemma4_vision", "hidden_size": 8, "intermediate_size": 12},
    **{"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2},
    **{"head_dim": 4, "patch_size": 4, "position_embedding_size": 16},
}


class CanvasInputs(NamedTuple):
    """A text, a canvas after it, and the logits that the canvas is conditioned on."""

    text: Int[np.ndarray, "R P"]
    canvas: Int[np.ndarray, "R B"]
    previous: Float[np.ndarray, "R B V"]


class CanvasLogits(NamedTuple):
    """Logits of the text by the encoder, and of the canvas."""

    text: Float[np.ndarray, "R P V"]
    canvas: Float[np.ndarray, "R B V"]


def build(published: dict[str, Any]) -> Any:
    """An fp32 model of the published sizes, with a tiny vision tower that is never run."""
    from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion

    settings = {k: v for k, v in published.items() if k not in ("architectures", "dtype")}
    settings |= {"vision_config": dict(_TINY_VISION), "text_config": dict(settings["text_config"])}
    model = DiffusionGemmaForBlockDiffusion(DiffusionGemmaConfig(**settings))
    model = model.float().eval()
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # the plain loop over experts
    return model


def fill(model: Any, tensors: Iterable[tuple[str, np.ndarray]]) -> None:
    """Copies published tensors into the model.

    Raises:
        AssertionError: If a parameter of the text part was not filled.
    """
    import torch

    slots: dict[str, Any] = dict(model.state_dict())
    filled: set[int] = set()
    with torch.no_grad():
        for key, array in tensors:
            if key in slots and slots[key].shape == array.shape:
                slots[key].copy_(torch.from_numpy(array))
                filled.add(slots[key].data_ptr())
    vision = ("model.encoder.vision_tower.", "model.encoder.embed_vision.")
    own = {name: slot for name, slot in slots.items() if not name.startswith(vision)}
    gaps = [name for name, slot in own.items() if slot.data_ptr() not in filled]
    assert not gaps, f"not filled: {gaps}"


def logits_of(model: Any, inputs: CanvasInputs) -> CanvasLogits:
    """Both logits by the reference."""
    import torch

    with torch.no_grad():
        text = torch.from_numpy(inputs.text)
        masks = model.model.encoder.create_masks_for_generate(
            config=model.config,
            inputs_embeds=model.get_input_embeddings()(text),
            attention_mask=torch.ones_like(text, dtype=torch.bool),
            cache=None,
            position_ids=torch.arange(text.shape[1])[None],
        )
        encoded = model.model.encoder(input_ids=text, attention_mask=masks)
        cap = model.config.text_config.final_logit_softcapping
        raw = model.lm_head(encoded.last_hidden_state)
        canvas = model(
            decoder_input_ids=torch.from_numpy(inputs.canvas),
            cache=encoded.cache,
            self_conditioning_logits=torch.from_numpy(inputs.previous),
        )
    return CanvasLogits((cap * torch.tanh(raw / cap)).numpy(), canvas.logits.numpy())


def reference_logits(
    hf: HuggingFaceFolder, inputs: CanvasInputs, dtype: np.dtype[Any]
) -> CanvasLogits:
    """Both logits by the reference, its weights rounded to `dtype` as converted ones are."""

    def tensors() -> Iterable[tuple[str, np.ndarray]]:
        for file in hf.files:
            with FileStream(file, digest=False) as stream:
                for entry in file.tensors:
                    if entry.dtype is not None:
                        is_wide = any(part in entry.key for part in _WIDE)
                        kept = np.dtype(np.float32) if is_wide else dtype
                        array = stream.read(entry, kept, transpose=False)
                        yield entry.key, array.astype(np.float32)

    model = build(hf.config)
    fill(model, tensors())
    return logits_of(model, inputs)


def own_logits(config: ModelConfig, params: Params, inputs: CanvasInputs) -> CanvasLogits:
    """Both logits by our network, the text in one pass."""

    @jax.jit
    def run(params: Params) -> tuple[jax.Array, jax.Array]:
        decoder = bind_canvas(config, params)
        rows, length = inputs.text.shape
        starts = jnp.zeros(rows, jnp.int32)
        dtype = params["embed_tokens"]["embedding"].dtype
        cache = empty_cache(config, rows, length, dtype)
        positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
        text = jnp.asarray(inputs.text)
        hidden, fresh = decoder.encode(text, positions, text_attend(config, cache, starts))
        cache = cache.append_chunk(fresh, jnp.int32(0))
        ends = starts + length
        soft = decoder.soft_embeddings(jnp.asarray(inputs.previous))
        at = length + jnp.broadcast_to(jnp.arange(inputs.canvas.shape[1]), inputs.canvas.shape)
        attend = canvas_attend(config, cache, ends)
        out = decoder.denoise(jnp.asarray(inputs.canvas), soft, at, attend)
        return decoder.logits(hidden), decoder.logits(out)

    return CanvasLogits(*map(np.asarray, run(params)))


def random_inputs(config: ModelConfig, seed: int, rows: int, text_length: int) -> CanvasInputs:
    """Inputs that differ by row and position."""
    rng = np.random.default_rng(seed)
    shape = rows, config.block_length
    return CanvasInputs(
        rng.integers(0, config.vocab_size, (rows, text_length)),
        rng.integers(0, config.vocab_size, shape),
        rng.normal(size=(*shape, config.vocab_size)).astype(np.float32),
    )
