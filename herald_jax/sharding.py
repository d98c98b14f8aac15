"""Where parameters live: logical axis names turned into mesh axes.

Layers name the axes of their parameters (`logical_axes` metadata) and never speak of
devices. A rule table maps those names to mesh axes, `None` meaning replicated.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.models.decoder import abstract_state

Rules = Mapping[str, str | None]
"""Logical axis -> mesh axis, or `None` for replicated."""

TENSOR_PARALLEL: Rules = {
    "vocab": "tp",
    "heads": "tp",
    "kv_heads": "tp",
    "mlp": "tp",
    "expert": None,
    "expert_mlp": "tp",
    "embed": None,
    "head_dim": None,
}
"""Each device holds whole heads, a slice of the MLP and a slice of the vocabulary.

Of a mixture each device holds a slice of every expert, so that the load is even whatever the
router chooses; routers are replicated.
"""


def _axis_sizes(config: ModelConfig) -> dict[str, tuple[str, int]]:
    """The config field and count that a split of each logical axis has to divide.

    Heads are counted, not their features: a head is never cut in two.
    """
    return {
        "vocab": ("vocab_size", config.vocab_size),
        "heads": ("num_heads", config.num_heads),
        "kv_heads": ("num_kv_heads", config.num_kv_heads),
        "mlp": ("intermediate_size", config.intermediate_size),
        "expert": ("num_experts", config.num_experts),
        "expert_mlp": ("expert_intermediate_size", config.expert_intermediate_size),
        "embed": ("hidden_size", config.hidden_size),
        "head_dim": ("head_dim", config.head_dim),
    }


def check_rules(config: ModelConfig, mesh: Mesh, rules: Rules = TENSOR_PARALLEL) -> None:
    """Raises `ConfigError` with every rule that does not fit the mesh or the config."""
    sizes = _axis_sizes(config)
    faults: list[str] = []
    for logical, mesh_axis in rules.items():
        if logical not in sizes:
            faults.append(f"{logical!r} is no logical axis; known: {', '.join(sorted(sizes))}")
        elif mesh_axis is not None and mesh_axis not in mesh.shape:
            faults.append(
                f"{logical!r} goes to mesh axis {mesh_axis!r}, the mesh has {list(mesh.shape)}"
            )
        elif mesh_axis is not None:
            field, size = sizes[logical]
            if size % mesh.shape[mesh_axis]:
                faults.append(
                    f"{field}={size} is not a multiple of the {mesh.shape[mesh_axis]} devices of "
                    f"mesh axis {mesh_axis!r}; use fewer devices or replicate {logical!r} (None)"
                )
    if faults:
        raise ConfigError("The sharding rules do not fit:\n  " + "\n  ".join(faults))


def param_shardings(
    config: ModelConfig,
    mesh: Mesh,
    rules: Rules = TENSOR_PARALLEL,
    *,
    memory_kind: str | None = None,
) -> dict[str, Any]:
    """A `NamedSharding` for every parameter, in the structure of `abstract_params(config)`.

    Args:
        config: Description of the model.
        mesh: Devices with named axes.
        rules: Logical axis -> mesh axis.
        memory_kind: Memory of the devices to use, such as `"pinned_host"`; the default if
            left out.

    Raises:
        ConfigError: If a rule does not fit; all misfits are in one message.

    Example:
        >>> config = ModelConfig(
        ...     family="demo", vocab_size=8, hidden_size=6, intermediate_size=5, num_layers=1,
        ...     num_heads=2, num_kv_heads=1, head_dim=4, block_length=2, mask_token_id=7,
        ... )
        >>> placed = param_shardings(config, jax.make_mesh((1,), ("tp",)))
        >>> tuple(placed["lm_head"]["kernel"].spec)
        (None, 'tp')
    """
    check_rules(config, mesh, rules)

    def place(variable: nnx.Variable[Any]) -> NamedSharding:
        axes = variable.get_metadata()["logical_axes"]
        unknown = [axis for axis in axes if axis is not None and axis not in rules]
        if unknown:
            raise ConfigError(f"No sharding rule for the logical axes {unknown}.")
        spec = PartitionSpec(*(axis and rules[axis] for axis in axes))
        return NamedSharding(mesh, spec, memory_kind=memory_kind)

    placed = jax.tree.map(
        place, abstract_state(config), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
    )
    return nnx.to_pure_dict(placed)
