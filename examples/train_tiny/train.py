"""Trains one stage, continuing from the run folder's checkpoint.

`python -m examples.train_tiny.train 256 --run examples/train_tiny/runs/a`, then the stages 512,
2048, 8192, mixed and polish in the same way. `--seconds` stops early with a checkpoint; the same
command then goes on from that step.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from examples.train_tiny import checkpoint, model, muon
from examples.train_tiny.data import KINDS, stream
from examples.train_tiny.stages import STAGES

SEED = 20261130
LOG_EVERY = 100
SHAPE = model.Shape()


def loss_and_counts(params: dict, batch: dict, kernel: bool):
    """Weighted cross-entropy on masked tokens, and per kind: losses, hits, masked tokens."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    logits = model.noised_logits(half, batch, SHAPE, kernel=kernel)
    target, weight = batch["target"].astype(jnp.int32), batch["weight"]
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - picked
    loss = jnp.sum(entropy * weight) / (jnp.sum(weight) + 1e-6)
    learned = (weight > 0.1).astype(jnp.float32)  # leaves out the fill after an answer
    hit = (jnp.argmax(logits, axis=-1) == target) * learned
    per_block = jnp.stack([(entropy * learned).sum(-1), hit.sum(-1), learned.sum(-1)])
    kinds = jax.nn.one_hot(batch["kind"], len(KINDS))
    return loss, jnp.einsum("cbm,bmk->kc", per_block, kinds)


@functools.partial(jax.jit, static_argnames="kernel", donate_argnames=("state", "counts"))
def train_step(state: dict, counts, batch: dict, rate, kernel: bool):
    """(new state, counts plus this batch's)."""
    grad = jax.value_and_grad(loss_and_counts, has_aux=True)
    (_, new), grads = grad(state["params"], batch, kernel)
    params, optimizer = muon.update(state["params"], grads, state["optimizer"], rate)
    return {"params": params, "optimizer": optimizer}, counts + new


def initial_state() -> dict:
    """Freshly initialised parameters and optimiser."""
    params = model.init(jax.random.key(SEED), SHAPE)
    return {"params": params, "optimizer": muon.init(params)}


def report(counts, stage: str, step: int, seconds: float, steps: int) -> str:
    """One log line: milliseconds a step, and loss / accuracy of every kind on masked tokens."""
    cells = [
        f"{kind} {loss / n:.2f}/{hits / n:.3f}"
        for kind, (loss, hits, n) in zip(KINDS, np.asarray(counts), strict=True)
        if n
    ]
    return f"{stage} {step:5d} {1e3 * seconds / steps:6.1f} ms  " + "  ".join(cells)


def train(stage_name: str, run: Path, seconds: float) -> None:
    """Runs the stage from wherever the run folder stands."""
    stage = STAGES[stage_name]
    state = initial_state()
    progress = {"stage": stage_name, "step": 0, "wall_seconds": {}}
    if (stored := checkpoint.load(run, state)) is not None:
        state, progress = stored
        if progress["stage"] != stage_name:
            progress |= {"stage": stage_name, "step": 0}
    kernel = jax.default_backend() == "gpu"
    begin = last = time.perf_counter()
    counts = jnp.zeros((len(KINDS), 3))
    step, logged = progress["step"], progress["step"]
    batches = stream(stage.mixture, stage.sizes, [SEED, stage.index], step, stage.steps)
    with open(run / "log.txt", "a") as log:
        for batch in batches:
            rate = jnp.float32(stage.rate(step))
            state, counts = train_step(state, counts, batch, rate, kernel)
            step += 1
            stop = time.perf_counter() - begin > seconds
            if step % LOG_EVERY == 0 or step == stage.steps or stop:
                values = np.asarray(counts)
                now = time.perf_counter()
                line = report(values, stage_name, step, now - last, step - logged)
                print(line, flush=True)
                log.write(line + "\n")
                counts, last, logged = jnp.zeros_like(counts), now, step
            if stop:
                break
    wall = progress["wall_seconds"]
    wall[stage_name] = round(wall.get(stage_name, 0.0) + time.perf_counter() - begin, 1)
    progress["step"] = step
    checkpoint.save(run, state, progress)
    print(json.dumps(progress))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Trains one stage, continuing from the run folder's checkpoint."
    )
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--run", type=Path, required=True, help="folder of checkpoint and log")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    arguments = parser.parse_args()
    arguments.run.mkdir(parents=True, exist_ok=True)
    train(arguments.stage, arguments.run, arguments.seconds)
