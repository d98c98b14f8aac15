"""Device copies of host arrays, made anew only when their contents change.

Most small arguments of a step are those of the step before. A copy that stays saves its transfer,
and its address stays as well: a program that runs as recorded graphs need not record them again.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np


class KeptOnDevice:
    """The latest device copy of each named tree of host arrays, which nobody may donate."""

    def __init__(self) -> None:
        """Keeps nothing yet."""
        self._kept: dict[str, tuple[Any, Any]] = {}

    def __call__(self, name: str, tree: Any) -> Any:
        """The tree on the device; the arrays given must not be changed afterwards."""
        leaves, structure = jax.tree.flatten(tree)
        arrays = [np.asarray(leaf) for leaf in leaves]
        contents = [(leaf.shape, leaf.dtype, leaf.tobytes()) for leaf in arrays]
        key = (structure, contents)
        kept = self._kept.get(name)
        if kept is None or kept[0] != key:
            kept = self._kept[name] = (key, jax.device_put(tree))
        return kept[1]
