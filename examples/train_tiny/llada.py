"""Trains `assets/tiny-llada` on one GPU within a time that is given, compilation included.

`python -m examples.train_tiny.llada --run examples/train_tiny/runs/llada --seconds 300`

Three stages of growing length; the first two end as soon as the model recalls (token accuracy of
`kv` and `niah`), so that the last one has all the time that is left. The rate falls to 2 % over the
second half of it. The run folder holds a checkpoint and an exported model (`model/`), renewed every
minute; the same command goes on from there, in its stage, with a fresh rate.
"""

import argparse
import functools
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from examples.train_tiny import checkpoint, llada_export, llada_model, model, muon
from examples.train_tiny.data import KINDS, stream
from examples.train_tiny.llada_data import Batches, Mixture

SEED = 20261201
LOG_EVERY = 100
SAVE_SECONDS = 60.0
DECAY = 0.1  # of the matrices: bounds attention scores, which no norm does here
WARMUP = 100
RECALLED = 0.97  # token accuracy at which a stage has done its work


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """`sizes` (length, rows) are used in turn, one a step; `until` is a share of the time."""

    sizes: tuple[tuple[int, int], ...]
    until: float
    mixture: Mixture


_SHARES = {"lm": 0.12, "kv": 0.28, "niah": 0.24, "list": 0.18, "vt": 0.06, "copy": 0.12}

STAGES = {
    "256": Stage(
        sizes=((256, 128),),
        until=0.45,
        mixture=Mixture(
            shares={"lm": 0.1, "kv": 0.4, "niah": 0.25, "list": 0.1, "copy": 0.15},
            questions=0.5,
            plain=0.2,
            single=0.2,
        ),
    ),
    "512": Stage(
        sizes=((512, 80),),
        until=0.55,
        mixture=Mixture(shares=_SHARES, questions=0.4, single=0.3, prose_weight=0.15),
    ),
    "mixed": Stage(
        sizes=((1024, 48), (512, 80), (1024, 48), (2048, 24)),
        until=1.0,
        mixture=Mixture(shares=_SHARES, questions=0.25, single=0.5, prose_weight=0.1),
    ),
}


def loss_and_counts(params: dict, batch: dict, shape: model.Shape, fused: bool):
    """Weighted cross-entropy on masked tokens, and per kind: losses, hits, masked tokens."""
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), params)
    logits = llada_model.logits(half, batch["tokens"].astype(jnp.int32), shape, fused=fused)
    target, weight = batch["target"].astype(jnp.int32), batch["weight"]
    picked = jnp.take_along_axis(logits, target[..., None], axis=-1)[..., 0]
    entropy = jax.nn.logsumexp(logits, axis=-1) - picked
    loss = jnp.sum(entropy * weight) / (jnp.sum(weight) + 1e-6)
    learned = ((weight > 0) & ~batch["is_fill"]).astype(jnp.float32)
    hit = (jnp.argmax(logits, axis=-1) == target) * learned
    per_row = jnp.stack([(entropy * learned).sum(-1), hit.sum(-1), learned.sum(-1)])
    return loss, jnp.einsum("cb,bk->kc", per_row, jax.nn.one_hot(batch["kind"], len(KINDS)))


@functools.partial(jax.jit, static_argnames=("shape", "fused"), donate_argnames=("state", "counts"))
def train_step(state: dict, counts, batch: dict, rate, shape: model.Shape, fused: bool):
    """(new state, counts plus this batch's)."""
    grad = jax.value_and_grad(loss_and_counts, has_aux=True)
    (_, new), grads = grad(state["params"], batch, shape, fused)
    params, optimizer = muon.update(state["params"], grads, state["optimizer"], rate, decay=DECAY)
    return {"params": params, "optimizer": optimizer}, counts + new


def initial_state(shape: model.Shape) -> dict:
    """Freshly initialised parameters and optimiser."""
    params = model.init(jax.random.key(SEED), shape)
    params = {name: jnp.array(a) for name, a in params.items()}  # head and embedding apart
    return {"params": params, "optimizer": muon.init(params)}


def rate_at(step: int, share: float, begin: float) -> float:
    """Learning-rate factor: warm-up, then linear to 2 % from halfway between `begin` and 1."""
    middle = 0.5 * (begin + 1.0)
    fall = (1.0 - share) / (1.0 - middle) if share > middle else 1.0
    return min(1.0, (step + 1) / WARMUP) * max(0.02, fall)


def report(counts: np.ndarray, stage: str, step: int, elapsed: float, milliseconds: float) -> str:
    """One log line: milliseconds a step, and loss / accuracy of every kind on masked tokens."""
    cells = [
        f"{kind} {loss / n:.2f}/{hits / n:.3f}"
        for kind, (loss, hits, n) in zip(KINDS, counts, strict=True)
        if n
    ]
    return f"{stage:>5} {step:5d} {elapsed:5.0f} s {milliseconds:6.1f} ms  " + "  ".join(cells)


def recalls(counts: np.ndarray) -> bool:
    """Whether key-value pairs and needles are recalled."""
    rows = counts[[KINDS.index("kv"), KINDS.index("niah")]]
    return bool((rows[:, 1] >= RECALLED * np.maximum(rows[:, 2], 1)).all())


class Trainer:
    """A run: its state, its clock and its folder."""

    def __init__(self, run: Path, shape: model.Shape, seconds: float, log_every: int) -> None:
        self.began = time.perf_counter()
        self.run, self.shape, self.seconds, self.log_every = run, shape, seconds, log_every
        self.fused = llada_model.can_fuse()
        print(f"attention by {'cuDNN' if self.fused else 'XLA'}", flush=True)
        self.state = initial_state(shape)
        self.progress: dict[str, Any] = {"stage": "256", "step": 0, "wall_seconds": 0.0}
        if (stored := checkpoint.load(run, self.state)) is not None:
            self.state, self.progress = stored
            print(f"goes on from {json.dumps(self.progress)}", flush=True)
        self.before = self.progress["wall_seconds"]
        self.scale, self.saved, self.kept = 1.0, time.perf_counter(), None
        self.steps = 0
        self.decay_from = 0.0

    @property
    def share(self) -> float:
        """Share of the time that is gone."""
        return (time.perf_counter() - self.began) / self.seconds

    def compile(self, size: tuple[int, int]) -> Any:
        """The training step for batches of (length, rows)."""
        length, rows = size
        spec = jax.ShapeDtypeStruct
        batch = {
            "tokens": spec((rows, length), jnp.uint16),
            "target": spec((rows, length), jnp.uint16),
            "weight": spec((rows, length), jnp.float32),
            "is_fill": spec((rows, length), jnp.bool_),
            "kind": spec((rows,), jnp.int32),
        }
        counts, rate = spec((len(KINDS), 3), jnp.float32), spec((), jnp.float32)
        begin = time.perf_counter()
        step = train_step.lower(self.like, counts, batch, rate, self.shape, self.fused).compile()
        print(f"compiled {size} in {time.perf_counter() - begin:.0f} s", flush=True)
        return step

    @functools.cached_property
    def like(self) -> dict:
        """Shapes and dtypes of the state."""
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), self.state)

    def save(self) -> None:
        """Checkpoint and exported model."""
        self.progress["wall_seconds"] = round(self.before + time.perf_counter() - self.began, 1)
        checkpoint.save(self.run, self.state, self.progress)
        llada_export.write(self.state["params"], self.shape, self.run / "model")
        self.saved = time.perf_counter()

    def train(self, stages: dict[str, Stage]) -> None:
        """Runs the stages from the run's own on, until the time is used."""
        names = list(stages)
        names = names[names.index(self.progress["stage"]) :]
        sizes = list(dict.fromkeys(size for name in names for size in stages[name].sizes))
        _ = self.like  # before a step donates the state
        with ThreadPoolExecutor(2) as pool:  # later stages compile while the first one trains
            programs = {size: pool.submit(self.compile, size) for size in sizes}
            for name in names:
                self._stage(name, stages[name], programs, is_last=name == names[-1])
                if self.share >= 1.0:
                    break
        self.save()

    def _stage(self, name: str, stage: Stage, programs: dict[Any, Future], is_last: bool) -> None:
        if self.progress["stage"] != name:
            self.progress |= {"stage": name, "step": 0}
        if is_last:
            self.decay_from = self.share
        first = self.progress["step"]
        seed = [SEED, list(STAGES).index(name)]
        batches = stream(stage.mixture, stage.sizes, seed, first, 10**6, kind=Batches)
        counts, logged = jnp.zeros((len(KINDS), 3)), None
        for step, batch in enumerate(batches, first):
            program = programs[stage.sizes[step % len(stage.sizes)]].result()
            if logged is None:
                logged = time.perf_counter()
            share = self.share if is_last else 0.0
            rate = jnp.float32(self.scale * rate_at(self.steps, share, self.decay_from))
            self.state, counts = program(self.state, counts, batch, rate)
            self.steps += 1
            self.progress["step"] = step + 1
            is_over = self.share >= (1.0 if is_last else stage.until)
            if self.steps % self.log_every and not is_over:
                continue
            values, now = np.asarray(counts), time.perf_counter()
            milliseconds = 1e3 * (now - logged) / self.log_every
            line = report(values, name, step + 1, now - self.began, milliseconds)
            print(line, flush=True)
            with open(self.run / "log.txt", "a") as log:
                log.write(line + "\n")
            self._guard(values)
            counts, logged = jnp.zeros_like(counts), now
            if now - self.saved > SAVE_SECONDS:
                self.save()
            if is_over or (not is_last and recalls(values)):
                break
        batches.close()  # type: ignore[attr-defined]

    def _guard(self, values: np.ndarray) -> None:
        """Keeps a copy of a sound state; goes back to it, at half the rate, from a broken one."""
        if np.isfinite(values).all():
            self.kept = jax.tree.map(jnp.copy, self.state)
        elif self.kept is not None:
            self.state = jax.tree.map(jnp.copy, self.kept)
            self.scale *= 0.5
            print(f"not finite: goes back, rates times {self.scale}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Trains the tiny LLaDA.")
    parser.add_argument("--run", type=Path, required=True, help="folder of checkpoint and log")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--toy", action="store_true", help="two layers, to try it on a CPU")
    arguments = parser.parse_args()
    arguments.run.mkdir(parents=True, exist_ok=True)
    shape, stages, every = llada_model.SHAPE, STAGES, LOG_EVERY
    if arguments.toy:
        shape = model.Shape(
            layers=2,
            hidden=64,
            intermediate=96,
            heads=2,
            kv_heads=2,
            head_dim=32,
            qk_norm=False,
            tied=False,
        )
        stages = {
            "256": Stage(sizes=((256, 8),), until=0.5, mixture=STAGES["256"].mixture),
            "mixed": Stage(sizes=((512, 4), (256, 8)), until=1.0, mixture=STAGES["mixed"].mixture),
        }
        every = 5
    Trainer(arguments.run, shape, arguments.seconds, every).train(stages)
