"""The network of DiffusionGemma: one set of weights run as an encoder and as a denoiser.

Finished text goes through it causally and leaves keys and values. A canvas, a block of ids of
which most may be noise, goes through the same weights, sees itself both ways and the text before
it, and leaves nothing. The two runs differ in one scalar a layer, and in the input: a canvas also
carries what the step before predicted (`soft_embeddings`).

A layer has seven norms around attention, a dense MLP and a mixture of experts, whose outputs
are added. Most layers see a window of the text; the others have heads of their own number and
size, no value projection and a rotation in which most frequencies are zero.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from herald_jax.configs import CanvasBody, ModelConfig
from herald_jax.models.attention import Attend, FreshKV
from herald_jax.models.layers import SwiGLU, linear
from herald_jax.models.moe import Experts, Routing, mix, route
from herald_jax.models.rope import Phases, rotary_phases, rotate

_gelu = functools.partial(jax.nn.gelu, approximate=True)


def body_of(config: ModelConfig) -> CanvasBody:
    """The part of the config that only canvas models have."""
    assert config.canvas is not None, "ModelConfig has seen to it"
    return config.canvas


def layer_heads(config: ModelConfig, layer: int) -> tuple[int, int]:
    """Key/value heads of a layer and the size of a head."""
    body = body_of(config)
    if layer in body.full_layers:
        return body.full_num_kv_heads, body.full_head_dim
    return config.num_kv_heads, config.head_dim


def proportional_phases(positions: Int[Array, "R Q"], dim: int, theta: float, fraction: float):
    """Phases over whole heads of which only the first frequencies are not zero.

    The others turn by no angle: unlike in a partial rotation, feature i is paired with
    i + dim / 2 in any case, and frequencies are spaced as those of a whole head.
    """
    used = int(fraction * dim // 2)
    phases = rotary_phases(positions, dim, theta)
    turns = jnp.arange(dim // 2) < used
    return Phases(jnp.where(turns, phases.cos, 1.0), jnp.where(turns, phases.sin, 0.0))


class WideNorm(nnx.Module):
    """Root-mean-square norm whose gain, if it has one, is applied in fp32 before the cast."""

    def __init__(
        self, size: int, epsilon: float, dtype: jnp.dtype, axis: str = "embed", *, gain: bool = True
    ) -> None:
        self.has_gain = gain
        if gain:
            self.scale = nnx.Param(jnp.ones((size,), dtype), logical_axes=(axis,))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*batch N"]) -> Float[Array, "*batch N"]:
        """The normed vectors, in the dtype of `x`."""
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.epsilon)
        if self.has_gain:
            wide = wide * self.scale[...].astype(jnp.float32)
        return wide.astype(x.dtype)


class GeluMLP(SwiGLU):
    """Gated MLP with a GELU in its tanh form."""

    def __call__(self, x: Float[Array, "R Q E"]) -> Float[Array, "R Q E"]:
        """The MLP's output."""
        return self.down_proj(_gelu(self.gate_proj(x)) * self.up_proj(x))


class CanvasAttention(nnx.Module):
    """Attention without a scale of its own: the norms of queries and keys set the scores."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        kv_heads, dim = layer_heads(config, layer)
        inner, kv_inner = config.num_heads * dim, kv_heads * dim
        project = functools.partial(linear, dtype=dtype, rngs=rngs)
        self.q_proj = project(hidden, inner, ("embed", "heads"))
        self.k_proj = project(hidden, kv_inner, ("embed", "kv_heads"))
        self.has_values = layer not in body_of(config).full_layers
        if self.has_values:
            self.v_proj = project(hidden, kv_inner, ("embed", "kv_heads"))
        self.o_proj = project(inner, hidden, ("heads", "embed"))
        self.q_norm = WideNorm(dim, epsilon, dtype, "head_dim")
        self.k_norm = WideNorm(dim, epsilon, dtype, "head_dim")
        self.v_norm = WideNorm(dim, epsilon, dtype, gain=False)
        self.head_dim = dim

    def __call__(
        self, layer: int, x: Float[Array, "R Q E"], phases: Phases, attend: Attend
    ) -> tuple[Float[Array, "R Q E"], FreshKV]:
        """Returns the sub-layer's output and the fresh keys and values of its tokens."""
        split = (*x.shape[:2], -1, self.head_dim)
        q = self.q_norm(self.q_proj(x).reshape(split))
        k: jax.Array = self.k_proj(x).reshape(split)
        v = self.v_proj(x).reshape(split) if self.has_values else k
        fresh = FreshKV(rotate(self.k_norm(k), phases), self.v_norm(v))
        out = attend(layer, rotate(q, phases), fresh)
        return self.o_proj(out.reshape(*x.shape[:2], -1)), fresh


class CanvasRouter(nnx.Module):
    """Routing by the residual stream itself; its parameters are fp32 in any model."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        hidden, count = config.hidden_size, config.num_experts
        draw = nnx.initializers.lecun_normal()
        kernel = draw(rngs.params(), (hidden, count), jnp.float32)
        self.kernel = nnx.Param(kernel, logical_axes=("embed", None))
        self.input_scale = nnx.Param(jnp.ones((hidden,), jnp.float32), logical_axes=("embed",))
        self.expert_scale = nnx.Param(jnp.ones((count,), jnp.float32), logical_axes=(None,))
        self.norm = WideNorm(hidden, config.rms_norm_eps, jnp.dtype("float32"), gain=False)
        self.config = config

    def __call__(self, x: Float[Array, "T E"]) -> Routing:
        """The routing of each token."""
        z = self.norm(x.astype(jnp.float32)) * self.input_scale[...] * x.shape[-1] ** -0.5
        logits = jnp.matmul(z, self.kernel[...], precision=jax.lax.Precision.HIGHEST)
        chosen = route(self.config, logits, None)
        return Routing(chosen.experts, chosen.weights * self.expert_scale[...][chosen.experts])


class CanvasLayer(nnx.Module):
    """Attention, then a dense MLP and a mixture side by side."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        hidden = config.hidden_size
        norm = functools.partial(WideNorm, hidden, config.rms_norm_eps, dtype)
        self.input_layernorm = norm()
        self.attention = CanvasAttention(config, layer, dtype, rngs)
        self.post_attention_layernorm = norm()
        self.pre_mlp_layernorm = norm()
        self.mlp = GeluMLP(hidden, config.intermediate_size, dtype, rngs)
        self.post_mlp_layernorm = norm()
        self.pre_experts_layernorm = norm()
        self.router = CanvasRouter(config, rngs)
        self.experts = Experts(config, dtype, rngs)
        self.post_experts_layernorm = norm()
        self.post_feedforward_layernorm = norm()
        one = jnp.ones((1,), jnp.float32)
        self.encoder_scalar = nnx.Param(one, logical_axes=(None,))
        self.denoiser_scalar = nnx.Param(one, logical_axes=(None,))

    def __call__(
        self,
        layer: int,
        x: Float[Array, "R Q E"],
        phases: Phases,
        attend: Attend,
        *,
        is_canvas: bool,
    ) -> tuple[Float[Array, "R Q E"], FreshKV]:
        """Returns the new residual stream and the layer's fresh keys and values."""
        out, fresh = self.attention(layer, self.input_layernorm(x), phases, attend)
        x = x + self.post_attention_layernorm(out)
        dense = self.post_mlp_layernorm(self.mlp(self.pre_mlp_layernorm(x)))
        flat = x.reshape(-1, x.shape[-1])
        mixed = mix(
            self.pre_experts_layernorm(flat), self.router(flat), self.experts.weights(), _gelu
        )
        mixed = self.post_experts_layernorm(mixed.astype(x.dtype)).reshape(x.shape)
        x = x + self.post_feedforward_layernorm(dense + mixed)
        scalar = self.denoiser_scalar if is_canvas else self.encoder_scalar
        return x * scalar[...].astype(x.dtype), fresh


class SelfConditioning(nnx.Module):
    """The input of a canvas: its ids and what the step before predicted, normed."""

    def __init__(self, config: ModelConfig, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(WideNorm, config.hidden_size, config.rms_norm_eps, dtype)
        self.pre_norm = norm()
        self.mlp = GeluMLP(config.hidden_size, config.intermediate_size, dtype, rngs)
        self.post_norm = norm(gain=False)

    def __call__(
        self, x: Float[Array, "R Q E"], soft: Float[Array, "R Q E"]
    ) -> Float[Array, "R Q E"]:
        """The conditioned embeddings."""
        return self.post_norm(x + self.mlp(self.pre_norm(soft)))


class CanvasDecoder(nnx.Module):
    """Token ids and positions in; hidden states, logits, fresh keys and values out."""

    def __init__(self, config: ModelConfig, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        self.config = config
        self.embed_tokens = nnx.Embed(
            config.vocab_size,
            config.hidden_size,
            dtype=dtype,
            param_dtype=dtype,
            embedding_metadata={"logical_axes": ("vocab", "embed")},
            rngs=rngs,
        )
        self.layers = nnx.List(
            [CanvasLayer(config, layer, dtype, rngs) for layer in range(config.num_layers)]
        )
        self.norm = WideNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.self_conditioning = SelfConditioning(config, dtype, rngs)

    def encode(
        self, tokens: Int[Array, "R Q"], positions: Int[Array, "R Q"], attend: Attend
    ) -> tuple[Float[Array, "R Q E"], list[FreshKV]]:
        """The normed hidden states of finished text, and its keys and values."""
        return self._run(self._embed(tokens), positions, attend, is_canvas=False)

    def denoise(
        self,
        tokens: Int[Array, "R B"],
        soft: Float[Array, "R B E"],
        positions: Int[Array, "R B"],
        attend: Attend,
    ) -> Float[Array, "R B E"]:
        """The normed hidden states of canvases.

        Args:
            tokens: The canvases.
            soft: `soft_embeddings` of the step before; zeros in the first one.
            positions: Absolute positions.
            attend: What a canvas sees.
        """
        x = self.self_conditioning(self._embed(tokens), soft)
        return self._run(x, positions, attend, is_canvas=True)[0]

    def logits(self, hidden: Float[Array, "*batch E"]) -> Float[Array, "*batch V"]:
        """The head, which is the embedding table, in fp32, bent to stay within the cap."""
        table = self.embed_tokens.embedding[...]
        raw = jnp.einsum("...e,ve->...v", hidden, table, preferred_element_type=jnp.float32)
        cap = body_of(self.config).logit_cap
        return cap * jnp.tanh(raw / cap)

    def soft_embeddings(self, logits: Float[Array, "*batch V"]) -> Float[Array, "*batch E"]:
        """The mean embedding under the softmax of a step's logits."""
        table = self.embed_tokens.embedding[...]
        weights = jax.nn.softmax(logits.astype(jnp.float32), axis=-1).astype(table.dtype)
        return (weights @ table) * self._embed_scale()

    def _embed(self, tokens: Int[Array, "R Q"]) -> Float[Array, "R Q E"]:
        return self.embed_tokens(tokens) * self._embed_scale()

    def _embed_scale(self) -> Float[Array, ""]:
        return jnp.asarray(self.config.hidden_size**0.5, self.embed_tokens.embedding[...].dtype)

    def _run(
        self,
        x: Float[Array, "R Q E"],
        positions: Int[Array, "R Q"],
        attend: Attend,
        *,
        is_canvas: bool,
    ) -> tuple[Float[Array, "R Q E"], list[FreshKV]]:
        config, body = self.config, body_of(self.config)
        near = rotary_phases(positions, config.rotary_dim, config.rope_theta)
        far = proportional_phases(
            positions, body.full_head_dim, body.full_rope_theta, body.full_rotary_fraction
        )
        fresh: list[FreshKV] = []
        for index, layer in enumerate(self.layers):
            phases = far if index in body.full_layers else near
            x, layer_kv = layer(index, x, phases, attend, is_canvas=is_canvas)
            fresh.append(layer_kv)
        return self.norm(x), fresh
