"""Comparison of a converted checkpoint with the torch reference.

The references are in `convert.references`; here both models run on the same tokens.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from convert.canvas_reference import own_logits, random_inputs
from convert.canvas_reference import reference_logits as canvas_reference_logits
from convert.families import Family
from convert.reader import HuggingFaceFolder
from convert.references import BUILDERS, reference_logits
from convert.report import Findings
from herald_jax.checkpoint import load_params
from herald_jax.configs import ModelConfig
from herald_jax.models import bind
from herald_jax.models.attention import FreshKV

RELATIVE_TOLERANCE = 5e-4
"""Largest difference allowed, as a share of the largest reference logit; both are fp32."""


@dataclasses.dataclass(frozen=True, slots=True)
class CheckResult:
    """How far the logits are apart.

    Attributes:
        largest: Largest absolute difference.
        tolerance: What is allowed.
        tokens: Length of the compared text.
    """

    largest: float
    tolerance: float
    tokens: int

    @property
    def agrees(self) -> bool:
        """True if the difference is within the tolerance (a NaN is not)."""
        return self.largest <= self.tolerance

    def __str__(self) -> str:
        return (
            f"largest logit difference to the reference {self.largest:.2e} over {self.tokens} "
            f"tokens, allowed {self.tolerance:.1e}"
        )


def require_reference(family: Family, findings: Findings) -> None:
    """Notes a fault unless the reference of `family` can be run here."""
    absent = [n for n in ("torch", "transformers") if importlib.util.find_spec(n) is None]
    if family.reference not in BUILDERS:
        findings.fault(
            "check",
            f"--check for {family.name}",
            expected="a family with a reference",
            found="none",
            fix="Convert without --check.",
        )
    elif absent:
        findings.fault(
            "check",
            "--check",
            expected="torch and transformers",
            found=f"{' and '.join(absent)} not installed",
            fix="Install them with: pip install 'herald_jax[parity]'.",
        )


def compare_logits(
    family: Family, hf: HuggingFaceFolder, config: ModelConfig, converted: Path, dtype: str
) -> CheckResult:
    """Runs both models in fp32 on the same random tokens.

    Both start from the weights as stored in `dtype`, so rounding to it is no difference. The
    length is no multiple of the block, so the last block is an incomplete one.
    """
    length = 3 * config.block_length + config.block_length // 2
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, length)
    assert family.reference is not None
    if config.is_canvas:
        return _compare_canvas(hf, config, converted, dtype)
    wanted = reference_logits(family.reference, hf, config, tokens, jnp.dtype(dtype))
    params = load_params(converted, config, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        found = np.asarray(uncached_logits(config, params, jnp.asarray(tokens[None])))[0]
    scale = max(1.0, float(np.abs(wanted).max()))
    return CheckResult(float(np.abs(found - wanted).max()), RELATIVE_TOLERANCE * scale, length)


def _compare_canvas(
    hf: HuggingFaceFolder, config: ModelConfig, converted: Path, dtype: str
) -> CheckResult:
    """The same of a short text and a canvas after it, by encoder and denoiser."""
    inputs = random_inputs(config, seed=0, rows=1, text_length=24)
    wanted = canvas_reference_logits(hf, inputs, jnp.dtype(dtype))
    params = load_params(converted, config, dtype=jnp.float32)
    with jax.default_matmul_precision("highest"):
        found = own_logits(config, params, inputs)
    pairs = list(zip(found, wanted, strict=True))
    scale = max(1.0, *(float(np.abs(expected).max()) for _, expected in pairs))
    largest = max(float(np.abs(own - expected).max()) for own, expected in pairs)
    tokens = inputs.text.size + inputs.canvas.size
    return CheckResult(largest, RELATIVE_TOLERANCE * scale, tokens)


def uncached_logits(
    config: ModelConfig, params: dict[str, Any], tokens: Int[Array, "R Q"]
) -> Float[Array, "R Q V"]:
    """Logits of one uncached pass, under the block-causal mask unless attention is full."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    blocks = positions[0] // config.block_length
    visible = (blocks[None, :] <= blocks[:, None]) | config.is_bidirectional

    def attend(layer: int, q: Float[Array, "R Q H D"], fresh: FreshKV) -> Float[Array, "R Q H D"]:
        k, v = (jnp.repeat(x, config.heads_per_kv_head, axis=2) for x in fresh)
        scores = jnp.einsum("rqhd,rkhd->rhqk", q, k) * config.head_dim**-0.5
        weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf), axis=-1)
        return jnp.einsum("rhqk,rkhd->rqhd", weights, v)

    @jax.jit
    def run(params: dict[str, Any]) -> Float[Array, "R Q V"]:
        decoder = bind(config, params)
        return decoder.logits(decoder(tokens, positions, attend)[0])

    return run(params)
