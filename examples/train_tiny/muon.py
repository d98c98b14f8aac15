"""Muon for the matrices, Adam for embedding and gains, in one update.

Muon (Jordan et al., 2024) replaces the momentum of a matrix by the nearest orthogonal one, found by
five Newton-Schulz steps. Stacked layers are orthogonalised apart, in one batched product.
"""

import jax
import jax.numpy as jnp

from examples.train_tiny.model import MATRICES

MUON_RATE, MUON_MOMENTUM, MUON_DECAY = 0.02, 0.95, 0.01
ADAM_RATE, ADAM_B1, ADAM_B2, ADAM_EPS = 2e-3, 0.9, 0.98, 1e-8
CLIP = 1.0


def orthogonalize(x):
    """Newton-Schulz approximation of U V^T of each [m, n] matrix, in bfloat16."""
    wide = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if wide else x
    x = (x / (jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-7)).astype(jnp.bfloat16)
    for _ in range(5):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (jnp.swapaxes(x, -1, -2) if wide else x).astype(jnp.float32)


def init(params: dict) -> dict:
    """Zero state: momentum of the matrices (bfloat16), two moments of the rest, a step count."""
    rest = {name: jnp.zeros_like(a) for name, a in params.items() if name not in MATRICES}
    momentum = {name: jnp.zeros(params[name].shape, jnp.bfloat16) for name in MATRICES}
    return {
        "momentum": momentum,
        "first": rest,
        "second": jax.tree.map(jnp.zeros_like, rest),
        "step": jnp.zeros((), jnp.int32),
    }


def update(
    params: dict, grads: dict, state: dict, scale, *, decay: float = MUON_DECAY
) -> tuple[dict, dict]:
    """New parameters and state; `scale` multiplies both learning rates."""
    step = state["step"] + 1
    count = step.astype(jnp.float32)
    new, momentum, first, second = {}, {}, {}, {}
    for name in MATRICES:
        average = MUON_MOMENTUM * state["momentum"][name].astype(jnp.float32) + grads[name]
        momentum[name] = average.astype(jnp.bfloat16)
        direction = orthogonalize(MUON_MOMENTUM * average + grads[name])
        rows, columns = params[name].shape[-2:]
        rate = scale * MUON_RATE
        shape_gain = max(1.0, columns / rows) ** 0.5
        new[name] = params[name] * (1 - rate * decay) - rate * shape_gain * direction
    rest = {name: grads[name] for name in state["first"]}
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in rest.values()))
    clip = jnp.minimum(1.0, CLIP / (norm + 1e-9))
    for name, grad in rest.items():
        first[name] = ADAM_B1 * state["first"][name] + (1 - ADAM_B1) * clip * grad
        second[name] = ADAM_B2 * state["second"][name] + (1 - ADAM_B2) * (clip * grad) ** 2
        m = first[name] / (1 - ADAM_B1**count)
        v = second[name] / (1 - ADAM_B2**count)
        new[name] = params[name] - scale * ADAM_RATE * m / (jnp.sqrt(v) + ADAM_EPS)
    return new, {"momentum": momentum, "first": first, "second": second, "step": step}
