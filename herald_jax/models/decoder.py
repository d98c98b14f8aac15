"""One pre-norm decoder whose options cover the block-diffusion families.

Layers are separate arrays run by a Python loop: a scan over stacked weights copies every
slice of the stack before its matmul on the GPU. Parameters travel as a nested dict of arrays
and are arguments of the jitted programs; `bind` joins them with the structure inside a trace.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.models.attention import Attend, Attention, FreshKV
from herald_jax.models.canvas import CanvasDecoder
from herald_jax.models.layers import RMSNorm, SwiGLU, linear
from herald_jax.models.moe import MixtureOfExperts
from herald_jax.models.rope import Phases, rotary_phases

Params = dict[str, Any]
"""Nested dict of arrays in the structure of `abstract_params`."""


class DecoderLayer(nnx.Module):
    """Attention and MLP (dense or a mixture), each on the normed residual stream."""

    def __init__(self, config: ModelConfig, layer: int, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        norm = functools.partial(RMSNorm, config.hidden_size, config.rms_norm_eps, dtype)
        self.input_layernorm = norm("embed")
        self.attention = Attention(config, dtype, rngs)
        self.post_attention_layernorm = norm("embed")
        if config.has_experts(layer):
            self.mlp = MixtureOfExperts(config, dtype, rngs)
        else:
            self.mlp = SwiGLU(config.hidden_size, config.intermediate_size, dtype, rngs)

    def __call__(
        self, layer: int, x: Float[Array, "R Q E"], phases: Phases, attend: Attend
    ) -> tuple[Float[Array, "R Q E"], FreshKV]:
        """Returns the new residual stream and the layer's fresh keys and values."""
        out, fresh = self.attention(layer, self.input_layernorm(x), phases, attend)
        x = x + out
        return x + self.mlp(self.post_attention_layernorm(x)), fresh


class Decoder(nnx.Module):
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
            [DecoderLayer(config, layer, dtype, rngs) for layer in range(config.num_layers)]
        )
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, dtype, "embed")
        if not config.tie_word_embeddings:
            self.lm_head = linear(
                config.hidden_size,
                config.vocab_size,
                ("embed", "vocab"),
                dtype=dtype,
                rngs=rngs,
            )

    def __call__(
        self, tokens: Int[Array, "R Q"], positions: Int[Array, "R Q"], attend: Attend
    ) -> tuple[Float[Array, "R Q E"], list[FreshKV]]:
        """Runs all layers; `attend` decides what each query sees.

        Returns:
            The normed hidden states, and every layer's fresh keys and values.
        """
        x = self.embed_tokens(tokens)
        phases = rotary_phases(positions, self.config.rotary_dim, self.config.rope_theta)
        fresh: list[FreshKV] = []
        for index, layer in enumerate(self.layers):
            x, layer_kv = layer(index, x, phases, attend)
            fresh.append(layer_kv)
        return self.norm(x), fresh

    @property
    def head_table(self) -> Float[Array, "E V"] | None:
        """The LM head's matrix; None where it is the embedding table, which lies the other way."""
        return None if self.config.tie_word_embeddings else self.lm_head.kernel[...]

    def logits(self, hidden: Float[Array, "R Q E"]) -> Float[Array, "R Q V"]:
        """LM head, accumulated and returned in fp32."""
        if self.config.tie_word_embeddings:
            table = self.embed_tokens.embedding[...]
            return jnp.einsum("rqe,ve->rqv", hidden, table, preferred_element_type=jnp.float32)
        kernel = self.lm_head.kernel[...]
        return jnp.einsum("rqe,ev->rqv", hidden, kernel, preferred_element_type=jnp.float32)


def _split(config: ModelConfig, dtype: str) -> tuple[Any, Any]:
    body = CanvasDecoder if config.is_canvas else Decoder
    make = functools.partial(body, config, dtype=jnp.dtype(dtype))
    return nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))


@functools.lru_cache(maxsize=32)
def _structure(config: ModelConfig, dtype: str) -> Any:
    return _split(config, dtype)[0]


def abstract_state(config: ModelConfig, dtype: Any = jnp.bfloat16) -> nnx.State:
    """The parameters as `nnx` variables without storage, metadata included."""
    return _split(config, jnp.dtype(dtype).name)[1]


def abstract_params(config: ModelConfig, dtype: Any = jnp.bfloat16) -> Params:
    """Shapes and dtypes of all parameters, as `jax.ShapeDtypeStruct` leaves.

    Routers are fp32 whatever `dtype` is.
    """
    return nnx.to_pure_dict(abstract_state(config, dtype))


def describe_params(params: Any) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every leaf, by its place in the tree."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {
        jax.tree_util.keystr(path): (tuple(jnp.shape(leaf)), jnp.result_type(leaf).name)
        for path, leaf in leaves
    }


@functools.lru_cache(maxsize=32)
def _described(config: ModelConfig, dtype: str) -> dict[str, tuple[tuple[int, ...], str]]:
    return describe_params(abstract_params(config, dtype))


def check_params(config: ModelConfig, params: Params) -> None:
    """Checks that `params` are those of the model, all in one dtype but for the fp32 routers.

    Raises:
        ConfigError: With every missing, unexpected or other leaf.
    """
    found = describe_params(params)
    embedding = found.get("['embed_tokens']['embedding']")
    expected = _described(config, "float32" if embedding is None else embedding[1])
    require_same_params(expected, found)


def require_same_params(expected: dict[str, Any], found: dict[str, Any]) -> None:
    """Checks that two descriptions of `describe_params` agree.

    Raises:
        ConfigError: With every missing, unexpected or other leaf.
    """
    faults = [
        f"{name}: expected {expected.get(name, 'nothing')}, got {found.get(name, 'nothing')}"
        for name in sorted(expected.keys() | found.keys())
        if expected.get(name) != found.get(name)
    ]
    if faults:
        raise ConfigError("params do not fit the model:\n  " + "\n  ".join(faults))


def copy_params(params: Params) -> Params:
    """Parameters that share no memory with these, which may be numpy or JAX arrays."""

    def copy(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and next(iter(leaf.devices())).platform != "cpu":
            return jnp.array(leaf, copy=True)
        # On a CPU a device_put may alias what it is given, so the copy is made before it.
        return jax.device_put(np.array(leaf, copy=True))

    return jax.tree.map(copy, params)


def bind(config: ModelConfig, params: Params) -> Decoder:
    """A decoder over `params`, to be called inside a trace."""
    return _merge(config, params)


def bind_canvas(config: ModelConfig, params: Params) -> CanvasDecoder:
    """The same for a canvas model."""
    return _merge(config, params)


def _merge(config: ModelConfig, params: Params) -> Any:
    dtype = params["embed_tokens"]["embedding"].dtype
    graph = _structure(config, jnp.dtype(dtype).name)
    state = abstract_state(config, dtype)
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def random_params(config: ModelConfig, seed: int = 0, dtype: Any = jnp.float32) -> Params:
    """Random parameters in which every tensor differs, gains included (tests, benchmarks)."""
    leaves, tree = jax.tree.flatten(abstract_params(config, dtype))
    keys = jax.random.split(jax.random.key(seed), len(leaves))

    def draw(key: jax.Array, leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if len(leaf.shape) == 1:  # gains around one, biases come out non-zero as well
            return (1 + 0.2 * jax.random.normal(key, leaf.shape)).astype(leaf.dtype)
        fan_in = leaf.shape[-2]  # stacked experts have theirs after the expert's number
        return (jax.random.normal(key, leaf.shape, leaf.dtype) * fan_in**-0.5).astype(leaf.dtype)

    return jax.tree.unflatten(tree, [draw(k, leaf) for k, leaf in zip(keys, leaves, strict=True)])
