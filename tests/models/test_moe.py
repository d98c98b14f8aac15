"""The mixture layer: routing against NumPy, ragged against dense, fp32 where it has to be."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import checkpoint
from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.models import abstract_params, bind, random_params
from herald_jax.models.moe import (
    DENSE_TOKENS,
    ExpertWeights,
    dense_experts,
    mix,
    ragged_experts,
    route,
    tiled_experts,
)
from tests.models.passes import block_logits, prefill_logits, whole_logits

MIXTURES: dict[str, dict[str, Any]] = {
    "softmax": {"num_experts": 6, "experts_per_token": 2, "expert_intermediate_size": 10},
    "not-normalised": {
        "num_experts": 5,
        "experts_per_token": 3,
        "expert_intermediate_size": 14,
        "normalise_expert_weights": False,
    },
    "sigmoid-groups": {
        "num_experts": 12,
        "experts_per_token": 3,
        "expert_intermediate_size": 10,
        "num_shared_experts": 2,
        "first_dense_layers": 1,
        "router_score": "sigmoid",
        "router_bias": True,
        "router_groups": 4,
        "router_top_groups": 2,
        "routed_scale": 2.5,
    },
}


def make(tiny_config: ModelConfig, name: str, **changes: Any) -> ModelConfig:
    return dataclasses.replace(tiny_config, **{**MIXTURES[name], **changes})


def plain_routing(
    config: ModelConfig, logits: np.ndarray, bias: np.ndarray
) -> tuple[list[list[int]], list[list[float]]]:
    """The router a second time, with loops over tokens in float64."""
    all_experts, all_weights = [], []
    for row in logits:
        if config.router_score == "softmax":
            scores = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
        else:
            scores = 1 / (1 + np.exp(-row))
        biased = scores + bias
        size = config.num_experts // config.router_groups
        groups = [biased[g * size : (g + 1) * size] for g in range(config.router_groups)]
        order = np.argsort([-np.sort(group)[-2:].sum() for group in groups], kind="stable")
        opened = set(order[: config.router_top_groups])
        allowed = [e for e in range(config.num_experts) if e // size in opened]
        experts = sorted(allowed, key=lambda e: -biased[e])[: config.experts_per_token]
        weights = scores[experts]
        if config.normalise_expert_weights:
            weights = weights / weights.sum()
        all_experts.append(experts)
        all_weights.append(list(weights * config.routed_scale))
    return all_experts, all_weights


@pytest.mark.parametrize("name", MIXTURES)
def test_routing_equals_numpy(tiny_config: ModelConfig, name: str) -> None:
    config = make(tiny_config, name)
    rng = np.random.default_rng(4)
    logits = rng.normal(size=(200, config.num_experts)) * 2
    # Most biases are negative: a closed group that counted as zero would win against open ones.
    bias = rng.normal(size=config.num_experts) - 1.5
    bias = bias if config.router_bias else np.zeros(config.num_experts)
    given = jnp.asarray(bias, jnp.float32) if config.router_bias else None
    found = route(config, jnp.asarray(logits, jnp.float32), given)
    experts, weights = plain_routing(config, logits, bias)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, rtol=2e-6)
    if config.normalise_expert_weights:
        np.testing.assert_allclose(found.weights.sum(-1), config.routed_scale, rtol=1e-6)


def test_the_bias_chooses_and_does_not_weigh(tiny_config: ModelConfig) -> None:
    config = make(tiny_config, "sigmoid-groups", normalise_expert_weights=False)
    logits = jnp.zeros((1, 12))
    bias = jnp.full(12, -9.0).at[jnp.array([6, 7, 8])].set(jnp.array([0.3, 0.1, 0.2]))
    found = route(config, logits, bias)
    assert found.experts.tolist() == [[6, 8, 7]]
    np.testing.assert_allclose(found.weights, 0.5 * 2.5)


def test_neighbouring_scores_are_told_apart(tiny_config: ModelConfig) -> None:
    """In bf16 these biases are one number."""
    config = make(tiny_config, "sigmoid-groups", router_groups=1, router_top_groups=1)
    bias = 8.0 + jnp.arange(12.0) * 1e-3
    assert len(set(bias.astype(jnp.bfloat16).tolist())) == 1
    assert route(config, jnp.zeros((1, 12)), bias).experts.tolist() == [[11, 10, 9]]


def test_ties_go_to_the_lower_expert(tiny_config: ModelConfig) -> None:
    config = make(tiny_config, "softmax")
    assert route(config, jnp.zeros((1, 6)), None).experts.tolist() == [[0, 1]]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 3, 64])
@pytest.mark.parametrize("spread", [0.1, 30.0])
def test_the_forms_are_equal(
    tiny_config: ModelConfig, dtype: Any, tokens: int, spread: float
) -> None:
    """Also where one expert gets nearly all tokens and others none."""
    config = make(tiny_config, "softmax")
    count, hidden, inner = 6, 24, 10
    rng = np.random.default_rng(tokens)
    shapes = ((count, hidden, inner), (count, hidden, inner), (count, inner, hidden))
    stacks = (jnp.asarray(rng.normal(size=s) * s[1] ** -0.5, dtype) for s in shapes)
    weights = ExpertWeights(*stacks)
    x = jnp.asarray(rng.normal(size=(tokens, hidden)), dtype)
    favour = spread * np.linspace(1, 0, count)
    logits = jnp.asarray(rng.normal(size=(tokens, count)) + favour, jnp.float32)
    routing = route(config, logits, None)
    ragged = jax.jit(ragged_experts)(x, routing, weights)
    dense = jax.jit(dense_experts)(x, routing, weights)
    tiled = jax.jit(functools.partial(tiled_experts, tile=8))(x, routing, weights)
    assert ragged.dtype == dense.dtype == tiled.dtype == jnp.float32
    tolerance = 2e-6 if dtype == jnp.float32 else 2e-2
    np.testing.assert_allclose(ragged, dense, atol=tolerance)
    np.testing.assert_allclose(tiled, dense, atol=tolerance)


@pytest.mark.parametrize("name", MIXTURES)
def test_all_passes_agree_and_rows_are_independent(tiny_config: ModelConfig, name: str) -> None:
    config = make(tiny_config, name)
    params = random_params(config, seed=2)
    tokens = np.random.default_rng(1).integers(0, 61, (3, 15))
    whole = whole_logits(config, params, tokens)
    np.testing.assert_allclose(block_logits(config, params, tokens), whole, atol=2e-5)
    found = prefill_logits(config, params, tokens[:, :12], chunk_blocks=2)
    np.testing.assert_allclose(found, whole[:, :12], atol=2e-5)
    alone = whole_logits(config, params, tokens[1:2])
    np.testing.assert_allclose(alone, whole[1:2], atol=2e-5)


def test_which_parameters_there_are(tiny_config: ModelConfig) -> None:
    params = abstract_params(make(tiny_config, "sigmoid-groups"))
    assert set(params["layers"][0]["mlp"]) == {"gate_proj", "up_proj", "down_proj"}
    mixture = params["layers"][1]["mlp"]
    assert mixture["experts"]["gate_proj"].shape == (12, 24, 10)
    assert mixture["experts"]["down_proj"].shape == (12, 10, 24)
    assert mixture["shared_expert"]["up_proj"]["kernel"].shape == (24, 20)
    assert mixture["router"]["kernel"].shape == (24, 12)
    plain = abstract_params(make(tiny_config, "softmax"))["layers"][0]["mlp"]
    assert set(plain) == {"router", "experts"} and set(plain["router"]) == {"kernel"}


def test_routers_are_fp32_in_a_bf16_model(tiny_config: ModelConfig, tmp_path: Any) -> None:
    """Also after a save and a load that asks for bf16."""
    config = make(tiny_config, "sigmoid-groups")
    params = random_params(config, dtype=jnp.bfloat16)
    checkpoint.save(tmp_path / "saved", config, params)
    for loaded in (
        checkpoint.load_params(tmp_path / "saved"),
        checkpoint.load_params(tmp_path / "saved", dtype=jnp.bfloat16),
    ):
        for path, leaf in checkpoint.dotted_leaves(loaded).items():
            wanted = jnp.float32 if ".router." in path else jnp.bfloat16
            assert leaf.dtype == wanted, path
        same = jax.tree.map(lambda a, b: bool((a == b).all()), params, loaded)
        assert all(jax.tree.leaves(same))
    tokens = jnp.zeros((1, 4), jnp.int32)
    hidden, fresh = bind(config, loaded)(tokens, tokens, lambda layer, q, fresh: q)
    assert hidden.dtype == fresh[1].k.dtype == jnp.bfloat16


def test_one_model_on_four_devices(run_python: Any) -> None:
    """Each device holds a slice of every expert; logits are those of one device."""
    run_python(
        """
import jax, jax.numpy as jnp, numpy as np
from herald_jax.configs import ModelConfig
from herald_jax.models import random_params
from herald_jax.sharding import TENSOR_PARALLEL, param_shardings
from tests.models.passes import whole_logits
config = ModelConfig(
    family="test", vocab_size=60, hidden_size=25, intermediate_size=40, num_layers=2,
    num_heads=8, num_kv_heads=4, head_dim=6, block_length=4, mask_token_id=59,
    num_experts=8, experts_per_token=2, expert_intermediate_size=12, num_shared_experts=1,
)
params = random_params(config)
tokens = np.arange(24).reshape(2, 12)
wanted = whole_logits(config, params, tokens)
mesh = jax.make_mesh((4,), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
for rules in (TENSOR_PARALLEL, {**TENSOR_PARALLEL, "expert": "tp", "expert_mlp": None}):
    placed = jax.device_put(params, param_shardings(config, mesh, rules))
    np.testing.assert_allclose(whole_logits(config, placed, tokens), wanted, atol=2e-5)
stack = jax.device_put(params, param_shardings(config, mesh))["layers"][1]["mlp"]["experts"]
assert stack["gate_proj"].addressable_shards[0].data.shape == (8, 25, 3)
""",
        devices=4,
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 7}, "experts_per_token=7"),
        ({"expert_intermediate_size": 0}, "expert_intermediate_size=0"),
        ({"router_groups": 4}, "router_groups=4"),
        ({"router_groups": 2, "router_top_groups": 3}, "router_top_groups=3"),
        ({"router_groups": 3, "router_top_groups": 1, "experts_per_token": 3}, "at most the 2"),
        ({"router_score": "tanh"}, "one of sigmoid, softmax"),
        ({"num_experts": 0}, "Set num_experts as well"),
        ({"routed_scale": float("nan")}, "routed_scale"),
    ],
)
def test_misfits_are_refused(
    tiny_config: ModelConfig, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tiny_config, "softmax", **changes)


def test_descriptions_go_through_json_and_old_ones_are_read(tiny_config: ModelConfig) -> None:
    config = make(tiny_config, "sigmoid-groups")
    assert ModelConfig.from_json(config.to_json()) == config
    new = {"num_experts", *MIXTURES["sigmoid-groups"], "normalise_expert_weights"}
    lines = tiny_config.to_json().splitlines()
    old = "\n".join(line for line in lines if not any(f'"{name}"' in line for name in new))
    assert ModelConfig.from_json(old.replace("61,\n}", "61\n}").replace("null,\n}", "null\n}")) == (
        tiny_config
    )


@pytest.mark.parametrize("tokens", [4, DENSE_TOKENS + 1])
def test_gpu_programs_have_no_ragged_matmul(tiny_config: ModelConfig, tokens: int) -> None:
    """The form for a GPU is chosen while lowering, so it can be looked at without one."""
    config = make(tiny_config, "softmax")
    shapes = ((6, 24, 10), (6, 24, 10), (6, 10, 24))
    weights = ExpertWeights(*(jnp.zeros(shape) for shape in shapes))

    def run(x: jax.Array, logits: jax.Array, weights: ExpertWeights) -> jax.Array:
        return mix(x, route(config, logits, None), weights)

    traced = jax.jit(run).trace(jnp.zeros((tokens, 24)), jnp.zeros((tokens, 6)), weights)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "ragged" not in text and "dot_general" in text
    is_tiled = "6x128x10" in text or "x128x10xf32" in text
    assert is_tiled == (tokens > DENSE_TOKENS)
