"""Accuracy of an exported checkpoint on held-out prompts, by task and length.

`python -m examples.train_tiny.evaluate [--model assets/tiny-sdar] [--lengths 1024 8192]`
writes `accuracy.json` beside the weights. `contained`: every value asked for stands in the answer;
`exact`: the answer is one of the right ones, to the letter.
"""

import argparse
import itertools
import json
import multiprocessing
import os
import time
from pathlib import Path

import jax
import numpy as np

from examples.train_tiny import tokenizer
from examples.train_tiny.decode import generate
from examples.train_tiny.export import from_hf
from examples.train_tiny.model import Shape
from examples.train_tiny.tasks import CELLS, HELD_OUT_FILE, Prompt, held_out_prose, prompt

MANY = ("niah1", "kv", "niah1-brief", "kv-brief")  # cells of 200 prompts; the others have 64
MAX_BLOCKS = 9
_worker: dict = {}


def _make(job: tuple[str, int, int]) -> Prompt:
    if not _worker:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        _worker["tokenizer"] = tokenizer.load()
        _worker["prose"] = held_out_prose(_worker["tokenizer"])
    return prompt(*job, **_worker)


def prompts(pool, cell: str, length: int, count: int) -> list[Prompt]:
    """The cell's prompts, seeds 0 to count - 1."""
    return pool.map(_make, [(cell, length, seed) for seed in range(count)], chunksize=4)


def score(examples: list[Prompt], results: list, decode) -> dict:
    """One cell of the report."""
    texts = [decode(ids).strip() for ids, _ in results]
    contained = [p.contained(text) for p, text in zip(examples, texts, strict=True)]
    exact = [p.exact(text) for p, text in zip(examples, texts, strict=True)]
    steps = [step for _, used in results for step in used]
    tokens = sum(len(ids) + 1 for ids, _ in results)
    return {
        "n": len(examples),
        "contained": round(float(np.mean(contained)), 4),
        "exact": round(float(np.mean(exact)), 4),
        "steps_per_block": round(float(np.mean(steps)), 2),
        "tokens_per_forward": round(tokens / sum(steps), 2),
    }


def continuations(params, shape, decode, *, count: int, length: int, **options) -> dict:
    """Greedy continuations of held-out prose, with steps a token."""
    encoder = tokenizer.load()
    prose = held_out_prose(encoder)
    rng = np.random.default_rng(0)
    heads = [prose.span(rng, int(rng.integers(180, 240)))[1].tolist() for _ in range(count)]
    results = generate(params, heads, shape=shape, length=length, max_blocks=5, **options)
    steps, tokens = sum(sum(used) for _, used in results), sum(len(ids) for ids, _ in results)
    samples = [
        {"prompt": decode(head[-60:]), "text": decode(ids)}
        for head, (ids, _) in zip(heads, results, strict=True)
    ]
    return {"steps_per_token": round(steps / tokens, 3), "samples": samples[:8]}


def evaluate(folder: Path, lengths: list[int], cells: list[str], scale: float, rows: int) -> dict:
    """Every cell at every length, `scale` times the usual number of prompts."""
    shape = Shape()
    params = from_hf(folder / "model.safetensors", shape)
    decode = tokenizer.load(folder).decode
    padded = max(lengths) + 64 * -(-MAX_BLOCKS * 32 // 64)
    options = {"threshold": 0.9, "kernel": jax.default_backend() == "gpu"}
    report: dict = {"threshold": 0.9, "text": HELD_OUT_FILE.name, "block_aligned": False}
    report["cells"] = {}
    with multiprocessing.get_context("spawn").Pool(max(1, (os.cpu_count() or 2) - 1)) as pool:
        for cell, length in itertools.product(cells, lengths):
            begin = time.perf_counter()
            count = max(1, round(scale * (200 if cell in MANY else 64)))
            examples = prompts(pool, cell, length, count)
            results = []
            for at in range(0, count, rows):
                ids = [p.ids for p in examples[at : at + rows]]
                ids += [ids[-1]] * (rows - len(ids))
                results += generate(
                    params, ids, shape=shape, length=padded, max_blocks=MAX_BLOCKS, **options
                )[: count - at]
            line = score(examples, results, decode)
            report["cells"].setdefault(cell, {})[str(length)] = line
            print(f"{cell:12s} {length:6d} {time.perf_counter() - begin:6.1f} s {line}", flush=True)
    report["prose"] = continuations(params, shape, decode, count=rows, length=padded, **options)
    return report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Accuracy of an exported checkpoint on held-out prompts, by task and length."
    )
    parser.add_argument("--model", type=Path, default=tokenizer.ASSETS)
    parser.add_argument("--out", type=Path, help="default: accuracy.json in the model's folder")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192])
    parser.add_argument("--cells", nargs="+", default=list(CELLS))
    parser.add_argument("--scale", type=float, default=1.0, help="times the number of prompts")
    parser.add_argument("--rows", type=int, default=64, help="prompts decoded at once")
    arguments = parser.parse_args()
    result = evaluate(
        arguments.model, arguments.lengths, arguments.cells, arguments.scale, arguments.rows
    )
    out = arguments.out or arguments.model / "accuracy.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result["prose"], indent=1))
