"""Logical axes to mesh axes."""

import dataclasses

import jax
import pytest

from herald_jax._checks import ConfigError
from herald_jax.checkpoint import dotted_leaves
from herald_jax.models import abstract_params
from herald_jax.sharding import TENSOR_PARALLEL, check_rules, param_shardings


def test_every_parameter_has_a_sharding(tiny_config):
    config = dataclasses.replace(tiny_config, qkv_bias=True)
    placed = param_shardings(config, jax.make_mesh((1,), ("tp",)))
    assert jax.tree.structure(placed) == jax.tree.structure(abstract_params(config))
    specs = {name: tuple(sharding.spec) for name, sharding in dotted_leaves(placed).items()}
    assert specs["embed_tokens.embedding"] == ("tp", None)
    assert specs["lm_head.kernel"] == (None, "tp")
    assert specs["layers.2.attention.k_proj.kernel"] == (None, "tp")
    assert specs["layers.2.attention.k_proj.bias"] == ("tp",)
    assert specs["layers.2.attention.o_proj.kernel"] == ("tp", None)
    assert specs["layers.2.attention.q_norm.scale"] == (None,)
    assert specs["layers.2.mlp.down_proj.kernel"] == ("tp", None)
    assert specs["norm.scale"] == (None,)


def test_rules_that_do_not_fit_the_mesh(tiny_config):
    mesh = jax.make_mesh((1,), ("tp",))
    rules = {**TENSOR_PARALLEL, "mlp": "model", "experts": "tp"}
    with pytest.raises(ConfigError) as caught:
        check_rules(tiny_config, mesh, rules)
    assert "'model'" in str(caught.value) and "'experts'" in str(caught.value)
    with pytest.raises(ConfigError, match="head_dim"):
        rules = {key: value for key, value in TENSOR_PARALLEL.items() if key != "head_dim"}
        param_shardings(tiny_config, mesh, rules)


TWO_DEVICES = """
import dataclasses, jax, numpy as np
from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.models import random_params
from herald_jax.sharding import TENSOR_PARALLEL, param_shardings
config = ModelConfig(
    family="test", vocab_size=62, hidden_size=25, intermediate_size=40, num_layers=1,
    num_heads=6, num_kv_heads=2, head_dim=8, block_length=4, mask_token_id=60,
)
mesh = jax.make_mesh((2,), ("tp",))
params = random_params(config)
placed = jax.device_put(params, param_shardings(config, mesh))
shapes = lambda leaf: {shard.data.shape for shard in leaf.addressable_shards}
attention = placed["layers"][0]["attention"]
assert shapes(attention["q_proj"]["kernel"]) == {(25, 24)}
assert shapes(attention["k_proj"]["kernel"]) == {(25, 8)}
assert shapes(attention["o_proj"]["kernel"]) == {(24, 25)}
assert shapes(placed["embed_tokens"]["embedding"]) == {(31, 25)}
assert shapes(placed["norm"]["scale"]) == {(25,)}
for a, b in zip(jax.tree.leaves(placed), jax.tree.leaves(params), strict=True):
    assert np.array_equal(a, b)
# One KV head is 8 features wide: the width divides, the head must not be cut.
wrong = dataclasses.replace(
    config, num_heads=3, num_kv_heads=1, vocab_size=61, intermediate_size=41
)
try:
    param_shardings(wrong, mesh)
except ConfigError as error:
    for name in ("num_heads=3", "num_kv_heads=1", "vocab_size=61", "intermediate_size=41"):
        assert name in str(error), name
else:
    raise AssertionError("not refused")
replicated = {**TENSOR_PARALLEL, **dict.fromkeys(["heads", "kv_heads", "vocab", "mlp"])}
param_shardings(wrong, mesh, replicated)
"""


def test_two_devices(run_python):
    run_python(TWO_DEVICES, devices=2)
