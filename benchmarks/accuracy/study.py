"""Runs the arms over batches of prompts and keeps the records up to date."""

from __future__ import annotations

import argparse
import dataclasses
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.accuracy.arms import Arm, study_arms
from benchmarks.accuracy.decode import (
    Answer,
    Batch,
    Quality,
    pool_tokens_for,
    row_tokens_for,
    span_of,
)
from benchmarks.accuracy.paired import (
    pack_bits,
    paired_mean_difference,
    paired_share_difference,
)
from benchmarks.accuracy.passes import Layout
from benchmarks.accuracy.prompts import Job, Texts, made_ahead
from benchmarks.accuracy.warm import warm_up
from benchmarks.record import current_commit, write_record
from herald_jax import checkpoint
from herald_jax.cache.dense import DenseCache
from herald_jax.model_source import find_checkpoint, resolve_dtype
from herald_jax.settings import enable_compile_cache

SHORT_CELLS = ("niah", "kv", "vt", "cwe")
SHORT_BLOCKS = 4
"""Most blocks of an answer in these cells, whose answers end within two."""
ANSWER_TOKENS = 128
"""Tokens of a length that are no prompt, as `examples.train_tiny.tasks` makes them."""


@dataclasses.dataclass(slots=True)
class Outcomes:
    """What one arm did with the first prompts of one cell and length, in order."""

    contained: list[bool] = dataclasses.field(default_factory=list)
    exact: list[bool] = dataclasses.field(default_factory=list)
    steps: list[int] = dataclasses.field(default_factory=list)
    blocks: list[int] = dataclasses.field(default_factory=list)

    def add(self, other: Outcomes) -> None:
        """Appends further prompts."""
        for mine, new in zip(self._lists(), other._lists(), strict=True):
            mine.extend(new)

    def first(self, number: int) -> Outcomes:
        """The outcomes of the first prompts."""
        contained, exact, steps, blocks = (values[:number] for values in self._lists())
        return Outcomes(contained, exact, steps, blocks)

    def _lists(self) -> tuple[list, list, list, list]:
        return self.contained, self.exact, self.steps, self.blocks

    def figures(self, dense: Outcomes, *, with_bits: bool) -> dict[str, Any]:
        """Shares, steps, and paired differences to the dense arm on the same prompts."""
        number = len(self.contained)

        def shares(name: str) -> dict[str, Any]:
            ours, theirs = getattr(self, name), getattr(dense, name)
            gap = [round(x, 5) for x in paired_share_difference(ours, theirs)]
            found = {name: round(sum(ours) / number, 4), f"{name}_difference": gap}
            return found | ({f"{name}_bits": pack_bits(ours)} if with_bits else {})

        mine, theirs = (
            [steps / blocks for steps, blocks in zip(x.steps, x.blocks, strict=True)]
            for x in (self, dense)
        )
        gap = [round(x, 4) for x in paired_mean_difference(mine, theirs)]
        return {
            "n": number,
            **shares("contained"),
            **shares("exact"),
            "steps_per_block": round(sum(self.steps) / sum(self.blocks), 3),
            "blocks_per_answer": round(sum(self.blocks) / number, 3),
            "steps_per_block_difference": gap,
        }


class CellResults:
    """Everything measured for one cell."""

    def __init__(self, arms: list[Arm], lengths: list[int], layers: int) -> None:
        self.outcomes = {length: {arm.name: Outcomes() for arm in arms} for length in lengths}
        self.drift = {
            length: {arm.name: (np.zeros(0), np.zeros(0, int)) for arm in arms}
            for length in lengths
        }
        self.quality = {
            length: {arm.name: Quality.empty(layers) for arm in arms} for length in lengths
        }

    def add_drift(self, length: int, name: str, sums: np.ndarray, rows: np.ndarray) -> None:
        """Adds what `Batch.committed_error` found."""
        size = max(len(sums), len(self.drift[length][name][0]))
        pairs = zip(self.drift[length][name], (sums, rows), strict=True)
        old, new = (sum(np.pad(x, (0, size - len(x))) for x in pair) for pair in pairs)
        self.drift[length][name] = (np.asarray(old), np.asarray(new))

    def figures(self) -> dict[str, Any]:
        """The part of a record under `figures`."""
        by_length: dict[str, Any] = {}
        pooled: dict[str, tuple[Outcomes, Outcomes]] = {}
        for length, by_arm in self.outcomes.items():
            for name, outcomes in by_arm.items():
                if not outcomes.contained:
                    continue
                dense = by_arm["dense"].first(len(outcomes.contained))
                lines = by_length.setdefault(str(length), {})
                lines[name] = outcomes.figures(dense, with_bits=True)
                ours, theirs = pooled.setdefault(name, (Outcomes(), Outcomes()))
                ours.add(outcomes)
                theirs.add(dense)
        return {
            "by_length": by_length,
            "pooled": {
                name: ours.figures(dense, with_bits=False) for name, (ours, dense) in pooled.items()
            },
            "committed_error": {
                str(length): {
                    name: {
                        "rows": rows.tolist(),
                        "mean": [round(float(x), 4) for x in sums / np.maximum(rows, 1)],
                    }
                    for name, (sums, rows) in by_arm.items()
                    if rows.any()
                }
                for length, by_arm in self.drift.items()
            },
            "selection": {
                str(length): {
                    name: _quality_figures(quality)
                    for name, quality in by_arm.items()
                    if quality.counts.any()
                }
                for length, by_arm in self.quality.items()
            },
        }


def _quality_figures(quality: Quality) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, sums, count in zip(
        ("first_block", "later_blocks"), (quality.first, quality.later), quality.counts, strict=True
    ):
        if count:
            recall, mass, best = ([round(float(x / count), 4) for x in line] for line in sums)
            lines = {"recall": recall, "mass": mass, "best_mass": best}
            found[name] = {"rows": int(count), **lines}
    return found


def jobs_of(
    cells: list[str], lengths: list[int], prompts: int, rows: int
) -> Iterator[tuple[int, Job]]:
    """Batches with their round: every cell and length once a round, so that all grow together."""
    for start in range(0, prompts, rows):
        for length in lengths:
            for cell in cells:
                yield start // rows, Job(cell, length, start, min(rows, prompts - start))


def run_study(arguments: argparse.Namespace) -> None:
    """The whole study; returns early, with records, when the time is over."""
    begin = time.monotonic()
    enable_compile_cache()
    dtype = resolve_dtype(arguments.dtype)
    folder, config = find_checkpoint(arguments.model, dtype=dtype)
    params = checkpoint.load_params(folder, config, dtype=dtype)
    texts, layout = Texts(folder), Layout()
    pattern = re.compile(arguments.arms)
    arms = [arm for arm in study_arms() if arm.name == "dense" or pattern.search(arm.name)]
    layers = max(config.num_layers - layout.dense_layers, 0)
    results = {cell: CellResults(arms, arguments.lengths, layers) for cell in arguments.cells}
    longest = max(arguments.lengths)
    tokens = row_tokens_for(longest - ANSWER_TOKENS, arguments.max_blocks, config.block_length)
    pool_tokens = pool_tokens_for(arms, layout, longest + ANSWER_TOKENS)
    commit, run = arguments.commit or current_commit(), arguments.run

    def save() -> None:
        for cell, found in results.items():
            figures = found.figures()
            if figures["by_length"]:
                write_record(
                    "_".join(filter(None, (f"accuracy_{Path(arguments.model).name}_{cell}", run))),
                    commit=commit,
                    shapes=dataclasses.asdict(config),
                    settings={
                        "model": str(arguments.model),
                        "dtype": dtype,
                        "cell": cell,
                        "run": run,
                        "rows": arguments.rows,
                        "max_blocks": _blocks(cell, arguments.max_blocks),
                        "layout": dataclasses.asdict(layout),
                        "arms": {arm.name: dataclasses.asdict(arm) for arm in arms},
                        "interval": "95 %, paired: Bonett-Price (shares), normal (steps)",
                    },
                    figures=figures,
                    folder=arguments.output,
                )

    spans = {
        span_of(
            length - ANSWER_TOKENS + _blocks(cell, arguments.max_blocks) * config.block_length,
            tokens,
        )
        for length in arguments.lengths
        for cell in arguments.cells
    }
    cache: DenseCache | None = DenseCache.zeros(config, arguments.rows, tokens, dtype)
    programs = warm_up(
        params,
        config,
        layout,
        arms,
        cache,
        sorted(spans),
        pool_tokens,
        is_measured=arguments.measured > 0,
    )
    print(f"{time.monotonic() - begin:6.1f} s  compiled {programs} programs", file=sys.stderr)
    planned = list(jobs_of(arguments.cells, arguments.lengths, arguments.prompts, arguments.rows))
    rounds = [number for number, _ in planned]
    saved = 0
    for number, (job, prompts) in zip(
        rounds, made_ahead([job for _, job in planned], arguments.processes), strict=True
    ):
        if time.monotonic() - begin > 60 * arguments.minutes:
            print(f"stopped after {arguments.minutes:g} minutes", file=sys.stderr)
            break
        if number > saved:
            save()
            saved = number
        start = time.monotonic()
        ids = [texts.ids(one) for one in prompts]
        ids += [ids[-1]] * (arguments.rows - len(ids))
        batch = Batch(
            params,
            config,
            layout,
            ids,
            tokens=tokens,
            pool_tokens=pool_tokens,
            max_blocks=_blocks(job.cell, arguments.max_blocks),
            cache=cache,
        )
        jax.block_until_ready(batch.cache)
        filled = time.monotonic() - start
        found = results[job.cell]
        for arm in arms:
            if arm.is_main or job.start < arguments.side_prompts:
                is_measured = number < arguments.measured and arm.source != "none"
                quality = found.quality[job.length][arm.name] if is_measured else None
                answers = batch.decode(arm, quality)[: len(prompts)]
                found.outcomes[job.length][arm.name].add(_judged(texts, prompts, answers))
                if is_measured and arm.is_main:
                    found.add_drift(job.length, arm.name, *batch.committed_error())
        cache = batch.cache
        took = time.monotonic() - start
        shares = {
            name: f"{sum(x.contained) / len(x.contained):.3f}"
            for name, x in list(found.outcomes[job.length].items())[:3]
            if x.contained
        }
        print(
            f"{time.monotonic() - begin:6.1f} s  {job.cell} {job.length} +{job.start}: "
            f"prefill {filled:.2f} s, decoding {took - filled:.2f} s, {shares}",
            file=sys.stderr,
            flush=True,
        )
    save()


def _blocks(cell: str, most: int) -> int:
    is_short = cell.startswith(SHORT_CELLS)
    return min(SHORT_BLOCKS, most) if is_short else most


def _judged(texts: Texts, prompts: list, answers: list[Answer]) -> Outcomes:
    found = Outcomes()
    for one, answer in zip(prompts, answers, strict=True):
        text = texts.text(answer.ids)
        found.contained.append(one.contained(text))
        found.exact.append(one.exact(text))
        found.steps.append(sum(answer.steps))
        found.blocks.append(len(answer.steps))
    return found
