"""Block-diffusion attention for training: a Pallas (Triton) flash kernel and its plain-JAX twin.

A sequence is `clean` tokens followed by noised copies of some of its blocks, all cut into blocks of
32. A query block sees its own block and a prefix of whole clean blocks, `prefix[b, j]` of them, so
no mask tensor exists. One tile is one query block times the GQA group: 32 x 4 = 128 rows.

In a lone-mask probe each mask must not see the other masks: `hidden[b, t] = 1` hides key `t` from
every query of its own block but itself. Noised blocks must come sorted by their prefix.

Letters: B batch, T tokens, N = T / 32 tiles, H KV heads, G group, D head size, R = 32 G rows.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

BLOCK = 32
KEYS = 64  # keys of the prefix visited at a time
LOG2E = 1.4426950408889634


def _dot(a, b, transpose_b=False, transpose_a=False):
    contracted = ((0 if transpose_a else 1,), (1 if transpose_b else 0,))
    return lax.dot_general(a, b, (contracted, ((), ())), preferred_element_type=jnp.float32)


def _own_visible(hidden, rows, group):
    """[R, 32]: which keys of its own block each query row sees."""
    row = lax.broadcasted_iota(jnp.int32, (rows, BLOCK), 0) // group
    column = lax.broadcasted_iota(jnp.int32, (rows, BLOCK), 1)
    return (row == column) | (hidden[None, :] == 0)


def _forward_kernel(prefix, hidden, q, k_own, v_own, k, v, out, lse, *, group, scale):
    rows, dim = q.shape
    query = q[...]
    score = _dot(query, k_own[...], True) * scale
    score = jnp.where(_own_visible(hidden[...], rows, group), score, -jnp.inf)
    top = score.max(axis=1)
    weight = jnp.exp2(score - top[:, None])
    total = weight.sum(axis=1)
    acc = _dot(weight.astype(query.dtype), v_own[...])
    keys = prefix[0] * BLOCK

    def visit(i, carry):
        top, total, acc = carry
        span = pl.ds(i * KEYS, KEYS)
        score = _dot(query, k[span, :], True) * scale
        column = i * KEYS + lax.broadcasted_iota(jnp.int32, (rows, KEYS), 1)
        score = jnp.where(column < keys, score, -jnp.inf)
        new_top = jnp.maximum(top, score.max(axis=1))
        weight = jnp.exp2(score - new_top[:, None])
        shrink = jnp.exp2(top - new_top)
        total = total * shrink + weight.sum(axis=1)
        acc = acc * shrink[:, None] + _dot(weight.astype(query.dtype), v[span, :])
        return new_top, total, acc

    top, total, acc = lax.fori_loop(0, (keys + KEYS - 1) // KEYS, visit, (top, total, acc))
    out[...] = (acc / total[:, None]).astype(out.dtype)
    lse[...] = top + jnp.log2(total)


def _query_kernel(
    prefix, hidden, q, k_own, v_own, k, v, d_out, lse, delta, dq, dk_own, dv_own, *, group, scale
):
    """Gradient of one query tile, and of the keys and values of its own block."""
    rows, dim = q.shape
    query, grad, log_total, shift = q[...], d_out[...], lse[...], delta[...]
    key, value = k_own[...], v_own[...]
    score = _dot(query, key, True) * scale
    weight = jnp.exp2(score - log_total[:, None])
    weight = jnp.where(_own_visible(hidden[...], rows, group), weight, 0.0)
    d_score = (weight * (_dot(grad, value, True) - shift[:, None])).astype(query.dtype)
    dk_own[...] = _dot(d_score, query, transpose_a=True).astype(dk_own.dtype)
    dv_own[...] = _dot(weight.astype(query.dtype), grad, transpose_a=True).astype(dv_own.dtype)
    keys = prefix[0] * BLOCK

    def visit(i, acc):
        span = pl.ds(i * KEYS, KEYS)
        key = k[span, :]
        weight = jnp.exp2(_dot(query, key, True) * scale - log_total[:, None])
        column = i * KEYS + lax.broadcasted_iota(jnp.int32, (rows, KEYS), 1)
        weight = jnp.where(column < keys, weight, 0.0)
        d_score = weight * (_dot(grad, v[span, :], True) - shift[:, None])
        return acc + _dot(d_score.astype(query.dtype), key)

    dq[...] = lax.fori_loop(0, (keys + KEYS - 1) // KEYS, visit, _dot(d_score, key))


def _key_kernel(prefix, start, q, k, v, d_out, lse, delta, dk, dv, *, tiles, clean_tiles, scale):
    """Gradient of 64 keys and values of the clean prefix, over every later query tile."""
    key, value = k[...], v[...]
    rows = q.shape[0] // tiles
    chunk = pl.program_id(0)
    key_block = chunk * (KEYS // BLOCK) + (
        lax.broadcasted_iota(jnp.int32, (KEYS, rows), 0) // BLOCK
    )

    def visit(j, carry):
        dk, dv = carry
        span = pl.ds(j * rows, rows)
        query, grad = q[span, :], d_out[span, :]
        weight = jnp.exp2(_dot(key, query, True) * scale - lse[span][None, :])
        weight = jnp.where(key_block < prefix[j], weight, 0.0)
        d_score = weight * (_dot(value, grad, True) - delta[span][None, :])
        dk = dk + _dot(d_score.astype(query.dtype), query)
        dv = dv + _dot(weight.astype(query.dtype), grad)
        return dk, dv

    zero = jnp.zeros(key.shape, jnp.float32)
    first = chunk * (KEYS // BLOCK) + 1
    carry = lax.fori_loop(first, clean_tiles, visit, (zero, zero))
    dk[...], dv[...] = lax.fori_loop(start[0], tiles, visit, carry)


def _specs(tiles, rows, tokens, dim):
    """Block specs by role; the grid is (tile or chunk, KV head, batch)."""
    spec = pl.BlockSpec
    return {
        "scalar": spec((None, 1), lambda j, h, b: (b, j)),
        "scalars": spec((None, tiles), lambda j, h, b: (b, 0)),
        "hidden": spec((None, BLOCK), lambda j, h, b: (b, j)),
        "tile": spec((None, None, rows, dim), lambda j, h, b: (b, h, j, 0)),
        "row": spec((None, None, rows), lambda j, h, b: (b, h, j)),
        "own": spec((None, None, BLOCK, dim), lambda j, h, b: (b, h, j, 0)),
        "chunk": spec((None, None, KEYS, dim), lambda j, h, b: (b, h, j, 0)),
        "keys": spec((None, None, tokens, dim), lambda j, h, b: (b, h, 0, 0)),
        "tiles": spec((None, None, tiles * rows, dim), lambda j, h, b: (b, h, 0, 0)),
        "rows": spec((None, None, tiles * rows), lambda j, h, b: (b, h, 0)),
    }


def _call(kernel, grid, specs, inputs, outputs, interpret, warps=4, stages=2):
    """Runs the kernel; inputs are (role, array) pairs, outputs (role, shape, dtype) triples."""
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[specs[role] for role, _ in inputs],
        out_specs=[specs[role] for role, _, _ in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for _, shape, dtype in outputs],
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
    )(*[array for _, array in inputs])


def _shapes(q, k, prefix):
    batch, heads, all_rows, dim = q.shape
    tiles = prefix.shape[1]
    rows = all_rows // tiles
    return batch, heads, tiles, rows, dim, _specs(tiles, rows, k.shape[2], dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _flash(q, k, v, prefix, hidden, clean, interpret):
    return _flash_forward(q, k, v, prefix, hidden, clean, interpret)[0]


def _flash_forward(q, k, v, prefix, hidden, clean, interpret):
    batch, heads, tiles, rows, dim, specs = _shapes(q, k, prefix)
    kernel = functools.partial(_forward_kernel, group=rows // BLOCK, scale=dim**-0.5 * LOG2E)
    out, lse = _call(
        kernel,
        (tiles, heads, batch),
        specs,
        [
            ("scalar", prefix),
            ("hidden", hidden),
            ("tile", q),
            ("own", k),
            ("own", v),
            ("keys", k),
            ("keys", v),
        ],
        [("tile", q.shape, q.dtype), ("row", q.shape[:3], jnp.float32)],
        interpret,
    )
    out, lse = checkpoint_name(out, "attention"), checkpoint_name(lse, "attention")
    return out, (q, k, v, prefix, hidden, out, lse)


def _flash_backward(clean, interpret, saved, d_out):
    q, k, v, prefix, hidden, out, lse = saved
    batch, heads, tiles, rows, dim, specs = _shapes(q, k, prefix)
    scale, natural = dim**-0.5 * LOG2E, dim**-0.5
    clean_tiles = clean // BLOCK
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    grads = [("tile", d_out), ("row", lse), ("row", delta)]
    dq, dk_own, dv_own = _call(
        functools.partial(_query_kernel, group=rows // BLOCK, scale=scale),
        (tiles, heads, batch),
        specs,
        [
            ("scalar", prefix),
            ("hidden", hidden),
            ("tile", q),
            ("own", k),
            ("own", v),
            ("keys", k),
            ("keys", v),
            *grads,
        ],
        [
            ("tile", q.shape, jnp.float32),
            ("own", k.shape, jnp.float32),
            ("own", v.shape, jnp.float32),
        ],
        interpret,
    )
    # Noised tiles are sorted by prefix: the first one that sees any key of chunk c.
    first_block = jnp.arange(clean // KEYS, dtype=jnp.int32) * (KEYS // BLOCK)
    noised = prefix[:, clean_tiles:]
    start = clean_tiles + jnp.sum(noised[:, None, :] <= first_block[None, :, None], axis=2)
    dk, dv = _call(
        functools.partial(_key_kernel, tiles=tiles, clean_tiles=clean_tiles, scale=scale),
        (clean // KEYS, heads, batch),
        specs,
        [
            ("scalars", prefix),
            ("scalar", start.astype(jnp.int32)),
            ("tiles", q),
            ("chunk", k),
            ("chunk", v),
            ("tiles", d_out),
            ("rows", lse),
            ("rows", delta),
        ],
        [("chunk", (batch, heads, clean, dim), jnp.float32)] * 2,
        interpret,
    )
    dk = dk_own.at[:, :, :clean].add(dk) * natural
    dv = dv_own.at[:, :, :clean].add(dv)
    return (dq * natural).astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_flash.defvjp(_flash_forward, _flash_backward)


def _twin(q, k, v, prefix, hidden, clean):
    """What `_flash` computes, one tile at a time in plain JAX."""
    batch, heads, tiles, rows, dim, _ = _shapes(q, k, prefix)
    group = rows // BLOCK

    def tile(j):
        query = lax.dynamic_slice_in_dim(q, j * rows, rows, 2)
        k_own, v_own = (lax.dynamic_slice_in_dim(a, j * BLOCK, BLOCK, 2) for a in (k, v))
        own_hidden = lax.dynamic_slice_in_dim(hidden, j * BLOCK, BLOCK, 1)
        visible = jax.vmap(lambda h: _own_visible(h, rows, group))(own_hidden)
        seen = jnp.arange(clean) < prefix[:, j, None] * BLOCK
        seen = jnp.broadcast_to(seen[:, None, :], (batch, rows, clean))
        mask = jnp.concatenate([seen, visible], axis=-1)[:, None]
        keys = jnp.concatenate([k[:, :, :clean], k_own], axis=2)
        values = jnp.concatenate([v[:, :, :clean], v_own], axis=2)
        score = jnp.einsum("bhrd,bhsd->bhrs", query, keys, preferred_element_type=jnp.float32)
        weight = jax.nn.softmax(jnp.where(mask, score * dim**-0.5, -jnp.inf), axis=-1)
        return jnp.einsum("bhrs,bhsd->bhrd", weight.astype(q.dtype), values)

    out = lax.map(tile, jnp.arange(tiles))
    return jnp.moveaxis(out, 0, 2).reshape(q.shape)


def attention(q, k, v, prefix, hidden, clean: int, *, kernel: bool, interpret: bool = False):
    """Attention output [B, T, H G, D] of q [B, T, H G, D] and k, v [B, T, H, D].

    Args:
      prefix: int32 [B, T / 32], clean blocks before the query block that it sees.
      hidden: int32 [B, T], 1 for masks of a lone-mask probe.
      clean: length of the clean part of the sequence.
      kernel: the Pallas kernel instead of its twin.
    """
    batch, tokens, q_heads, dim = q.shape
    heads = k.shape[2]
    group = q_heads // heads
    q = q.reshape(batch, tokens, heads, group, dim).transpose(0, 2, 1, 3, 4)
    q = q.reshape(batch, heads, tokens * group, dim)
    k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    if kernel:
        q, k, v = (checkpoint_name(a, "attention") for a in (q, k, v))
        out = jnp.asarray(_flash(q, k, v, prefix, hidden, clean, interpret))
    else:
        out = _twin(q, k, v, prefix, hidden, clean)
    out = out.reshape(batch, heads, tokens, group, dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(batch, tokens, q_heads, dim)
