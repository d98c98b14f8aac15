"""Unmask rules: which masked positions of a block are committed after a forward pass.

A rule is one file with one class and one line in `RULES`. The decoding loop knows only the
`UnmaskRule` protocol.
"""

from herald_jax.decoding.rules.base import (
    BlockView,
    Chooser,
    UnmaskRule,
    most_confident,
    quota,
)
from herald_jax.decoding.rules.entropy_bounded import EntropyBounded
from herald_jax.decoding.rules.factor import Factor
from herald_jax.decoding.rules.low_confidence_dynamic import LowConfidenceDynamic
from herald_jax.decoding.rules.low_confidence_static import LowConfidenceStatic
from herald_jax.decoding.rules.mixed import MixedRules
from herald_jax.decoding.rules.sequential import Sequential
from herald_jax.decoding.rules.sub_blocks import SubBlocks
from herald_jax.decoding.rules.threshold import Threshold

RULES: dict[str, type[UnmaskRule]] = {
    "low_confidence_static": LowConfidenceStatic,
    "low_confidence_dynamic": LowConfidenceDynamic,
    "sequential": Sequential,
    "entropy_bounded": EntropyBounded,
    "threshold": Threshold,
    "factor": Factor,
    "sub_blocks": SubBlocks,
}
"""Strategy name in `SamplingParams` -> rule."""

__all__ = ["RULES", "BlockView", "Chooser", "MixedRules", "UnmaskRule", "most_confident", "quota"]
