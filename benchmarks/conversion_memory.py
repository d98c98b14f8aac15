"""Peak host memory of conversions of synthetic checkpoints of more than 2 GB.

Makes random SDAR folders in a temporary place (streamed, so that this process stays small),
converts each in a process of its own and writes one JSON record. The exit code tells whether
every peak is within its bound:

    2.5 x largest tensor in the destination dtype + 600 MB

Run from the repository root, about two minutes and 5 GB of temporary space:

    python -m benchmarks conversion_memory
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS, current_commit, write_record

BASE: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "attention_bias": False,
    "block_size": 4,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mask_token_id": 3,
    "max_position_embeddings": 32768,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "sliding_window": None,
    "tie_word_embeddings": False,
}
CASES: dict[str, tuple[dict[str, Any], str, str]] = {
    # The vocabulary of the published models: two tensors of 622 MB.
    "large-vocabulary": ({"vocab_size": 151936, "num_hidden_layers": 8}, "BF16", "bfloat16"),
    # No tensor above 134 MB, so the bound is tight.
    "small-tensors": ({"vocab_size": 32768, "num_hidden_layers": 20}, "BF16", "bfloat16"),
    # The source tensors are twice as large as those written.
    "narrowed": ({"vocab_size": 32768, "num_hidden_layers": 10}, "F32", "bfloat16"),
}
MEGABYTE = 10**6


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    table = (config["vocab_size"], hidden)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": table}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (q, hidden),
            prefix + "self_attn.k_proj.weight": (kv, hidden),
            prefix + "self_attn.v_proj.weight": (kv, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, q),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    return {**shapes, "model.norm.weight": (hidden,), "lm_head.weight": table}


def write_source(folder: Path, config: dict[str, Any], dtype: str) -> int:
    """Streams a safetensors file of random finite values; returns its size."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    width = {"BF16": 2, "F32": 4}[dtype]
    header: dict[str, Any] = {}
    end = 0
    for key, shape in tensor_shapes(config).items():
        begin, end = end, end + width * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    rng = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        while end:
            count = min(end, 16 * 2**20)
            values = rng.standard_normal(count // width, np.float32)
            raw = values.view(np.uint32)
            file.write((raw if width == 4 else (raw >> 16).astype(np.uint16)).tobytes())
            end -= count
    return (folder / "model.safetensors").stat().st_size


def convert(source: Path, target: Path, dtype: str) -> tuple[int, float]:
    """Peak resident bytes and seconds of one conversion in a process of its own."""
    command = [sys.executable, "-m", "convert", str(source), str(target), "--dtype", dtype]
    started = time.perf_counter()
    process = subprocess.Popen([*command, "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"the conversion ended with {process.returncode}")
    return usage.ru_maxrss * 1024, time.perf_counter() - started


def measure(name: str, folder: Path) -> dict[str, Any]:
    changes, source_dtype, dtype = CASES[name]
    config = BASE | changes
    size = write_source(folder / "source", config, source_dtype)
    peak, seconds = convert(folder / "source", folder / "target", dtype)
    largest = max(map(math.prod, tensor_shapes(config).values())) * {"bfloat16": 2}[dtype]
    bound = 2.5 * largest + 600 * MEGABYTE
    return {
        "case": name,
        "source_dtype": source_dtype,
        "dtype": dtype,
        "shapes": {
            key: config[key]
            for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
        },
        "source_bytes": size,
        "largest_tensor_bytes": largest,
        "peak_resident_bytes": peak,
        "bound_bytes": int(bound),
        "within_bound": peak <= bound,
        "seconds": round(seconds, 2),
    }


def main(options: argparse.Namespace) -> None:
    """Measures the cases and writes the record; exits with 1 if a bound is passed."""
    rows: list[dict[str, Any]] = []
    for name in options.case or CASES:
        with tempfile.TemporaryDirectory(dir=options.scratch) as folder:
            rows.append(measure(name, Path(folder)))
    path = write_record(
        "conversion_memory",
        commit=options.commit or current_commit(),
        shapes={row["case"]: row.pop("shapes") for row in rows},
        settings={
            "bound": "2.5 x largest tensor in the destination dtype + 600 MB",
            "host": {
                "machine": platform.machine(),
                "system": platform.system(),
                "cpus": os.cpu_count(),
                "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
            },
            "orbax": metadata.version("orbax-checkpoint"),
        },
        figures={row.pop("case"): row for row in rows},
        folder=options.output,
    )
    print(path.read_text(encoding="utf-8"), end="")
    if not all(row["within_bound"] for row in rows):
        sys.exit(1)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--case", choices=CASES, action="append", help="default: all")
    parser.add_argument("--scratch", type=Path, help="where to make the temporary folders")
    parser.add_argument("--commit", help="commit to record where there is no git checkout")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the record")
