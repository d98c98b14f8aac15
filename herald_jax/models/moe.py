"""Mixture-of-experts layers: an fp32 router, and experts over tokens sorted by expert.

Routing stays in fp32 from the projection to the weighted sum. A router in bf16 merges
neighbouring scores and flips choices, a selection bias in bf16 lets experts collapse, and
rounded weights no longer add up to the routed scale.

The experts' matmuls have three forms with equal results:

- `dense_experts` runs every token through every expert. It is the plain twin of the others, and
  with few tokens the fastest on a GPU, where reading the weights once bounds every form.
- `tiled_experts` sorts rows by expert and multiplies equal tiles of rows of one expert each; no
  row is dropped, whatever the router chooses.
- `ragged_experts` sorts as well and leaves the groups to `jax.lax.ragged_dot`. On a GPU XLA
  expands that to all rows for all experts, so it serves other devices only.

`benchmarks/results/mixture.json` has the times on an H200 that decide between them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from herald_jax.configs import ModelConfig
from herald_jax.models.layers import SwiGLU

Activation = Callable[[jax.Array], jax.Array]
"""What an expert's gate goes through."""

DENSE_TOKENS = 768
"""Up to this many tokens in a pass, all experts run on all tokens on a GPU."""


class Routing(NamedTuple):
    """Where each token goes: its experts, best first, and their fp32 weights."""

    experts: Int[Array, "T k"]
    weights: Float[Array, "T k"]


class ExpertWeights(NamedTuple):
    """The stacked projections of all experts, as [inputs, outputs] kernels."""

    gate: Float[Array, "X E I"]
    up: Float[Array, "X E I"]
    down: Float[Array, "X I E"]


def route(
    config: ModelConfig, logits: Float[Array, "T X"], bias: Float[Array, " X"] | None
) -> Routing:
    """Chooses the experts of each token from fp32 router logits.

    `bias` moves the choice only. Experts outside the chosen groups are set to -inf and not to
    zero: a biased score can be negative. Ties go to the lower expert.
    """
    if config.router_score == "softmax":
        scores = jax.nn.softmax(logits, axis=-1)
    else:
        scores = jax.nn.sigmoid(logits)
    choice = scores if bias is None else scores + bias
    if config.router_top_groups < config.router_groups:
        grouped = choice.reshape(len(choice), config.router_groups, -1)
        best_two = jax.lax.top_k(grouped, 2)[0].sum(-1)
        _, groups = jax.lax.top_k(best_two, config.router_top_groups)
        is_open = jax.nn.one_hot(groups, config.router_groups, dtype=jnp.bool_).any(1)
        choice = jnp.where(is_open[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
    _, experts = jax.lax.top_k(choice, config.experts_per_token)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if config.normalise_expert_weights:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return Routing(experts, weights * config.routed_scale)


def ragged_experts(
    x: Float[Array, "T E"],
    routing: Routing,
    experts: ExpertWeights,
    activation: Activation = jax.nn.silu,
) -> Float[Array, "T E"]:
    """The weighted sum over each token's experts, in fp32; work grows with T * k."""
    per_token = routing.experts.shape[1]
    chosen = routing.experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=experts.gate.shape[0]).astype(jnp.int32)
    rows = x[order // per_token]
    gate = jax.lax.ragged_dot(rows, experts.gate, sizes)
    up = jax.lax.ragged_dot(rows, experts.up, sizes)
    out = jax.lax.ragged_dot(activation(gate) * up, experts.down, sizes)
    # Gathering back in routing order, instead of adding into rows, keeps the sum's order fixed.
    back = jnp.argsort(order)
    by_token = out[back].reshape(*routing.experts.shape, -1).astype(jnp.float32)
    return (by_token * routing.weights[:, :, None]).sum(1)


def tiled_experts(
    x: Float[Array, "T E"],
    routing: Routing,
    experts: ExpertWeights,
    tile: int = 128,
    activation: Activation = jax.nn.silu,
) -> Float[Array, "T E"]:
    """The same sum over tiles of `tile` rows, each of one expert; work grows with T * k.

    Every expert's rows are padded to whole tiles. The number of tiles is bounded by the shapes
    alone: less than one tile is lost for each expert.
    """
    count = experts.gate.shape[0]
    per_token = routing.experts.shape[1]
    chosen = routing.experts.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    sizes = jnp.bincount(chosen, length=count).astype(jnp.int32)
    tile_counts = (sizes + tile - 1) // tile
    tile_ends = jnp.cumsum(tile_counts)
    tiles = chosen.size // tile + count
    by_expert = chosen[order]
    rank = jnp.arange(chosen.size) - (jnp.cumsum(sizes) - sizes)[by_expert]
    slot = (tile_ends - tile_counts)[by_expert] * tile + rank
    source = jnp.full(tiles * tile, x.shape[0]).at[slot].set(order // per_token)
    rows = x.at[source].get(mode="fill", fill_value=0).reshape(tiles, tile, -1)
    owner = jnp.searchsorted(tile_ends, jnp.arange(tiles), side="right").clip(max=count - 1)
    gate = jnp.einsum("tme,tei->tmi", rows, experts.gate[owner])
    up = jnp.einsum("tme,tei->tmi", rows, experts.up[owner])
    out = jnp.einsum("tmi,tie->tme", activation(gate) * up, experts.down[owner])
    back = jnp.zeros_like(slot).at[order].set(slot)
    by_token = out.reshape(tiles * tile, -1)[back].reshape(*routing.experts.shape, -1)
    return (by_token.astype(jnp.float32) * routing.weights[:, :, None]).sum(1)


def dense_experts(
    x: Float[Array, "T E"],
    routing: Routing,
    experts: ExpertWeights,
    activation: Activation = jax.nn.silu,
) -> Float[Array, "T E"]:
    """The same sum with every token in every expert; work grows with T * X."""
    gate = jnp.einsum("te,xei->xti", x, experts.gate)
    up = jnp.einsum("te,xei->xti", x, experts.up)
    out = jnp.einsum("xti,xie->txe", activation(gate) * up, experts.down)
    picked = jnp.take_along_axis(out, routing.experts[:, :, None], axis=1)
    return (picked.astype(jnp.float32) * routing.weights[:, :, None]).sum(1)


def mix(
    x: Float[Array, "T E"],
    routing: Routing,
    experts: ExpertWeights,
    activation: Activation = jax.nn.silu,
) -> Float[Array, "T E"]:
    """The weighted sum over each token's experts, in fp32, by the form that suits the device."""
    on_gpu = dense_experts if len(x) <= DENSE_TOKENS else tiled_experts
    cuda, default = (
        functools.partial(form, activation=activation) for form in (on_gpu, ragged_experts)
    )
    return jax.lax.platform_dependent(x, routing, experts, cuda=cuda, default=default)


class Router(nnx.Module):
    """The scores of all experts for each token; its parameters are fp32 in any model."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        shape = (config.hidden_size, config.num_experts)
        draw = nnx.initializers.lecun_normal()
        # No axis "expert" here: the top-k needs all scores wherever the experts are.
        self.kernel = nnx.Param(
            draw(rngs.params(), shape, jnp.float32), logical_axes=("embed", None)
        )
        if config.router_bias:
            self.selection_bias = nnx.Param(
                jnp.zeros((config.num_experts,), jnp.float32), logical_axes=(None,)
            )
        self.config = config

    def __call__(self, x: Float[Array, "T E"]) -> Routing:
        """The routing of each token."""
        # Without this precision GPUs multiply fp32 in TF32, which has no more mantissa than fp16.
        logits = jnp.matmul(
            x.astype(jnp.float32), self.kernel[...], precision=jax.lax.Precision.HIGHEST
        )
        bias = self.selection_bias[...] if self.config.router_bias else None
        return route(self.config, logits, bias)


class Experts(nnx.Module):
    """The stacked SwiGLU kernels of the routed experts."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        count, hidden = config.num_experts, config.hidden_size
        inner = config.expert_intermediate_size
        draw = nnx.initializers.lecun_normal(batch_axis=0)
        axes = ("expert", "embed", "expert_mlp")

        def stack(rows: int, columns: int, axes: tuple[str, str, str]) -> nnx.Param[Array]:
            kernels = draw(rngs.params(), (count, rows, columns), dtype)
            return nnx.Param(kernels, logical_axes=axes)

        self.gate_proj = stack(hidden, inner, axes)
        self.up_proj = stack(hidden, inner, axes)
        self.down_proj = stack(inner, hidden, ("expert", "expert_mlp", "embed"))

    def weights(self) -> ExpertWeights:
        """The three stacks."""
        return ExpertWeights(self.gate_proj[...], self.up_proj[...], self.down_proj[...])


class MixtureOfExperts(nnx.Module):
    """Routed experts, plus an optional shared expert on the same normed input."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.router = Router(config, rngs)
        self.experts = Experts(config, dtype, rngs)
        self.has_shared = config.num_shared_experts > 0
        if self.has_shared:
            inner = config.num_shared_experts * config.expert_intermediate_size
            self.shared_expert = SwiGLU(
                config.hidden_size, inner, dtype, rngs, inner_axis="expert_mlp"
            )

    def __call__(self, x: Float[Array, "R Q E"]) -> Float[Array, "R Q E"]:
        """The mixture's output, summed in fp32 and cast once."""
        flat = x.reshape(-1, x.shape[-1])
        out = mix(flat, self.router(flat), self.experts.weights())
        out = out.reshape(x.shape).astype(x.dtype)
        return out + self.shared_expert(x) if self.has_shared else out
