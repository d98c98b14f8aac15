"""The tiny SDAR-shaped transformer: parameters, one layer, and the training forward pass.

Matrices are stored [layers, in, out]; `export.py` turns them into Hugging Face's layout.
"""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from examples.train_tiny.attention import BLOCK, attention


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Sizes of the model; the defaults are the 5.9M-parameter model in `assets/tiny-sdar`.

    `qk_norm` is an RMS norm of every query and key head; with `tied` the head is the embedding.
    """

    vocabulary: int = 2048
    layers: int = 8
    hidden: int = 256
    intermediate: int = 448
    heads: int = 8
    kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 1e6
    eps: float = 1e-6
    qk_norm: bool = True
    tied: bool = True


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
TOP = ("embed", "norm_final", "head")  # what no layer holds


def init(key, shape: Shape) -> dict:
    """Random float32 parameters."""
    hidden, inner = shape.hidden, shape.intermediate
    query, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    sizes = {
        "q": (hidden, query),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (query, hidden),
        "gate": (hidden, inner),
        "up": (hidden, inner),
        "down": (inner, hidden),
    }
    keys = jax.random.split(key, len(sizes) + 1)
    params = {"embed": 0.05 * jax.random.normal(keys[0], (shape.vocabulary, hidden))}
    for matrix_key, (name, (rows, columns)) in zip(keys[1:], sizes.items(), strict=True):
        gain = 0.2 if name in ("o", "down") else 1.0
        noise = jax.random.normal(matrix_key, (shape.layers, rows, columns))
        params[name] = gain * rows**-0.5 * noise
    for name in ("norm_attention", "norm_mlp"):
        params[name] = jnp.ones((shape.layers, hidden))
    for name in ("norm_q", "norm_k") if shape.qk_norm else ():
        params[name] = jnp.full((shape.layers, shape.head_dim), 1.2, jnp.float32)
    params["norm_final"] = jnp.ones((hidden,))
    if not shape.tied:
        params["head"] = params["embed"]
    return params


@jax.custom_vjp
def embed(table, ids):
    """Rows of the table. The gradient is a one-hot product: XLA's scatter-add serialises on the
    thousands of equal mask and pad ids."""
    return table[ids]


def _embed_backward(saved, grad):
    ids, like = saved
    one_hot = jax.nn.one_hot(ids.ravel(), like.shape[0], dtype=grad.dtype)
    flat = grad.reshape(-1, grad.shape[-1])
    table = jnp.einsum("nv,nd->vd", one_hot, flat, preferred_element_type=jnp.float32)
    return table.astype(like.dtype), None


embed.defvjp(lambda table, ids: (table[ids], (ids, table)), _embed_backward)


def rms_norm(x, gain, eps):
    """RMS norm in float32, result in x's dtype."""
    x32 = x.astype(jnp.float32)
    x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * gain.astype(jnp.float32)).astype(x.dtype)


def rope_tables(positions, shape: Shape):
    """(cos, sin), each [B, T, 1, D / 2] in float32."""
    half = shape.head_dim // 2
    frequency = shape.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x, tables):
    """Half-split rotary embedding."""
    cos, sin = tables
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def layer(p: dict, x, tables, attend, shape: Shape):
    """(output, attend's second result) of one layer; `attend(q, k, v)` owns mask and cache."""
    batch, tokens, _ = x.shape
    h = rms_norm(x, p["norm_attention"], shape.eps)
    q = (h @ p["q"]).reshape(batch, tokens, shape.heads, shape.head_dim)
    k = (h @ p["k"]).reshape(batch, tokens, shape.kv_heads, shape.head_dim)
    v = (h @ p["v"]).reshape(batch, tokens, shape.kv_heads, shape.head_dim)
    if shape.qk_norm:
        q, k = rms_norm(q, p["norm_q"], shape.eps), rms_norm(k, p["norm_k"], shape.eps)
    out, extra = attend(rotate(q, tables), rotate(k, tables), v)
    x = x + out.reshape(batch, tokens, -1) @ p["o"]
    h = rms_norm(x, p["norm_mlp"], shape.eps)
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"], extra


def layer_params(params: dict, index: int) -> dict:
    """The parameters of one layer."""
    return {name: a[index] for name, a in params.items() if name not in TOP}


def logits(params: dict, x, shape: Shape):
    """Float32 logits through the head, or the embedding where they are tied."""
    h = rms_norm(x, params["norm_final"], shape.eps)
    head = params["embed" if shape.tied else "head"]
    return jnp.einsum("...d,vd->...v", h, head, preferred_element_type=jnp.float32)


def noised_logits(params: dict, batch: dict, shape: Shape, *, kernel: bool):
    """Logits [B, M, 32, V] of the noised blocks of a training batch (see `data.py`)."""
    clean, noised, blocks = (batch[name].astype(jnp.int32) for name in ("clean", "noised", "block"))
    rows, length = clean.shape
    tokens = jnp.concatenate([clean, noised.reshape(rows, -1)], axis=1)
    within = jnp.arange(BLOCK)
    noised_positions = (blocks[:, :, None] * BLOCK + within).reshape(rows, -1)
    clean_positions = jnp.broadcast_to(jnp.arange(length), (rows, length))
    positions = jnp.concatenate([clean_positions, noised_positions], axis=1)
    clean_blocks = jnp.broadcast_to(jnp.arange(length // BLOCK), (rows, length // BLOCK))
    prefix = jnp.concatenate([clean_blocks, blocks], axis=1).astype(jnp.int32)
    hidden = jnp.pad(batch["hidden"].reshape(rows, -1).astype(jnp.int32), ((0, 0), (length, 0)))
    tables = rope_tables(positions, shape)

    def attend(q, k, v):
        return attention(q, k, v, prefix, hidden, length, kernel=kernel), None

    policy = jax.checkpoint_policies.save_only_these_names("attention")

    @functools.partial(jax.checkpoint, policy=policy)
    def run_layer(p, x):
        return layer(p, x, tables, attend, shape)[0]

    x = embed(params["embed"], tokens)
    for index in range(shape.layers):
        x = run_layer(layer_params(params, index), x)
    return logits(params, x[:, length:].reshape(*noised.shape, -1), shape)
