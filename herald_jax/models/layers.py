"""Norm, projections and MLP of a pre-norm decoder layer.

Every parameter names its logical axes in the metadata key `logical_axes`; `sharding.py`
turns those names into mesh axes, so the layers never speak of devices.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class RMSNorm(nnx.Module):
    """Root-mean-square norm with fp32 statistics, cast to the model dtype before the gain.

    The order of cast and gain is that of the Qwen and Llama reference models; in bf16 the
    other order flips last bits.
    """

    def __init__(self, size: int, epsilon: float, dtype: jnp.dtype, logical_axis: str) -> None:
        self.scale = nnx.Param(jnp.ones((size,), dtype), logical_axes=(logical_axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        """The normed vectors, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        return wide.astype(x.dtype) * self.scale[...]


def linear(
    inputs: int,
    outputs: int,
    axes: tuple[str, str],
    *,
    use_bias: bool = False,
    dtype: jnp.dtype,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A projection [inputs, outputs] whose kernel carries its logical axes."""
    return nnx.Linear(
        inputs,
        outputs,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=dtype,
        bias_init=nnx.initializers.normal(0.02),
        kernel_metadata={"logical_axes": axes},
        bias_metadata={"logical_axes": axes[1:]},
        rngs=rngs,
    )


class SwiGLU(nnx.Module):
    """Gated MLP: down(silu(gate(x)) * up(x))."""

    def __init__(
        self,
        hidden: int,
        inner: int,
        dtype: jnp.dtype,
        rngs: nnx.Rngs,
        inner_axis: str = "mlp",
    ) -> None:
        self.gate_proj = linear(hidden, inner, ("embed", inner_axis), dtype=dtype, rngs=rngs)
        self.up_proj = linear(hidden, inner, ("embed", inner_axis), dtype=dtype, rngs=rngs)
        self.down_proj = linear(inner, hidden, (inner_axis, "embed"), dtype=dtype, rngs=rngs)

    def __call__(self, x: Float[Array, "R Q E"]) -> Float[Array, "R Q E"]:
        """The MLP's output."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))
