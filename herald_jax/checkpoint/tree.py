"""The parameter tree as names."""

from __future__ import annotations

from typing import Any

import jax


def dotted_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a nested dict by dotted path, such as `layers.10.mlp.up_proj.kernel`.

    Layers come in the order of their numbers because the keys of the tree are integers.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {".".join(str(key.key) for key in path): leaf for path, leaf in leaves}
