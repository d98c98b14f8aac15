"""The tiny LLaDA-shaped model: full attention, no norm of queries and keys, a head of its own."""

import functools

import jax
import jax.numpy as jnp

from examples.train_tiny import model

SHAPE = model.Shape(heads=4, kv_heads=4, rope_theta=5e5, eps=1e-5, qk_norm=False, tied=False)
"""As many KV heads as heads, and heads times their size the hidden size, as in LLaDA-8B."""


def attend(q, k, v, *, fused: bool):
    """Attention of every position to all; `fused` by cuDNN, whose scores leave no memory trace."""
    run = functools.partial(
        jax.nn.dot_product_attention, implementation="cudnn" if fused else "xla"
    )
    return run(q, k, v) if fused else jax.checkpoint(run)(q, k, v)


def can_fuse() -> bool:
    """Whether cuDNN's attention runs here, and agrees with XLA's in value and gradient."""
    if jax.default_backend() != "gpu":
        return False
    keys = jax.random.split(jax.random.key(0), 4)
    q, k, v, grad = (jax.random.normal(key, (2, 256, 4, 64), jnp.bfloat16) for key in keys)

    def run(fused: bool):
        out, pullback = jax.vjp(functools.partial(attend, fused=fused), q, k, v)
        return out, *pullback(grad)

    try:
        pairs = zip(run(True), run(False), strict=True)
        return all(bool(jnp.allclose(a, b, rtol=0.05, atol=0.05)) for a, b in pairs)
    except Exception as error:  # whatever is missing, the plain form runs
        print(f"cuDNN attention does not run: {str(error)[:200]}", flush=True)
        return False


def logits(params: dict, tokens, shape: model.Shape, *, fused: bool):
    """Logits [B, T, V] of whole texts, in float32."""
    rows, length = tokens.shape
    tables = model.rope_tables(jnp.broadcast_to(jnp.arange(length), (rows, length)), shape)
    x = model.embed(params["embed"], tokens)
    for index in range(shape.layers):
        p = model.layer_params(params, index)
        x = model.layer(p, x, tables, lambda *qkv: (attend(*qkv, fused=fused), None), shape)[0]
    return model.logits(params, x, shape)
