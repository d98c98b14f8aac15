"""Rotary position embedding in the half-split form, with fp32 phases.

Phases are computed in fp32 from integer positions and applied in fp32: in bf16 they are
wrong from a few hundred positions on.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


class Phases(NamedTuple):
    """Cosines and sines of the rotated half of a head, fp32."""

    cos: Float[Array, "R Q half"]
    sin: Float[Array, "R Q half"]


def rotary_phases(positions: Int[Array, "R Q"], rotary_dim: int, theta: float) -> Phases:
    """The phases of `positions` for heads of which `rotary_dim` features rotate."""
    exponents = jnp.arange(0, rotary_dim, 2, dtype=jnp.float32) / rotary_dim
    angles = positions[..., None].astype(jnp.float32) / jnp.float32(theta) ** exponents
    return Phases(jnp.cos(angles), jnp.sin(angles))


def rotate(x: Float[Array, "R Q N D"], phases: Phases) -> Float[Array, "R Q N D"]:
    """Rotates the first features of every head, pairing feature i with i + rotary_dim / 2."""
    half = phases.cos.shape[-1]
    cos, sin = phases.cos[:, :, None, :], phases.sin[:, :, None, :]
    first = x[..., :half].astype(jnp.float32)
    second = x[..., half : 2 * half].astype(jnp.float32)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(part.astype(x.dtype) for part in rotated), x[..., 2 * half :]], -1)
