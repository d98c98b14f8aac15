"""Block-diffusion decoding written a second time: NumPy float64, one row, no cache, plain loops.

Every pass recomputes the whole text, under the block-causal mask unless attention is full. The
only thing shared with the package is the Gumbel noise, which a reader cannot recompute by hand.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from herald_jax.configs import ModelConfig
from herald_jax.decoding.editing import Editing
from herald_jax.decoding.propose import gumbel_noise
from herald_jax.sampling import SamplingParams

MARGIN = 2e-5
"""Decisions closer than this may fall either way in fp32."""


def sharpen(params: Any, logit_scale: float = 4.0, attention_scale: float = 2.0) -> Any:
    """Random parameters made to depend more on context, with confidences spread over (0, 1)."""

    def scale(path: Any, leaf: jax.Array) -> jax.Array:
        name = jax.tree_util.keystr(path)
        if "o_proj" in name or "q_proj" in name:
            return leaf * attention_scale
        is_head = "lm_head" in name or name == "['norm']['scale']"
        return leaf * math.sqrt(logit_scale) if is_head else leaf

    return jax.tree_util.tree_map_with_path(scale, params)


def to_float64(params: Any) -> Any:
    """The same nested dict with float64 NumPy leaves."""
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)


def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def rms_norm(x: np.ndarray, gain: np.ndarray, epsilon: float) -> np.ndarray:
    """x over its root mean square, times the gain."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * gain


def rotate(x: np.ndarray, positions: np.ndarray, rotary_dim: int, theta: float) -> np.ndarray:
    """Rotary embedding of heads [n, D]: feature i is paired with feature i + rotary_dim / 2."""
    out = x.copy()
    half = rotary_dim // 2
    for i in range(half):
        angle = positions * theta ** (-2.0 * i / rotary_dim)
        a, b = x[:, i], x[:, i + half]
        out[:, i] = a * np.cos(angle) - b * np.sin(angle)
        out[:, i + half] = a * np.sin(angle) + b * np.cos(angle)
    return out


def forward(config: ModelConfig, params: Any, tokens: list[int]) -> np.ndarray:
    """Logits [n, V] of a whole text; `params` from `to_float64`."""
    n, dim = len(tokens), config.head_dim
    positions = np.arange(n)
    blocks = positions // config.block_length
    is_visible = (blocks[None, :] <= blocks[:, None]) | config.is_bidirectional
    x = params["embed_tokens"]["embedding"][np.asarray(tokens)]

    def project(weights: Any, y: np.ndarray) -> np.ndarray:
        out = y @ weights["kernel"]
        return out + weights["bias"] if "bias" in weights else out

    for index in range(config.num_layers):
        layer = params["layers"][index]
        attention, mlp = layer["attention"], layer["mlp"]
        y = rms_norm(x, layer["input_layernorm"]["scale"], config.rms_norm_eps)
        q, k, v = (project(attention[f"{name}_proj"], y) for name in "qkv")
        heads = []
        for head in range(config.num_heads):
            kv_head = head // (config.num_heads // config.num_kv_heads)
            q_head = q[:, head * dim : (head + 1) * dim]
            k_head = k[:, kv_head * dim : (kv_head + 1) * dim]
            v_head = v[:, kv_head * dim : (kv_head + 1) * dim]
            if config.qk_norm:
                q_head = rms_norm(q_head, attention["q_norm"]["scale"], config.rms_norm_eps)
                k_head = rms_norm(k_head, attention["k_norm"]["scale"], config.rms_norm_eps)
            rotary_dim = round(dim * config.rotary_fraction)
            q_head = rotate(q_head, positions, rotary_dim, config.rope_theta)
            k_head = rotate(k_head, positions, rotary_dim, config.rope_theta)
            scores = np.where(is_visible, q_head @ k_head.T / math.sqrt(dim), -np.inf)
            heads.append(softmax(scores) @ v_head)
        x = x + project(attention["o_proj"], np.concatenate(heads, -1))
        y = rms_norm(x, layer["post_attention_layernorm"]["scale"], config.rms_norm_eps)
        gate = project(mlp["gate_proj"], y)
        x = x + project(mlp["down_proj"], gate / (1 + np.exp(-gate)) * project(mlp["up_proj"], y))
    x = rms_norm(x, params["norm"]["scale"], config.rms_norm_eps)
    if config.tie_word_embeddings:
        return x @ params["embed_tokens"]["embedding"].T
    return x @ params["lm_head"]["kernel"]


@dataclasses.dataclass
class Decoded:
    """One decoded row. `margin` is the distance of its closest decision from the other way."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    unmask_steps: list[int] = dataclasses.field(default_factory=list)
    confidences: list[float] = dataclasses.field(default_factory=list)
    logprobs: list[float] = dataclasses.field(default_factory=list)
    steps_per_block: list[int] = dataclasses.field(default_factory=list)
    finish_reason: str = ""
    margin: float = math.inf
    text: list[int] = dataclasses.field(default_factory=list)
    edits: int = 0

    def watch(self, *gaps: float) -> None:
        """Notes how close decisions were."""
        self.margin = min(self.margin, *(abs(gap) for gap in gaps if not math.isnan(gap)), math.inf)


@dataclasses.dataclass
class Proposed:
    """What one position would become, and how sure it is."""

    token: int
    confidence: float
    entropy: float
    logprob: float
    gap: float


def _entropy(p: np.ndarray) -> float:
    return float(-sum(x * math.log(x) for x in p if x > 0))


def propose(
    logits: np.ndarray, config: ModelConfig, sampling: SamplingParams, noise: np.ndarray | None
) -> Proposed:
    """The token of one position from its logits [V], by the rules of the options."""
    last = config.tokenizer_vocab_size or config.vocab_size
    allowed = [i for i in range(config.vocab_size) if i != config.mask_token_id and i < last]
    raw = dict(zip(allowed, softmax(logits[allowed]), strict=True))
    if sampling.temperature == 0:
        ranked = sorted(allowed, key=lambda i: (-logits[i], i))
        token, gap = ranked[0], logits[ranked[0]] - logits[ranked[1]]
        return Proposed(
            token, raw[token], _entropy(np.array(list(raw.values()))), math.log(raw[token]), gap
        )
    scaled = logits / sampling.temperature
    ranked = sorted(allowed, key=lambda i: (-scaled[i], i))
    gaps = []
    kept = ranked
    if 0 < sampling.top_k < len(ranked):
        gaps.append(scaled[ranked[sampling.top_k - 1]] - scaled[ranked[sampling.top_k]])
        kept = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        mass, count = 0.0, 0
        for probability in softmax(scaled[kept]):
            if count and mass >= sampling.top_p:
                break
            if count:  # the first token is kept however small top_p is
                gaps.append(mass - sampling.top_p)
            mass, count = mass + probability, count + 1
        gaps.append(mass - sampling.top_p)
        kept = kept[:count]
    assert noise is not None
    drawn = sorted(kept, key=lambda i: -(scaled[i] + noise[i]))
    token = drawn[0]
    if len(drawn) > 1:
        gaps.append(scaled[drawn[0]] + noise[drawn[0]] - scaled[drawn[1]] - noise[drawn[1]])
    support = {"raw": allowed, "scaled": allowed, "filtered": kept}[sampling.confidence]
    values = logits if sampling.confidence == "raw" else scaled
    source = dict(zip(support, softmax(values[support]), strict=True))
    return Proposed(
        token,
        source[token],
        _entropy(np.array(list(source.values()))),
        math.log(raw[token]),
        min((abs(gap) for gap in gaps), default=math.inf),
    )


def best_first(scores: dict[int, float], count: int, row: Decoded | None = None) -> list[int]:
    """The `count` keys of highest score; equal scores go to the lower key, NaN comes last."""
    keys = sorted(scores, key=lambda i: (math.isnan(scores[i]), -np.nan_to_num(scores[i]), i))
    if row is not None and 0 < count < len(keys):
        last, first_out = scores[keys[count - 1]], scores[keys[count]]
        if last != 1 or first_out != 1:  # certain in both precisions: a tie, and exact
            row.watch(last - first_out)
    return keys[:count]


def choose(
    sampling: SamplingParams,
    confidence: dict[int, float],
    entropy: dict[int, float],
    step: int,
    block_length: int,
    row: Decoded | None = None,
) -> list[int]:
    """The masked positions (keys of `confidence`) that a step commits."""
    steps = sampling.denoising_steps or block_length
    owed = block_length // steps + (1 if step < block_length % steps else 0)
    masked = sorted(confidence)
    if sampling.strategy == "sequential":
        return masked[:owed]
    if sampling.strategy == "low_confidence_static":
        return best_first(confidence, owed, row)
    if sampling.strategy == "low_confidence_dynamic":
        threshold = 0.9 if sampling.threshold is None else sampling.threshold
        if row is not None:
            row.watch(*(confidence[i] - threshold for i in masked))
        above = [i for i in masked if confidence[i] > threshold]
        return above if len(above) >= owed else best_first(confidence, owed, row)
    if sampling.strategy == "threshold":
        threshold = 0.9 if sampling.threshold is None else sampling.threshold
        if row is not None:
            row.watch(*(confidence[i] - threshold for i in masked))
        sure = {i for i in masked if confidence[i] >= threshold}
        return sorted(sure.union(best_first(confidence, owed, row)))
    if sampling.strategy == "sub_blocks":
        threshold = 0.9 if sampling.threshold is None else sampling.threshold
        size = math.ceil(block_length / 4)
        chosen: list[int] = []
        for part in sorted({i // size for i in masked}):
            own = {i: confidence[i] for i in masked if i // size == part}
            if not chosen:
                if row is not None:
                    row.watch(*(value - threshold for value in own.values()))
                chosen = [i for i in own if own[i] > threshold]
            best = best_first(own, max(owed, 0), row)
            owed -= len(best)
            chosen = sorted({*chosen, *best})
            if owed <= 0:
                return chosen
        return chosen
    if sampling.strategy == "factor":
        factor = 1.0 if sampling.factor is None else sampling.factor
        fitting = 0
        for n, i in enumerate(best_first(confidence, len(masked)), start=1):
            if row is not None:
                row.watch((n + 1) * (1 - confidence[i]) - factor)
            if (n + 1) * (1 - confidence[i]) < factor:
                fitting = n
        return best_first(confidence, max(fitting, owed), row)
    assert sampling.strategy == "entropy_bounded"
    bound = 0.35 if sampling.entropy_bound is None else sampling.entropy_bound
    total, count = 0.0, 0
    for value in sorted(entropy.values()):
        total += value
        if row is not None:
            row.watch(total - bound)
        count += total < bound
    return best_first({i: -entropy[i] for i in masked}, max(count, owed), row)


@functools.lru_cache(maxsize=4096)
def noise_of(seed: int, block: int, step: int, block_length: int, vocab_size: int) -> np.ndarray:
    """The Gumbel noise [B, V] of one step."""
    draw = _noise_program(block_length, vocab_size)
    arguments = np.array([seed], np.uint32), np.array([block], np.int32), np.array([step], np.int32)
    return np.asarray(draw(*arguments), np.float64)[0]


@functools.cache
def _noise_program(block_length: int, vocab_size: int) -> Any:
    return jax.jit(
        functools.partial(gumbel_noise, block_length=block_length, vocab_size=vocab_size)
    )


def decode(
    config: ModelConfig,
    params: Any,
    prompt: list[int],
    seed: int,
    sampling: SamplingParams,
    logits_of: Any = forward,
    editing: Editing | None = None,
) -> Decoded:
    """One row from prompt to end; `params` from `to_float64`."""
    size = config.block_length
    row = Decoded()
    stops = set(sampling.stop_token_ids or ())
    if not sampling.ignore_eos:
        stops |= set(config.stop_token_ids)
    # None is a masked position, so an id in the prompt is never taken for one.
    text: list[int | None] = list(prompt)
    steps: dict[int, int] = {}
    known: dict[int, Proposed] = {}
    block = len(prompt) // size
    while not row.finish_reason:
        first, step = block * size, 0
        shift = int(config.shifts_predictions)
        if shift and first and len(text) == first:  # the block before predicts the first token
            logits = logits_of(config, params, text)[-1]
            offer = propose(logits, config, SamplingParams(), None)
            row.watch(offer.gap)
            text.append(offer.token)
            steps[first], known[first] = 0, offer
        text += [None] * ((block + 1) * size - len(text))
        passes = 0
        while None in text or editing is not None:
            had_masks = None in text
            passes += not had_masks
            if editing is not None and passes > editing.max_steps:
                break
            inputs = [config.mask_token_id if token is None else token for token in text]
            logits = logits_of(config, params, inputs)[first:]
            noise: Any = [None] * size
            if sampling.temperature > 0:
                noise = noise_of(seed, block, step, size, config.vocab_size)
            masked = [i for i in range(size) if text[first + i] is None]
            settled = [i for i in range(size) if i not in masked and first + i >= len(prompt)]
            source = {i: max(i - shift, 0) for i in masked}
            offers = {i: propose(logits[source[i]], config, sampling, noise[i]) for i in masked}
            confidence = {i: offers[i].confidence for i in masked}
            entropy = {i: offers[i].entropy for i in masked}
            for i in choose(sampling, confidence, entropy, step, size, row):
                row.watch(offers[i].gap)
                text[first + i] = offers[i].token
                steps[first + i], known[first + i] = step, offers[i]
            step += 1
            if editing is None:
                continue
            edits = 0
            for i in settled:
                other = propose(logits[i], config, sampling, noise[i])
                if other.confidence > editing.threshold - 1e-3:
                    row.watch(other.gap)
                if other.token != text[first + i]:
                    row.watch(other.confidence - editing.threshold)
                    if other.confidence > editing.threshold:
                        text[first + i] = other.token
                        steps[first + i], known[first + i] = step - 1, other
                        edits += 1
            row.edits += edits
            if not had_masks and not edits:
                break
        row.steps_per_block.append(step)
        end = len(prompt) + sampling.max_tokens
        for position in range(max(first, len(prompt)), min(first + size, end)):
            if text[position] in stops:
                end, row.finish_reason = position + 1, "stop"
                break
        else:
            if len(text) >= end:
                row.finish_reason = "length"
        block += 1
    new = range(len(prompt), end)
    row.tokens = [text[i] for i in new]  # type: ignore[misc]
    row.unmask_steps = [steps[i] for i in new]
    row.confidences = [known[i].confidence for i in new]
    row.logprobs = [known[i].logprob for i in new]
    row.text = text  # type: ignore[assignment]
    return row


def assert_row(
    output: Any, index: int, expected: Decoded, tolerance: float = 1e-4, *, commit_passes: int = 1
) -> None:
    """Compares one row of a `GenerationOutput` with the oracle's."""
    length = len(expected.tokens)
    tokens, steps = np.asarray(output.tokens)[index], np.asarray(output.unmask_steps)[index]
    assert tokens[:length].tolist() == expected.tokens
    assert steps[:length].tolist() == expected.unmask_steps
    assert (tokens[length:] == -1).all() and (steps[length:] == -1).all()
    assert int(output.lengths[index]) == length
    assert int(output.finish_reasons[index]) == {"length": 0, "stop": 1}[expected.finish_reason]
    blocks = len(expected.steps_per_block)
    done = np.asarray(output.steps_per_block)[index]
    assert done[:blocks].tolist() == expected.steps_per_block and not done[blocks:].any()
    assert int(output.forwards[index]) == sum(expected.steps_per_block) + commit_passes * blocks
    for name in ("confidences", "logprobs"):
        values = np.asarray(getattr(output, name))[index]
        np.testing.assert_allclose(values[:length], getattr(expected, name), atol=tolerance)
        assert not values[length:].any()


@contextlib.contextmanager
def count_compilations() -> Iterator[list[str]]:
    """Collects one entry for every program that XLA compiles, or takes from the disk cache."""
    compiled: list[str] = []

    def listen(event: str, duration: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
