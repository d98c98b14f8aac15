"""What fits, what binds, and how fast decoding will be; plain arithmetic, nothing runs.

Bytes come from the functions that size the engine, so they are what it will allocate. Times
follow from the rates of a `Machine`. A row's cycle is one block: its denoising passes and the
commit pass. With finished blocks on the host three things repeat once a block and row, each on
a resource of its own, and the slowest sets the pace of all rows together:

- the device's passes, for all rows at once;
- the host's scan, choice and gather, one row after the other;
- the link, one row after the other.

A row alone also waits from its lookahead, in the second pass, until its pool is there.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from herald_jax._checks import ConfigError, require_int
from herald_jax.cache.budget import BlockCounts
from herald_jax.cache.layout import kv_bytes_per_token, round_up
from herald_jax.cache.shape import PASSES_UNDER_WAY, SparseShape
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.engine.config import PAGE_TOKENS
from herald_jax.engine.sparse_sizes import SLOTS_PER_ROW, sparse_shape
from herald_jax.machine import Machine
from herald_jax.pass_times import pass_seconds
from herald_jax.retrieval.queries import query_positions
from herald_jax.retrieval.select import column_group
from herald_jax.settings import PINNED_LIMIT_VARIABLE

MOST_ROWS = 4096
"""Rows beyond which no plan looks."""

SCORE_BYTES = 6 * 4
"""Bytes that a device reads and writes for one key's fp32 score by one column."""

CHOOSE_SECONDS = 9.3e-11
"""A device's time to find the best entries, for each key of one layer's KV head."""

BUBBLES = 1
"""Passes that a row without lookahead idles at a block's end: the host learns of it that late."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is to be decoded.

    Attributes:
        model: The model.
        context: Tokens of a row, prompt and generation together.
        steps: Denoising passes of a block; the commit pass comes on top.
        itemsize: Bytes of a weight and of a cached number.
    """

    model: ModelConfig
    context: int
    steps: int = 20
    itemsize: int = 2

    def __post_init__(self) -> None:
        """Checks the sizes."""
        require_int("context", self.context, self.model.block_length)
        require_int("steps", self.steps, 1)
        require_int("itemsize", self.itemsize, 1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanTimes:
    """Predicted seconds of one block of all rows.

    Attributes:
        step: One denoising pass.
        main: All passes of a block, with nothing to wait for.
        host: Scan, choice and gather of all rows; 0 without host memory.
        link: Entries of all rows on their way to the device, through the staging buffers.
        alone: A block of a row that has the host to itself.
        bytes_scanned: Keys that one row's scan reads.
        bytes_sent: Entries of one row.
    """

    step: float
    main: float
    host: float = 0.0
    link: float = 0.0
    alone: float = 0.0
    bytes_scanned: int = 0
    bytes_sent: int = 0

    @property
    def block(self) -> float:
        """Seconds from one block of a row to the next."""
        return max(self.main, self.host, self.link, self.alone)

    @property
    def binding(self) -> str:
        """What sets the pace."""
        times = {
            "device time": self.main,
            "host scan": self.host,
            "link": self.link,
            "a row's own retrieval": self.alone,
        }
        return max(times, key=lambda name: times[name])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One placement with so many rows.

    Attributes:
        name: `dense`, or the pair of placement and lookahead.
        cache: The cache; `None` if all keys and values stay on the device and are attended.
        rows: Rows.
        most_rows: Rows for which there would be memory, by what bounds them.
        device_bytes: Bytes of the device's cache.
        host_bytes: Pinned bytes.
        times: Predicted times.
        tokens_per_second: Predicted rate of all rows together.
    """

    name: str
    cache: CacheConfig | None
    rows: int
    most_rows: dict[str, int]
    device_bytes: int
    host_bytes: int
    times: PlanTimes
    tokens_per_second: float

    @property
    def binding(self) -> str:
        """What keeps the rate from rising: a full memory, or the resource that sets the pace."""
        full = [name for name, rows in self.most_rows.items() if rows == self.rows]
        if full and self.times.binding == "device time":
            return full[0]
        return self.times.binding


def placement_name(cache: CacheConfig | None) -> str:
    """`dense`, or the pair of placement and lookahead."""
    if cache is None:
        return "dense"
    name = f"{cache.placement}, {'lookahead' if cache.lookahead else 'exact first step'}"
    return name if cache.key_index == "none" else f"{name}, {cache.key_index} index"


@functools.lru_cache(maxsize=64)  # a budget looks at every block of the context
def _shape_of_a_row(cache: CacheConfig, model: ModelConfig, context: int) -> SparseShape:
    return sparse_shape(cache, model, 1, context)


def cache_bytes(work: Workload, cache: CacheConfig | None, rows: int) -> tuple[int, int]:
    """Device and host bytes of the cache of an engine with so many rows."""
    model = work.model
    if cache is None:
        tokens = round_up(work.context, round_up(PAGE_TOKENS, model.block_length))
        return rows * tokens * kv_bytes_per_token(model, work.itemsize), 0
    one = _shape_of_a_row(cache, model, work.context)
    shape = dataclasses.replace(one, rows=rows, num_pages=rows * one.num_pages)
    return shape.device_bytes(model, work.itemsize), shape.host_bytes(model, work.itemsize)


def most_rows(
    work: Workload, cache: CacheConfig | None, device_bytes: int, host_bytes: int
) -> dict[str, int]:
    """Most rows that each memory has room for; those that bound nothing are left out."""
    bounds = {}
    for at, (name, limit) in enumerate(
        (("device bytes", device_bytes), ("host bytes", host_bytes))
    ):
        if not cache_bytes(work, cache, 1)[at]:
            continue
        low, high = 0, MOST_ROWS
        while low < high:
            middle = (low + high + 1) // 2
            fits = cache_bytes(work, cache, middle)[at] <= limit
            low, high = (middle, high) if fits else (low, middle - 1)
        bounds[name] = low
    return bounds


def _counts(work: Workload, cache: CacheConfig) -> BlockCounts:
    block = work.model.block_length
    return cache.budget_of(block).counts(max(work.context // block - 1, 0))


def block_times(
    work: Workload, cache: CacheConfig | None, rows: int, machine: Machine | None = None
) -> PlanTimes:
    """Predicted times of one block near the end of the context.

    Args:
        work: What is decoded.
        cache: The cache; `None` for the dense one.
        rows: Rows.
        machine: Rates; the defaults if left out.
    """
    machine = machine or Machine()
    model, itemsize = work.model, work.itemsize
    layers = model.num_layers
    token = 2 * model.num_kv_heads * model.head_dim * itemsize  # keys and values of a layer
    full = rows * work.context * token

    def seconds(attended: float, pooled: float = 0, blocks: int = rows) -> float:
        return pass_seconds(
            model,
            machine,
            itemsize,
            blocks=blocks,
            attended_bytes=attended,
            pooled_bytes=pooled,
            proposed=rows,
        )

    if cache is None:
        step = seconds(layers * full)
        return PlanTimes(step=step, main=(work.steps + 1) * step)
    counts = _counts(work, cache)
    sparse = layers - cache.dense_layers
    attended = (cache.dense_layers * full, sparse * rows * counts.attended * token)
    step = seconds(*attended)
    if cache.lookahead:
        wide, pooled = (SLOTS_PER_ROW * part for part in attended)
        fused = seconds(wide, pooled, SLOTS_PER_ROW * rows)
        main = work.steps * step + fused
        if cache.retrieval == "layerwise" and cache.placement == "device":
            main += seconds(layers * full) - step
    elif cache.placement == "device":
        main = (work.steps + BUBBLES) * step + seconds(layers * full)
    else:
        fetched = sparse * work.context * token / machine.fetch_bytes_per_second
        one = pass_seconds(model, machine, itemsize, blocks=1, attended_bytes=layers * full / rows)
        main = (work.steps + BUBBLES) * step + rows * (one + fetched)
        return PlanTimes(step=step, main=main, bytes_sent=sparse * work.context * token)
    has_index = cache.key_index != "none"
    if cache.placement == "device" or has_index:
        main += _device_choice(work, cache, rows, machine)
        if cache.placement == "device":
            return PlanTimes(step=step, main=main)
    keys = 0 if has_index else sparse * work.context * token // 2
    pooled = sparse * counts.pooled * token
    shape = _shape_of_a_row(cache, model, work.context)
    shape = dataclasses.replace(shape, rows=rows)
    chunks = -(-sparse // shape.staging_layers(model, itemsize))
    # A buffer is used once in the passes that its copy waits for.
    turns = chunks * PASSES_UNDER_WAY / shape.staging_slots(model, itemsize)
    host = pooled / machine.gather_bytes_per_second + _host_choice(work, cache, keys, machine)
    link = pooled / machine.link_bytes_per_second
    return PlanTimes(
        step=step,
        main=main,
        host=rows * host,
        link=rows * max(link, turns * step),
        alone=step + (main - work.steps * step) + max(host, turns * step),
        bytes_scanned=keys,
        bytes_sent=pooled,
    )


def _columns(model: ModelConfig, cache: CacheConfig) -> int:
    positions = query_positions(cache.selection_query, model.block_length)
    return len(positions) * column_group(cache.selection, model.num_heads, model.num_kv_heads)


def _host_choice(work: Workload, cache: CacheConfig, keys: int, machine: Machine) -> float:
    """Seconds of choosing one row's entries from so many bytes of keys on the host."""
    model, sparse = work.model, work.model.num_layers - cache.dense_layers
    if not keys:
        return 0.0
    rate = machine.scan_bytes_per_second
    seconds = keys / (rate * min(1.0, machine.scan_columns / _columns(model, cache)))
    seconds += sparse * model.num_kv_heads * work.context / machine.choose_keys_per_second
    if cache.retrieval == "layerwise":  # values are read as well, and masks walk through the layers
        seconds += keys / rate + pass_seconds(
            model, machine, work.itemsize, blocks=1, attended_bytes=0, proposed=0
        )
    return seconds


def _device_choice(work: Workload, cache: CacheConfig, rows: int, machine: Machine) -> float:
    """Seconds of selecting for all rows from keys, or their index, on the device."""
    model = work.model
    keys = (model.num_layers - cache.dense_layers) * rows * model.num_kv_heads * work.context
    read = work.itemsize if cache.key_index == "none" else 1
    moved = read * model.head_dim + SCORE_BYTES * _columns(model, cache)
    return keys * (moved / machine.device_bytes_per_second + CHOOSE_SECONDS)


def plan_rows(
    work: Workload,
    cache: CacheConfig | None,
    *,
    device_bytes: int,
    host_bytes: int,
    rows: int | None = None,
    machine: Machine | None = None,
) -> Plan:
    """The plan of a placement with `rows` rows, or with those that are predicted to be fastest.

    Args:
        work: What is decoded.
        cache: The cache; `None` for the dense one.
        device_bytes: Bytes that the device has for the cache.
        host_bytes: Bytes that may be pinned.
        rows: Rows.
        machine: Rates; the defaults if left out.

    Raises:
        ConfigError: If there is no room, with the number to change.
    """
    if cache is not None:
        cache.check(work.model)
    bounds = most_rows(work, cache, device_bytes, host_bytes)
    wanted = 1 if rows is None else rows
    for name, most in bounds.items():
        if most < wanted:
            raise ConfigError(_refusal(work, cache, name, wanted, most, device_bytes, host_bytes))

    def rate(count: int) -> float:
        times = block_times(work, cache, count, machine)
        return count * work.model.block_length / times.block

    if rows is None:
        # More rows are worth their memory only for a rate that is higher by more than noise.
        rates = {count: rate(count) for count in _candidates(min(bounds.values()))}
        best = max(rates.values())
        rows = min(count for count, found in rates.items() if found >= 0.998 * best)
    device, host = cache_bytes(work, cache, rows)
    return Plan(
        name=placement_name(cache),
        cache=cache,
        rows=rows,
        most_rows=bounds,
        device_bytes=device,
        host_bytes=host,
        times=block_times(work, cache, rows, machine),
        tokens_per_second=rate(rows),
    )


def _candidates(most: int) -> Sequence[int]:
    return range(1, most + 1)


def _refusal(
    work: Workload,
    cache: CacheConfig | None,
    name: str,
    rows: int,
    most: int,
    device_bytes: int,
    host_bytes: int,
) -> str:
    at, have = (0, device_bytes) if name == "device bytes" else (1, host_bytes)
    need = cache_bytes(work, cache, rows)[at]
    option = f"--{name.replace(' ', '-')}"
    fix = f"Raise {option} to {need}"
    fix += f", lower rows to {most}" if most else ", shorten the context"
    if cache is not None and at == 0:
        fix += ", lower the cache's budget or dense_layers"
        fix += ", or take placement='host'" if cache.placement == "device" else ""
    elif at == 0:
        fix += ", or take a sparse cache"
    else:
        fix += ", raise dense_layers, or take placement='device'"
        fix += f" (what may be pinned for a GPU is also capped by {PINNED_LIMIT_VARIABLE})"
    return (
        f"{rows} rows of {work.context} tokens ({placement_name(cache)}) need {need / 1e9:.4g} GB "
        f"of {name.partition(' ')[0]} memory, and there are {have / 1e9:.4g}. {fix}."
    )


def placements() -> tuple[CacheConfig | None, ...]:
    """What a plan compares where no cache is named: dense, MAGE, and HERALD in three forms."""
    return (
        None,
        CacheConfig(placement="device", lookahead=False),
        CacheConfig(placement="device"),
        CacheConfig(placement="host"),
        CacheConfig(placement="host", key_index="int8"),
    )


def choose(plans: Sequence[Plan]) -> Plan:
    """The plan with the highest predicted rate; of equal ones the first."""
    return max(plans, key=lambda plan: plan.tokens_per_second)
