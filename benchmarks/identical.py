"""Share of texts that stay the same, whatever else the engine does meanwhile.

In fp32 on a CPU they all do, which tests show. In bf16 on a GPU a product of another shape may
be summed in another order, and a decision whose margin is below that rounding falls otherwise; from
there on the text is another one. Here the tiny model decodes the same prompts alone, in batches,
after preemptions, with and without prefix reuse, and in both placements at a budget of the whole
prefix, and the texts are compared with those of the arm that is named as reference.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.accuracy.prompts import Job, Texts, made_ahead
from benchmarks.record import RESULTS, current_commit, write_record
from herald_jax import CacheConfig, SamplingParams
from herald_jax.cache.layout import kv_bytes_per_token
from herald_jax.engine import slot_runner, sparse_runner
from herald_jax.engine.slot_arrays import row_bucket
from herald_jax.llm import LLM
from herald_jax.model_source import find_checkpoint

ROWS = 16
CELLS = ("niah1", "kv", "list", "story")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
    """One way to decode the prompts.

    Attributes:
        name: What the record calls it.
        reference: The arm whose texts it should have; its own name for a reference.
        settings: Of the engine, beside the shared ones.
        is_alone: True to put in one prompt at a time.
        is_sampled: True to sample with a seed instead of greedily.
        has_prefix: True to put one document before all prompts.
        has_own_bucket: True to let the number of rows choose the program; else all rows' runs.
    """

    name: str
    reference: str
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    is_alone: bool = False
    is_sampled: bool = False
    has_prefix: bool = False
    has_own_bucket: bool = False


def arms(pool_bytes: int) -> list[Arm]:
    """All arms; a reference comes before what is compared with it."""
    off = {"share_prefixes": False}
    whole = {"budget": 1.0, "dense_layers": 1}
    return [
        Arm(name="alone", reference="alone", settings=off, is_alone=True),
        Arm(name="batch", reference="alone", settings=off),
        Arm(name="preempted", reference="alone", settings={**off, "kv_cache_bytes": pool_bytes}),
        Arm(
            name="sampled alone",
            reference="sampled alone",
            settings=off,
            is_alone=True,
            is_sampled=True,
        ),
        Arm(name="sampled batch", reference="sampled alone", settings=off, is_sampled=True),
        Arm(name="prefix apart", reference="prefix apart", settings=off, has_prefix=True),
        Arm(name="prefix shared", reference="prefix apart", has_prefix=True),
        Arm(
            name="alone, program of one row",
            reference="alone",
            settings=off,
            is_alone=True,
            has_own_bucket=True,
        ),
        Arm(
            name="device, whole budget",
            reference="alone",
            settings={"cache": CacheConfig(placement="device", **whole)},
        ),
        Arm(
            name="host, whole budget",
            reference="device, whole budget",
            settings={"cache": CacheConfig(placement="host", **whole)},
        ),
    ]


def decode(llm: LLM, prompts: list[list[int]], arm: Arm, new_tokens: int) -> list[list[int]]:
    """The ids of every prompt."""
    sampling = [
        SamplingParams(
            max_tokens=new_tokens,
            ignore_eos=True,
            seed=number,
            temperature=0.8 if arm.is_sampled else 0.0,
        )
        for number in range(len(prompts))
    ]
    batches = (
        [([prompt], [one]) for prompt, one in zip(prompts, sampling, strict=True)]
        if arm.is_alone
        else [(prompts, sampling)]
    )
    outputs = [output for batch in batches for output in llm.generate(*batch)]
    return [output.outputs[0].token_ids for output in outputs]


def compared(texts: list[list[int]], reference: list[list[int]]) -> dict[str, float]:
    """Share of equal texts, and of tokens before the first that differs."""
    pairs = list(zip(texts, reference, strict=True))
    leading = [
        next((at for at, (a, b) in enumerate(zip(*pair, strict=True)) if a != b), len(pair[0]))
        for pair in pairs
    ]
    return {
        "share_identical": float(np.mean([one == other for one, other in pairs])),
        "share_of_tokens_before_a_difference": float(sum(leading) / sum(map(len, texts))),
    }


def main(arguments: argparse.Namespace) -> None:
    """Runs the arms in their order and writes the record anew behind each of them."""
    begin = time.perf_counter()
    folder, config = find_checkpoint(arguments.model, dtype=arguments.dtype)
    count = -(-arguments.prompts // len(CELLS))
    jobs = [Job(cell, arguments.length, 0, count) for cell in CELLS]
    own = Texts(Path(folder))
    prompts = [own.ids(one)[-arguments.length :] for _, made in made_ahead(jobs, 0) for one in made]
    prompts = prompts[: arguments.prompts]
    prefixed = [prompts[0] + prompt for prompt in prompts]
    longest = 2 * arguments.length + arguments.new_tokens
    shared = {"max_model_len": -(-longest // 64) * 64, "max_num_seqs": ROWS}
    # Room for the prompts of all rows, but not for all that they will generate.
    tokens = ROWS * (arguments.length + arguments.new_tokens // 3)
    itemsize = 2 if arguments.dtype == "bfloat16" else 4
    pool_bytes = max(tokens, longest + 64) * kv_bytes_per_token(config, itemsize)
    engines: dict[str, LLM] = {}
    texts: dict[str, list[list[int]]] = {}
    figures: dict[str, Any] = {}
    for arm in arms(pool_bytes):
        if arguments.arms and arm.name not in arguments.arms:
            continue
        if time.perf_counter() - begin > arguments.seconds or arm.reference not in (
            *texts,
            arm.name,
        ):
            print(f"{arm.name}: left out, --seconds {arguments.seconds} are over", flush=True)
            continue
        # Programs are the same in all arms but one, so that shapes alone change no text.
        bucket = row_bucket if arm.has_own_bucket else lambda rows, limit: limit
        slot_runner.row_bucket = sparse_runner.row_bucket = bucket
        key = repr((arm.settings, arm.has_own_bucket))
        if key not in engines:
            engines.clear()  # its memory first
            engines[key] = LLM(arguments.model, dtype=arguments.dtype, **shared, **arm.settings)
        llm = engines[key]
        chosen = prefixed if arm.has_prefix else prompts
        before = dataclasses.replace(llm.engine.scheduler.counts)
        started = time.perf_counter()
        texts[arm.name] = decode(llm, chosen, arm, arguments.new_tokens)
        after = llm.engine.scheduler.counts
        figures[arm.name] = row = {
            "reference": arm.reference,
            **compared(texts[arm.name], texts[arm.reference]),
            "preemptions": after.preempted - before.preempted,
            "reused_tokens": after.reused_tokens - before.reused_tokens,
            "seconds": time.perf_counter() - started,
        }
        print(
            f"{arm.name:>26} as {arm.reference}: {row['share_identical']:.3f} identical, "
            f"{row['share_of_tokens_before_a_difference']:.3f} of tokens before a difference, "
            f"{row['preemptions']} preemptions, {row['reused_tokens']} tokens reused, "
            f"{row['seconds']:.1f} s, {time.perf_counter() - begin:.0f} s so far",
            flush=True,
        )
        write_record(
            f"identical_{Path(arguments.model).name}",
            commit=arguments.commit or current_commit(),
            shapes={
                "model": Path(arguments.model).name,
                "dtype": arguments.dtype,
                "rows": ROWS,
                "block_length": config.block_length,
                "prompt_tokens": arguments.length,
            },
            settings={
                "prompts": len(prompts),
                "new_tokens": arguments.new_tokens,
                "cells": CELLS,
                "threshold": SamplingParams().threshold,
                "sampled_temperature": 0.8,
            },
            figures=figures,
            folder=arguments.output,
        )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--model", default="assets/tiny-sdar", help="folder of the model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--arms", nargs="+", help="only these, references included")
    parser.add_argument("--length", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--new-tokens", type=int, default=160)
    parser.add_argument("--seconds", type=float, default=600, help="begin no arm after these")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the records")
