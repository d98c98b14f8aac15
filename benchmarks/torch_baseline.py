"""The same dense step in torch, captured in a CUDA graph; runs in a process of its own.

What a careful program without kernels of its own does: bf16 weights with query, key and value
projections in one matrix, and gate and up in another; keys and values preallocated, the block's
own written behind them; attention by `scaled_dot_product_attention` with the query heads of a
KV head folded into the query rows; LM head and greedy proposal over a few positions at a time.
The whole step is one graph. One line of JSON a case goes to standard output.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from benchmarks.shapes import MODELS
from herald_jax.configs import ModelConfig

POSITIONS_AT_A_TIME = 256
"""Positions whose logits are held at a time, as in `decoding.head`."""

Case = tuple[int, int]
"""Rows and tokens of context."""


def parsed(words: str) -> Case:
    """A case from the command line, as in 8x32768."""
    rows, context = words.split("x")
    return int(rows), int(context)


class DenseStep:
    """One pass of a dense decoder over a block in every row."""

    def __init__(self, config: ModelConfig, device: str, dtype: Any, pool_tokens: int) -> None:
        """Draws the weights and lays out keys and values of `pool_tokens` tokens."""
        import torch

        self.torch, self.config, self.device, self.dtype = torch, config, device, dtype
        hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
        self.widths = (config.num_heads * dim, *[config.num_kv_heads * dim] * 2)

        def weight(inputs: int, outputs: int) -> Any:
            empty = torch.empty(outputs, inputs, dtype=dtype, device=device)
            return empty.normal_(std=inputs**-0.5)

        def gain(size: int) -> Any:
            return torch.ones(size, dtype=dtype, device=device)

        self.layers = [
            {
                "input_norm": gain(hidden),
                "qkv": weight(hidden, sum(self.widths)),
                "q_norm": gain(dim),
                "k_norm": gain(dim),
                "out": weight(self.widths[0], hidden),
                "post_norm": gain(hidden),
                "gate_up": weight(hidden, 2 * inner),
                "down": weight(inner, hidden),
            }
            for _ in range(config.num_layers)
        ]
        self.norm, self.embedding = gain(hidden), weight(hidden, config.vocab_size)
        tied = config.tie_word_embeddings
        self.head = self.embedding if tied else weight(hidden, config.vocab_size)
        size = pool_tokens * config.num_kv_heads * dim
        self.pools = [
            [torch.empty(size, dtype=dtype, device=device).normal_() for _ in range(2)]
            for _ in range(config.num_layers)
        ]

    def _rotate(self, x: Any, cos: Any, sin: Any) -> Any:
        first, second = x.chunk(2, dim=-1)
        turned = self.torch.cat((-second, first), dim=-1)
        return x * cos + turned * sin

    def _norm(self, x: Any, gain: Any) -> Any:
        functional = self.torch.nn.functional
        return functional.rms_norm(x, (x.shape[-1],), gain, self.config.rms_norm_eps)

    def _attention(self, layer: int, x: Any, cos: Any, sin: Any, context: int) -> Any:
        config, weights = self.config, self.layers[layer]
        functional = self.torch.nn.functional
        rows, block, _ = x.shape
        dim, kv_heads = config.head_dim, config.num_kv_heads
        q, k, v = (
            part.reshape(rows, block, -1, dim).transpose(1, 2)
            for part in functional.linear(x, weights["qkv"]).split(self.widths, dim=-1)
        )
        if config.qk_norm:
            q, k = self._norm(q, weights["q_norm"]), self._norm(k, weights["k_norm"])
        q, k = self._rotate(q, cos, sin), self._rotate(k, cos, sin)
        tokens = context + block
        keys, values = (
            pool[: rows * kv_heads * tokens * dim].view(rows, kv_heads, tokens, dim)
            for pool in self.pools[layer]
        )
        keys[:, :, context:] = k
        values[:, :, context:] = v
        folded = q.reshape(rows, kv_heads, -1, dim)
        out = functional.scaled_dot_product_attention(folded, keys, values)
        out = out.reshape(rows, config.num_heads, block, dim).transpose(1, 2)
        return functional.linear(out.reshape(rows, block, -1), weights["out"])

    def __call__(self, tokens: Any, context: int) -> list[Any]:
        """Likeliest token, confidence and entropy of every position [R, B]."""
        torch, config = self.torch, self.config
        functional = torch.nn.functional
        block = tokens.shape[1]
        positions = torch.arange(context, context + block, device=self.device)
        powers = torch.arange(0, config.head_dim, 2, device=self.device) / config.head_dim
        angles = positions[:, None] * (config.rope_theta**-powers)[None]
        cos, sin = (
            torch.cat((part, part), dim=-1).to(self.dtype) for part in (angles.cos(), angles.sin())
        )
        x = functional.embedding(tokens, self.embedding)
        for layer, weights in enumerate(self.layers):
            normed = self._norm(x, weights["input_norm"])
            x = x + self._attention(layer, normed, cos, sin, context)
            normed = self._norm(x, weights["post_norm"])
            gate, up = functional.linear(normed, weights["gate_up"]).chunk(2, dim=-1)
            x = x + functional.linear(functional.silu(gate) * up, weights["down"])
        flat = self._norm(x, self.norm).reshape(-1, x.shape[-1])
        return [
            self._propose(flat[start : start + POSITIONS_AT_A_TIME])
            for start in range(0, flat.shape[0], POSITIONS_AT_A_TIME)
        ]

    def _propose(self, hidden: Any) -> tuple[Any, Any, Any]:
        torch = self.torch
        logits = torch.nn.functional.linear(hidden, self.head).float()
        log_p = torch.log_softmax(logits, dim=-1)
        best, tokens = log_p.max(dim=-1)
        return tokens, best.exp(), -(log_p.exp() * log_p).sum(-1)


def _captured(run: Callable[[], Any], torch: Any) -> Callable[[], Any]:
    """The calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _gpu_seconds(run: Callable[[], Any], torch: Any, calls: int = 6, samples: int = 5) -> float:
    replay = _captured(run, torch)
    replay()
    times = []
    for _ in range(samples):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e-3 / calls)
    return statistics.median(times)


def _cpu_seconds(run: Callable[[], Any]) -> float:
    run()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(model: str, cases: Sequence[Case]) -> Iterator[dict[str, Any]]:
    """Rows, context, seconds of a step, device and version, for each case in turn."""
    import torch

    config = MODELS[model]
    has_gpu = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if has_gpu else ("cpu", torch.float32)
    most = max(rows * (context + config.block_length) for rows, context in cases)
    with torch.no_grad():
        step = DenseStep(config, device, dtype, most)
        for rows, context in cases:
            tokens = torch.zeros(rows, config.block_length, dtype=torch.long, device=device)

            def run(tokens: Any = tokens, context: int = context) -> Any:
                return step(tokens, context)

            seconds = _gpu_seconds(run, torch) if has_gpu else _cpu_seconds(run)
            yield {
                "rows": rows,
                "context": context,
                "seconds": seconds,
                "device": torch.cuda.get_device_name() if has_gpu else "cpu",
                "torch": torch.__version__,
            }
            if has_gpu:
                torch.cuda.empty_cache()


def in_child(model: str, cases: Sequence[Case], timeout: float) -> dict[Case, dict[str, Any]]:
    """What `measure` yields, from a process that has ended and left the GPU's memory.

    Cases that it did not reach in `timeout` seconds, or failed at, are missing; why is printed.
    """
    words = [f"{rows}x{context}" for rows, context in cases]
    command = [sys.executable, "-m", "benchmarks.torch_baseline", "--model", model, *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
        output, errors = done.stdout, done.stderr if done.returncode else ""
    except subprocess.TimeoutExpired as error:
        raw = error.stdout or b""
        output = raw.decode() if isinstance(raw, bytes) else raw
        errors = f"not done in {timeout:.0f} s"
    if errors:
        print(f"torch: {errors.strip()[-600:]}", flush=True)
    rows = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {(row["rows"], row["context"]): row for row in rows}


def main() -> None:
    """Prints one line of JSON for each case of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=sorted(MODELS), default="sdar-8b")
    parser.add_argument("cases", nargs="+", help="rows and context, as in 8x32768")
    arguments = parser.parse_args()
    for row in measure(arguments.model, [parsed(case) for case in arguments.cases]):
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
