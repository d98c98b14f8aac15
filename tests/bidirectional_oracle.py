"""Fast-dLLM's decoding written a second time: NumPy float64, one row, plain loops.

Keys and values are kept by position; a pass renews those of its window, and sees all. What is a
window and when the whole text is run is spelled out here as `herald_jax.decoding.bidirectional`
describes it. The noise, the proposals and the unmask rules are those of `tests.oracle`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from herald_jax.configs import ModelConfig
from herald_jax.sampling import SamplingParams
from tests.oracle import Decoded, Proposed, choose, noise_of, propose, rms_norm, rotate, softmax

Kept = dict[tuple[int, int], tuple[np.ndarray, np.ndarray]]
"""(layer, position) -> keys and values [K, D]."""


def run_window(
    config: ModelConfig, params: Any, tokens: list[int], window: range, kept: Kept
) -> dict[int, np.ndarray]:
    """Logits by position of a pass over `window`; renews its keys and values in `kept`."""
    dim, places = config.head_dim, np.array(window)
    x = params["embed_tokens"]["embedding"][[tokens[i] for i in window]]

    def project(weights: Any, y: np.ndarray) -> np.ndarray:
        out = y @ weights["kernel"]
        return out + weights["bias"] if "bias" in weights else out

    def heads(name: str, y: np.ndarray, count: int) -> list[np.ndarray]:
        return np.split(project(attention[f"{name}_proj"], y), count, axis=-1)

    def turn(y: np.ndarray) -> np.ndarray:
        return rotate(y, places, config.rotary_dim, config.rope_theta)

    for number in range(config.num_layers):
        layer = params["layers"][number]
        attention, mlp = layer["attention"], layer["mlp"]
        y = rms_norm(x, layer["input_layernorm"]["scale"], config.rms_norm_eps)
        q, k = heads("q", y, config.num_heads), heads("k", y, config.num_kv_heads)
        v = heads("v", y, config.num_kv_heads)
        if config.qk_norm:
            q = [rms_norm(h, attention["q_norm"]["scale"], config.rms_norm_eps) for h in q]
            k = [rms_norm(h, attention["k_norm"]["scale"], config.rms_norm_eps) for h in k]
        k = [turn(h) for h in k]
        for at, position in enumerate(window):
            kept[number, position] = np.stack([h[at] for h in k]), np.stack([h[at] for h in v])
        outs = []
        for head in range(config.num_heads):
            group = head // config.heads_per_kv_head
            keys = np.stack([kept[number, i][0][group] for i in range(len(tokens))])
            values = np.stack([kept[number, i][1][group] for i in range(len(tokens))])
            outs.append(softmax(turn(q[head]) @ keys.T / math.sqrt(dim)) @ values)
        x = x + project(attention["o_proj"], np.concatenate(outs, -1))
        y = rms_norm(x, layer["post_attention_layernorm"]["scale"], config.rms_norm_eps)
        gate = project(mlp["gate_proj"], y)
        x = x + project(mlp["down_proj"], gate / (1 + np.exp(-gate)) * project(mlp["up_proj"], y))
    x = rms_norm(x, params["norm"]["scale"], config.rms_norm_eps)
    table = params["embed_tokens"]["embedding"].T
    logits = x @ (table if config.tie_word_embeddings else params["lm_head"]["kernel"])
    return dict(zip(window, logits, strict=True))


def decode_bidirectional(
    config: ModelConfig,
    params: Any,
    prompt: list[int],
    seed: int,
    sampling: SamplingParams,
    cache: str,
) -> Decoded:
    """One row from prompt to end; `params` from `to_float64`."""
    size, shift = config.block_length, int(config.shifts_predictions)
    stops = set(sampling.stop_token_ids or ())
    if not sampling.ignore_eos:
        stops |= set(config.stop_token_ids)
    row = Decoded()
    text: list[int | None] = [*prompt, *[None] * sampling.max_tokens]
    steps: dict[int, int] = {}
    known: dict[int, Proposed] = {}
    end, block = len(text), 0
    while not row.finish_reason:
        first = len(prompt) + block * size
        last = min(first + size, len(text))
        kept: Kept = {}
        step = 0
        while None in text[first:last]:
            begin = max(first - shift, 0)
            window = range(len(text))
            if step > 0 and cache == "prefix":
                window = range(begin, len(text))
            if step > 0 and cache == "dual":
                window = range(begin, min(begin + size + shift, len(text)))
            inputs = [config.mask_token_id if token is None else token for token in text]
            logits = run_window(config, params, inputs, window, kept)
            noise: Any = [None] * size
            if sampling.temperature > 0:
                noise = noise_of(seed, block, step, size, config.vocab_size)
            offers = {
                i: propose(logits[max(first + i - shift, 0)], config, sampling, noise[i])
                for i in range(last - first)
                if text[first + i] is None
            }
            confidence = {i: offer.confidence for i, offer in offers.items()}
            entropy = {i: offer.entropy for i, offer in offers.items()}
            for i in choose(sampling, confidence, entropy, step, size, row):
                row.watch(offers[i].gap)
                text[first + i] = offers[i].token
                steps[first + i], known[first + i] = step, offers[i]
            step += 1
        row.steps_per_block.append(step)
        for position in range(first, last):
            if text[position] in stops:
                end, row.finish_reason = position + 1, "stop"
                break
        else:
            if last == len(text):
                row.finish_reason = "length"
        block += 1
    new = range(len(prompt), end)
    row.tokens = [text[i] for i in new]  # type: ignore[misc]
    row.unmask_steps = [steps[i] for i in new]
    row.confidences = [known[i].confidence for i in new]
    row.logprobs = [known[i].logprob for i in new]
    row.text = text  # type: ignore[assignment]
    return row
