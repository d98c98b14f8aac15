"""The smaller kernels: importance of keys, rows to and from host memory, fused heads, LM head."""

from __future__ import annotations

import concurrent.futures
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import SingleDeviceSharding

import pallas_kernels
from benchmarks.shapes import MODELS
from benchmarks.timing import seconds_per_call
from herald_jax.decoding import head
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.sampling import SamplingParams
from pallas_kernels import HeadNorms, Segment, reference
from pallas_kernels.hopper import skinny_matmul

BLOCK = 32
EPSILON = 1e-6


class Figures(NamedTuple):
    """One record."""

    name: str
    shapes: dict[str, Any]
    figures: dict[str, float]


class Sizes(NamedTuple):
    """What the parts are measured at; `toy` is for a CPU."""

    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    contexts: tuple[tuple[int, int], ...] = ((8, 32768),)
    rows: tuple[int, ...] = (1, 4, 16)
    head_rows: tuple[int, ...] = (1, 8, 32)
    pool_megabytes: int = 512
    gathered: tuple[int, ...] = (16, 64, 128)
    model: str = "sdar-8b"
    weights: tuple[tuple[int, int], ...] = ((4096, 12288), (4096, 4096), (12288, 4096))
    product_rows: tuple[int, ...] = (32, 128)


FULL = Sizes()

QUICK = FULL._replace(rows=(1, 16), head_rows=(8, 32), gathered=(64, 128), product_rows=(32,))

TOY = Sizes(6, 2, 64, ((2, 96), (3, 32)), (1, 3), (1, 20), 4, (1, 2), "toy", ((128, 192),), (32,))

SIZES = {"full": FULL, "quick": QUICK, "toy": TOY}


@functools.partial(jax.jit, static_argnums=(1, 2))
def draw(seed: int, shape: tuple[int, ...], dtype: Any = jnp.bfloat16) -> jax.Array:
    """Standard normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape, dtype)


def compile_together(programs: dict[str, Any]) -> dict[str, Any]:
    """Lowered programs, compiled at the same time: most of it is outside Python."""
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        return dict(
            zip(programs, pool.map(lambda each: each.compile(), programs.values()), strict=True)
        )


def loop_of(body: Callable[..., Any], calls: int, start: Any, *fixed: Any) -> Any:
    """A lowered program of `calls` rounds, each of which takes over the result of the last.

    What does not change is `fixed` and not closed over: a program would hold it as constants.
    """
    program = jax.jit(
        lambda x, *fixed: lax.fori_loop(0, calls, lambda _, x: body(x, *fixed), x),
        donate_argnums=0,
    )
    return program.lower(start, *fixed)


def loop_seconds(program: Any, calls: int, start: Any, *fixed: Any) -> float:
    """Seconds of one of the `calls` rounds of a compiled `loop_of`."""
    holder = [start]

    def run() -> Any:
        holder[0] = program(holder[0], *fixed)
        return holder[0]

    return seconds_per_call(run, 2, samples=3) / calls


def importance(sizes: Sizes) -> Iterator[Figures]:
    """Attention with its log-sum-exp, then the importance of every key of the prefix."""

    def attend(q: jax.Array, _: jax.Array, segment: Segment) -> jax.Array:
        out, lse = pallas_kernels.segment_attention(q, [segment], True)
        return out + lse[..., None].astype(out.dtype) * 1e-3

    def score(form: Any, q: jax.Array, lse: jax.Array, segment: Segment) -> jax.Array:
        return q + form.key_importance(q, lse, segment, "max").max().astype(q.dtype)

    for rows, tokens in sizes.contexts:
        q = draw(0, (rows, BLOCK, sizes.heads, sizes.dim))
        k, v = (draw(i, (rows, sizes.kv_heads, tokens, sizes.dim)) for i in (1, 2))
        index, lengths = jnp.arange(rows, dtype=jnp.int32), jnp.full((rows,), tokens, jnp.int32)
        fixed = jnp.full(q.shape[:3], 10.0, jnp.float32), Segment(k, v, index, lengths)
        figures = {"bytes": float(k.nbytes)}
        bodies = {
            "importance": functools.partial(score, pallas_kernels),
            "attention_with_lse": attend,
            "plain_importance": functools.partial(score, reference),
        }
        programs = {name: loop_of(body, 5, q, *fixed) for name, body in bodies.items()}
        for name, program in compile_together(programs).items():
            figures[f"{name}_us"] = 1e6 * loop_seconds(program, 5, q + 0, *fixed)
        shapes = {"rows": rows, "tokens": tokens, "pooling": "max"}
        yield Figures(f"importance_r{rows}_s{tokens}", shapes, figures)


def gather(sizes: Sizes) -> Iterator[Figures]:
    """Rows from the device and from host memory, beside one contiguous copy of 256 MB."""
    device = jax.devices()[0]
    host = SingleDeviceSharding(device, memory_kind="pinned_host")
    # Without the name of the memory nothing would be copied.
    on_device = SingleDeviceSharding(device, memory_kind="device")
    row_bytes = 2 * sizes.dim
    entries = sizes.pool_megabytes * 10**6 // (sizes.kv_heads * row_bytes)
    pool = draw(0, (1, sizes.kv_heads, entries, sizes.dim))
    pinned = jax.block_until_ready(jax.device_put(pool, host))
    large = jax.block_until_ready(jax.device_put(draw(2, (sizes.pool_megabytes * 250_000,)), host))
    run = jax.jit(pallas_kernels.gather_rows)
    row = jnp.zeros((1,), jnp.int32)
    for megabytes in sizes.gathered:
        count = megabytes * 10**6 // (sizes.kv_heads * row_bytes)
        index = jax.random.randint(jax.random.key(1), (1, sizes.kv_heads, count), 0, entries)
        moved = count * sizes.kv_heads * row_bytes
        # The copy is measured beside each size, because the link is shared.
        copy = large.nbytes / seconds_per_call(lambda: jax.device_put(large, on_device), 2)
        figures = {
            "bytes": float(moved),
            "copy_bytes_per_second": copy,
            "copied_bytes": large.nbytes,
        }
        places = {"device": pool} if device.platform == "cpu" else {"device": pool, "host": pinned}
        for name, source in places.items():
            seconds = seconds_per_call(lambda: run(source, row, index), 3)  # noqa: B023
            figures[f"{name}_bytes_per_second"] = moved / seconds
        if "host_bytes_per_second" in figures:
            figures["share_of_copy"] = figures["host_bytes_per_second"] / copy
        yield Figures(f"gather_rows_{megabytes}mb", {"row_bytes": row_bytes}, figures)


def append(sizes: Sizes) -> Iterator[Figures]:
    """A block of many slots into a donated pool, on the device and in host memory."""
    device = jax.devices()[0]
    slots, tokens = 4 * max(sizes.rows), 1024
    new = draw(1, (slots, sizes.kv_heads, BLOCK, sizes.dim))
    rows = jnp.arange(slots, dtype=jnp.int32)
    starts = (rows * 37) % (tokens - BLOCK)
    figures = {"bytes": float(new.nbytes)}
    for place in ("device",) if device.platform == "cpu" else ("device", "pinned_host"):
        sharding = SingleDeviceSharding(device, memory_kind=None if place == "device" else place)
        run = jax.jit(pallas_kernels.append_kv, donate_argnums=0, out_shardings=sharding)
        start = draw(0, (slots, sizes.kv_heads, tokens, sizes.dim))
        holder = [jax.block_until_ready(jax.device_put(start, sharding, may_alias=False))]
        before = holder[0].unsafe_buffer_pointer()

        def call(holder: list[jax.Array] = holder, run: Any = run) -> jax.Array:
            holder[0] = run(holder[0], new, rows, starts)
            return holder[0]

        seconds = seconds_per_call(call, 5)
        figures[f"{place}_us"] = 1e6 * seconds
        figures[f"{place}_bytes_per_second"] = new.nbytes / seconds
        figures[f"{place}_stays_in_place"] = float(before == holder[0].unsafe_buffer_pointer())
    yield Figures("append_kv", {"slots": slots, "block_length": BLOCK}, figures)


def fused(sizes: Sizes) -> Iterator[Figures]:
    """Norm, rotation and append of one layer, fused by hand and by the compiler."""
    for rows in sizes.rows:
        shape = (rows, BLOCK, sizes.heads, sizes.dim)
        q, k, v = (
            draw(i, (*shape[:2], n, sizes.dim))
            for i, n in enumerate((shape[2], *[sizes.kv_heads] * 2))
        )
        norms = HeadNorms(draw(5, (sizes.dim,)), draw(6, (sizes.dim,)), EPSILON)
        angles = draw(7, (rows, BLOCK, sizes.dim // 2), jnp.float32)
        index = jnp.arange(rows, dtype=jnp.int32)
        fixed = (k, v, norms.q, norms.k, jnp.cos(angles), jnp.sin(angles), index)

        def append_to(form: Any, carry: tuple, k: Any, v: Any, *rest: jax.Array) -> tuple:
            q, k_pool, v_pool = carry
            q_gain, k_gain, cos, sin, index = rest
            norms = HeadNorms(q_gain, k_gain, EPSILON)
            inputs: Any = (q, k, v, norms, cos, sin, k_pool, v_pool, index, index * 8)
            return form.fused_qkv_rope_append(*inputs)

        def start(rows: int = rows, q: jax.Array = q) -> tuple:
            pools = [draw(i, (rows, sizes.kv_heads, 4096, sizes.dim)) for i in (8, 9)]
            return (q + 0, *pools)

        programs = {
            name: loop_of(functools.partial(append_to, form), 20, start(), *fixed)
            for name, form in (("kernel", pallas_kernels), ("compiled", reference))
        }
        figures = {"bytes": 2.0 * (q.nbytes + k.nbytes + v.nbytes)}
        for name, program in compile_together(programs).items():
            figures[f"{name}_us"] = 1e6 * loop_seconds(program, 20, start(), *fixed)
        shapes = {"rows": rows, "block_length": BLOCK}
        yield Figures(f"fused_qkv_rope_append_m{rows * BLOCK}", shapes, figures)


def lm_head(sizes: Sizes) -> Iterator[Figures]:
    """LM head and proposal of a step: all rows at once, and in parts as the step does it."""
    config = MODELS[sizes.model]
    table = draw(0, (config.hidden_size, config.vocab_size)) * (3 * config.hidden_size**-0.5)
    for rows in sizes.head_rows:
        hidden = draw(1, (rows, BLOCK, config.hidden_size))
        sampling = [SamplingParams()] * rows
        options = decoding_options(sampling, range(rows), config)
        numbers = (options.seeds, jnp.zeros((rows,), jnp.int32), jnp.zeros((rows,), jnp.int32))

        def logits(table: jax.Array, hidden: jax.Array) -> jax.Array:
            return jnp.einsum("rqe,ev->rqv", hidden, table, preferred_element_type=jnp.float32)

        figures: dict[str, float] = {"weight_bytes": float(table.nbytes)}
        results: dict[str, Any] = {}
        lowered: dict[str, Any] = {}
        forms = {"at_once": rows * BLOCK, "in_parts": head.MAX_POSITIONS}
        for name, most in forms.items():
            before, head.MAX_POSITIONS = head.MAX_POSITIONS, most

            def run(table: Any, hidden: Any, options: Any = options, numbers: Any = numbers) -> Any:
                of_hidden = functools.partial(logits, table)
                spec = proposal_spec([SamplingParams()])
                return head.propose_blocks(of_hidden, config, hidden, options.rows, spec, *numbers)

            lowered[name] = jax.jit(run).lower(table, hidden)
            head.MAX_POSITIONS = before
        fits = jax.default_backend() == "gpu" and rows * BLOCK <= skinny_matmul.MAX_ROWS
        if fits:
            ids = config.mask_token_id, config.tokenizer_vocab_size or config.vocab_size
            programs = jax.devices()[0].core_count
            of_rows = functools.partial(
                skinny_matmul.greedy_head, mask_id=ids[0], end=ids[1], programs=programs
            )
            fused = jax.jit(lambda w, x, of_rows=of_rows: of_rows(x.reshape(-1, x.shape[-1]), w))
            lowered["kernel"] = fused.lower(table, hidden)
        for name, program in compile_together(lowered).items():
            memory: Any = program.memory_analysis()
            results[name] = jax.device_get(program(table, hidden))
            seconds = seconds_per_call(lambda: program(table, hidden), 5)  # noqa: B023
            figures |= {f"{name}_us": 1e6 * seconds, f"{name}_bytes": memory.temp_size_in_bytes}
        first = results["at_once"]
        same = np.array_equal(first.tokens, results["in_parts"].tokens)
        figures["same_tokens"] = float(same)
        if fits:
            got = results["kernel"]
            figures |= {
                "kernel_other_tokens": float((got.token != first.tokens.reshape(-1)).sum()),
                "kernel_logprob_error": _largest(got.logprob, first.logprob),
                "kernel_entropy_error": _largest(got.entropy, first.entropy),
            }
        yield Figures(f"lm_head_m{rows * BLOCK}", {"rows": rows, "block_length": BLOCK}, figures)


def _largest(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want.reshape(got.shape)).max())


def skinny(sizes: Sizes) -> Iterator[Figures]:
    """Products of few rows with weights, one after another, by the kernel and by the compiler."""
    programs = jax.devices()[0].core_count if jax.default_backend() == "gpu" else 2
    for inner, columns in sizes.weights:
        # More weights than the L2 cache holds, each read once.
        count = max(4, 400_000_000 // (2 * inner * columns)) if sizes.dim == 128 else 2
        weights = [draw(i, (inner, columns)) * inner**-0.5 for i in range(count)]
        for rows in sizes.product_rows:
            x = draw(99, (rows, inner))

            def chain(product: Any, x: jax.Array, weights: list[jax.Array]) -> jax.Array:
                for w in weights:
                    x = x + product(x, w)[:, :1] * 1e-6
                return x

            kernel = functools.partial(skinny_matmul.matmul, programs=programs)
            figures = {"bytes": 2.0 * inner * columns}
            whole = skinny_matmul.cut_for(rows, inner, columns, programs, (128, 64), (1,))
            forms = {
                "compiled": jnp.matmul,
                "kernel": kernel,
                "kernel_unsplit": functools.partial(kernel, cut=whole),
            }
            lowered = {}
            for name, product in forms.items():
                if name == "compiled" or jax.default_backend() == "gpu":
                    run = jax.jit(functools.partial(chain, product))
                    lowered[name] = run.lower(x, weights)
                    lowered[f"{name}_once"] = jax.jit(product).lower(x, weights[0])
            programs_of = compile_together(lowered)
            want = np.asarray(programs_of["compiled_once"](x, weights[0]), np.float32)
            for name in forms:
                if name not in programs_of:
                    continue
                run = programs_of[name]
                seconds = seconds_per_call(lambda: run(x, weights), 3) / count  # noqa: B023
                got = np.asarray(programs_of[f"{name}_once"](x, weights[0]), np.float32)
                figures |= {
                    f"{name}_us": 1e6 * seconds,
                    f"{name}_bytes_per_second": figures["bytes"] / seconds,
                    f"{name}_difference": _largest(got, want),
                }
            shapes = {"rows": rows, "inner": inner, "columns": columns}
            yield Figures(f"skinny_m{rows}_{inner}x{columns}", shapes, figures)


PARTS: dict[str, Callable[[Sizes], Iterator[Figures]]] = {
    "gather": gather,
    "head": lm_head,
    "append": append,
    "skinny": skinny,
    "importance": importance,
    "fused": fused,
}


def measure(name: str, sizes: Sizes, seconds: float = 300.0) -> Iterator[Figures]:
    """The records of a part, printed as they come; a failure is printed and ends the part.

    After `seconds` no further row is begun.
    """
    begin = time.perf_counter()
    print(f"{name} ...", flush=True)
    try:
        for row in PARTS[name](sizes):
            shown = {key: float(f"{value:.4g}") for key, value in row.figures.items()}
            print(f"{row.name}: {shown} ({time.perf_counter() - begin:.0f} s)", flush=True)
            yield row
            if time.perf_counter() - begin > seconds:
                print(f"{name}: no more rows after {seconds:.0f} s", flush=True)
                break
    except Exception as error:  # one part that fails must not end the run
        print(f"{name}: {type(error).__name__}: {str(error)[:600]}", flush=True)
