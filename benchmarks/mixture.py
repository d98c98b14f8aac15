"""Times the forms of a mixture's expert matmuls, one layer at published shapes.

The record decides `herald_jax.models.moe.DENSE_TOKENS` and where `jax.lax.ragged_dot` is used:

    python -m benchmarks mixture

With `--step` whole steps of a model are timed instead: see `mixture_step.py`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.mixture_step import add_step_arguments, steps
from benchmarks.record import RESULTS, current_commit, write_record
from herald_jax.models.moe import (
    ExpertWeights,
    Routing,
    dense_experts,
    ragged_experts,
    tiled_experts,
)

SHAPES = {"sdar-30b": (128, 2048, 768, 8), "llada2-mini": (256, 2048, 512, 8)}
"""Experts, hidden size, width of an expert, experts of a token."""
TOKENS = (4, 32, 128, 256, 512, 1024, 4096)
FORMS: dict[str, Callable[..., Any]] = {
    "dense": dense_experts,
    "tiled": tiled_experts,
    "ragged": ragged_experts,
}


def best_milliseconds(call: Callable[[], Any], calls: int = 10, samples: int = 3) -> float:
    """Fewest milliseconds of one call, of queued calls."""
    jax.block_until_ready(call())
    found = []
    for _ in range(samples):
        begin = time.perf_counter()
        jax.block_until_ready([call() for _ in range(calls)][-1])
        found.append((time.perf_counter() - begin) / calls)
    return 1e3 * min(found)


def measure(name: str) -> dict[str, dict[str, float]]:
    """Milliseconds by form and number of tokens."""
    experts, hidden, inner, per_token = SHAPES[name]
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((experts, hidden, inner), (experts, hidden, inner), (experts, inner, hidden))
    weights = ExpertWeights(
        *(jax.random.normal(k, s, jnp.bfloat16) * 0.02 for k, s in zip(keys, shapes, strict=False))
    )
    found: dict[str, dict[str, float]] = {form: {} for form in FORMS}
    for tokens in TOKENS:
        x = jax.random.normal(keys[3], (tokens, hidden), jnp.bfloat16)
        scores = jax.nn.softmax(jax.random.normal(keys[4], (tokens, experts)))
        chosen, ids = jax.lax.top_k(scores, per_token)
        routing = Routing(ids, chosen / chosen.sum(-1, keepdims=True))
        for form, function in FORMS.items():
            if form == "dense" and tokens > 2048:
                continue  # its intermediate results alone take gigabytes
            run = jax.jit(function)
            call = lambda run=run, x=x, routing=routing: run(x, routing, weights)  # noqa: E731
            found[form][str(tokens)] = round(best_milliseconds(call), 3)
    return found


def main(arguments: argparse.Namespace) -> None:
    """Measures all shapes and writes the record, or whole steps of a model."""
    if arguments.step:
        steps(arguments)
        return
    path = write_record(
        "mixture",
        commit=arguments.commit or current_commit(),
        shapes={
            name: dict(zip(("experts", "hidden", "inner", "per_token"), shape, strict=True))
            for name, shape in SHAPES.items()
        },
        settings={"dtype": "bfloat16", "weights": "random", "milliseconds": "best of 3 x 10"},
        figures={name: measure(name) for name in SHAPES},
        folder=arguments.output,
    )
    print(path.read_text(encoding="utf-8"), end="")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the record")
    add_step_arguments(parser)
