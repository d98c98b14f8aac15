"""Runs batches block by block: prefill, then one compiled program per block, from the host.

Ownership: a `Batch` owns its cache. Every program takes the cache by donation and its result
replaces it, so no other reference to a batch's cache may be kept.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from herald_jax._checks import ConfigError, require, require_float, require_int
from herald_jax.cache.dense import DenseCache
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.decoding.steps import BlockState, DecodingOptions, decode_block, prefill_chunk
from herald_jax.engine.memory import (
    MemoryPlan,
    capacity_bucket,
    device_bytes_limit,
    prefill_chunk_length,
    row_bucket,
)
from herald_jax.models.decoder import Params, bind
from herald_jax.sampling import SamplingParams


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowRequest:
    """One sample to decode. `n`, `seed` and `stop` of `sampling` are the caller's business."""

    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    seed: int

    @property
    def total_tokens(self) -> int:
        """Prompt and generation together."""
        return len(self.prompt_token_ids) + self.sampling.max_tokens


class BlockResult(NamedTuple):
    """One finished block of each row of a batch, on the host.

    Attributes:
        token_ids: Ids of the block, prompt tail included.
        is_generated: False at prompt-tail positions and in rows that are not active.
        unmask_steps: Step within the block at which a token was committed, else -1.
        confidences: Confidence of each generated token at that step.
        logprobs: Its log-probability under the raw softmax at that step.
        steps: Denoising steps of the block, 0 in rows that are not active; one commit pass
            follows them.
    """

    token_ids: Int[np.ndarray, "R B"]
    is_generated: Bool[np.ndarray, "R B"]
    unmask_steps: Int[np.ndarray, "R B"]
    confidences: Float[np.ndarray, "R B"]
    logprobs: Float[np.ndarray, "R B"]
    steps: Int[np.ndarray, " R"]


@dataclasses.dataclass(slots=True, kw_only=True)
class Batch:
    """Rows that are decoded together, padded to a compiled batch size.

    Attributes:
        rows: The requests, without padding.
        is_active: True for rows that still get blocks.
        kv_device_bytes: Bytes of the cache on the device.
        kv_host_bytes: Bytes of the cache in host memory.
        prefill_seconds: Wall time of the prefill.
    """

    rows: Sequence[RowRequest]
    cache: DenseCache
    options: DecodingOptions
    spec: ProposalSpec
    block_index: Int[np.ndarray, " Rb"]
    is_active: Bool[np.ndarray, " R"]
    kv_device_bytes: int
    kv_host_bytes: int = 0
    prefill_seconds: float = 0.0

    def finish(self, row: int) -> None:
        """Takes a row out: it gets no further blocks."""
        self.is_active[row] = False


def _prefill(
    params: Params, cache: DenseCache, tokens: Array, start: Array, *, model: ModelConfig
) -> DenseCache:
    return prefill_chunk(bind(model, params), cache, tokens, start)


def _decode(
    params: Params,
    cache: DenseCache,
    index: Int[Array, " R"],
    tokens: Int[Array, "R B"],
    is_masked: Bool[Array, "R B"],
    is_active: Bool[Array, " R"],
    options: DecodingOptions,
    *,
    model: ModelConfig,
    spec: ProposalSpec,
) -> tuple[DenseCache, BlockState]:
    state = BlockState.start(index, tokens, is_masked)
    return decode_block(bind(model, params), cache, state, is_active, options, spec)


class Runner:
    """Compiled programs of one model, and the batches they run.

    Args:
        config: The model.
        params: Its parameters, on the device.
        max_model_len: Most tokens of a row, prompt and generation together; `None` takes the
            checkpoint's `max_position_embeddings`, or what memory allows if that is less.
        max_num_seqs: Most rows of a batch; `None` derives it from memory.
        device_memory_fraction: Share of the device's memory that may be used, in (0, 1].

    Raises:
        ConfigError: If an argument is out of range or a single row would not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        *,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        device_memory_fraction: float = 0.9,
    ) -> None:
        require_float(
            "device_memory_fraction", device_memory_fraction, 1e-6, 1.0, "a number in (0, 1]"
        )
        for field, value in (("max_model_len", max_model_len), ("max_num_seqs", max_num_seqs)):
            if value is not None:
                require_int(field, value, 1, "Leave it unset to derive it.")
        self.config = config
        self._params = params
        leaves = jax.tree.leaves(params)
        self._dtype = params["embed_tokens"]["embedding"].dtype
        device = next(iter(leaves[0].devices()))
        limit = int(device_bytes_limit(device) * device_memory_fraction)
        self._memory = MemoryPlan(
            model=config,
            itemsize=self._dtype.itemsize,
            available_bytes=limit - sum(leaf.nbytes for leaf in leaves),
        )
        self.max_model_len = self._resolve_length(max_model_len, max_num_seqs or 1)
        capacity = self._capacity(self.max_model_len)
        self._memory.require_fit(max_num_seqs or 1, capacity)
        self.max_num_seqs = max_num_seqs or self._memory.rows_that_fit(self._capacity(1))
        self._programs: dict[tuple, Callable[..., Any]] = {}

    def _resolve_length(self, asked: int | None, rows: int) -> int:
        longest = self.config.max_position_embeddings
        if asked is not None:
            fix = "Positions past it were never trained; lower max_model_len."
            require(asked <= longest, "max_model_len", asked, f"at most {longest}", fix)
            return asked
        while longest > self.config.block_length:
            need = self._memory.batch_bytes(rows, self._capacity(longest))
            if need <= self._memory.available_bytes:
                break
            longest //= 2
        return longest

    def _capacity(self, tokens: int) -> int:
        limit = getattr(self, "max_model_len", tokens)
        return capacity_bucket(tokens, self.config.block_length, limit)

    @property
    def params(self) -> Params:
        """The parameters that the next block will use."""
        return self._params

    @params.setter
    def params(self, params: Params) -> None:
        def describe(tree: Params) -> dict[str, tuple]:
            leaves = jax.tree_util.tree_leaves_with_path(tree)
            return {jax.tree_util.keystr(p): (leaf.shape, str(leaf.dtype)) for p, leaf in leaves}

        old, new = describe(self._params), describe(params)
        faults = [
            f"{name}: expected {old.get(name, 'nothing')}, got {new.get(name, 'nothing')}"
            for name in sorted(old.keys() | new.keys())
            if old.get(name) != new.get(name)
        ]
        if faults:
            raise ConfigError("params do not fit the model:\n  " + "\n  ".join(faults))
        self._params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), params, self._params
        )

    def fit(self, rows: Sequence[RowRequest]) -> int:
        """How many of the first rows make up the next batch; at least one."""
        longest = 0
        for count, row in enumerate(rows[: self.max_num_seqs], start=1):
            longest = max(longest, row.total_tokens)
            shape = row_bucket(count, self.max_num_seqs), self._capacity(longest)
            if count > 1 and self._memory.batch_bytes(*shape) > self._memory.available_bytes:
                return count - 1
        return min(len(rows), self.max_num_seqs)

    def start(self, rows: Sequence[RowRequest]) -> Batch:
        """A batch whose whole prompt blocks are in the cache.

        Args:
            rows: Requests that share `strategy` and `confidence`.

        Raises:
            ConfigError: If the rows do not fit one batch, or do not share a program.
        """
        require(0 < len(rows) <= self.max_num_seqs, "rows", len(rows), f"1..{self.max_num_seqs}")
        for row in rows:
            require(
                row.total_tokens <= self.max_model_len,
                "prompt tokens + max_tokens",
                row.total_tokens,
                f"at most max_model_len={self.max_model_len}",
            )
        shared = {(row.sampling.strategy, row.sampling.confidence) for row in rows}
        require(len(shared) == 1, "strategy, confidence", shared, "the same in all rows")
        size = row_bucket(len(rows), self.max_num_seqs)
        capacity = self._capacity(max(row.total_tokens for row in rows))
        padding = size - len(rows)
        params = [row.sampling for row in rows] + [rows[0].sampling] * padding
        seeds = [row.seed for row in rows] + [0] * padding
        lengths = np.asarray([len(row.prompt_token_ids) for row in rows] + [0] * padding, np.int32)
        batch = Batch(
            rows=tuple(rows),
            cache=self._empty_cache_program(size, capacity)(),
            options=decoding_options(params, seeds, self.config),
            spec=proposal_spec(params),
            block_index=lengths // self.config.block_length,
            is_active=np.ones(len(rows), bool),
            kv_device_bytes=self._memory.kv_bytes(size, capacity),
        )
        begin = time.perf_counter()
        self._run_prefill(batch, size, capacity)
        batch.prefill_seconds = time.perf_counter() - begin
        return batch

    def _run_prefill(self, batch: Batch, size: int, capacity: int) -> None:
        whole = batch.block_index * self.config.block_length
        if not whole.any():
            return
        tokens = np.zeros((size, capacity), np.int32)
        for row, request in enumerate(batch.rows):
            tokens[row, : whole[row]] = request.prompt_token_ids[: whole[row]]
        chunk = prefill_chunk_length(size, capacity, self.config.block_length)
        program = self._prefill_program(size, capacity, chunk)
        for offset in range(0, int(whole.max()), chunk):
            # The last chunk is moved back to end inside the cache; the blocks that it runs
            # twice get the same keys and values again.
            start = min(offset, capacity - chunk)
            piece = np.ascontiguousarray(tokens[:, start : start + chunk])
            batch.cache = program(self._params, batch.cache, piece, np.int32(start))
        jax.block_until_ready(batch.cache)

    def decode_block(self, batch: Batch) -> BlockResult:
        """The next whole block of every active row, its keys and values in the cache."""
        size, rows = len(batch.block_index), len(batch.rows)
        block_length = self.config.block_length
        tokens = np.zeros((size, block_length), np.int32)
        is_masked = np.zeros((size, block_length), bool)
        is_active = np.zeros(size, bool)
        is_active[:rows] = batch.is_active
        for row in np.flatnonzero(batch.is_active).tolist():
            tail = batch.rows[row].prompt_token_ids[batch.block_index[row] * block_length :]
            tokens[row, : len(tail)] = tail
            is_masked[row, len(tail) :] = True
        program = self._decode_program(batch)
        batch.cache, state = program(
            self._params,
            batch.cache,
            batch.block_index,
            tokens,
            is_masked,
            is_active,
            batch.options,
        )
        host = jax.device_get(state)
        batch.block_index = batch.block_index + is_active.astype(np.int32)
        return BlockResult(
            token_ids=host.tokens[:rows],
            is_generated=is_masked[:rows],
            unmask_steps=host.unmask_steps[:rows],
            confidences=host.confidences[:rows],
            logprobs=host.logprobs[:rows],
            steps=host.steps[:rows],
        )

    def warmup(self, rows: Sequence[RowRequest]) -> None:
        """Compiles, ahead of time, the programs that a batch of such rows will run."""
        size = row_bucket(len(rows), self.max_num_seqs)
        capacity = self._capacity(max(row.total_tokens for row in rows))
        chunk = prefill_chunk_length(size, capacity, self.config.block_length)
        self._empty_cache_program(size, capacity)
        self._prefill_program(size, capacity, chunk)
        params = [row.sampling for row in rows] + [rows[0].sampling] * (size - len(rows))
        options = decoding_options(params, [0] * size, self.config)
        self._compile_decode(size, capacity, options, proposal_spec(params))

    def _abstract_cache(self, size: int, capacity: int) -> DenseCache:
        return jax.eval_shape(
            functools.partial(DenseCache.zeros, self.config, size, capacity, self._dtype)
        )

    def _empty_cache_program(self, size: int, capacity: int) -> Callable[..., Any]:
        key = ("cache", size, capacity)
        if key not in self._programs:
            make = functools.partial(DenseCache.zeros, self.config, size, capacity, self._dtype)
            self._programs[key] = jax.jit(make).lower().compile()
        return self._programs[key]

    def _prefill_program(self, size: int, capacity: int, chunk: int) -> Callable[..., Any]:
        key = ("prefill", size, capacity, chunk)
        if key not in self._programs:
            self._programs[key] = _compile(
                functools.partial(_prefill, model=self.config),
                self._params,
                self._abstract_cache(size, capacity),
                jax.ShapeDtypeStruct((size, chunk), jnp.int32),
                jax.ShapeDtypeStruct((), jnp.int32),
            )
        return self._programs[key]

    def _decode_program(self, batch: Batch) -> Callable[..., Any]:
        size, capacity = len(batch.block_index), batch.cache.capacity
        return self._compile_decode(size, capacity, batch.options, batch.spec)

    def _compile_decode(
        self, size: int, capacity: int, options: DecodingOptions, spec: ProposalSpec
    ) -> Callable[..., Any]:
        key = ("decode", size, capacity, type(options.rule), spec)
        if key not in self._programs:
            block = (size, self.config.block_length)
            self._programs[key] = _compile(
                functools.partial(_decode, model=self.config, spec=spec),
                self._params,
                self._abstract_cache(size, capacity),
                jax.ShapeDtypeStruct((size,), jnp.int32),
                jax.ShapeDtypeStruct(block, jnp.int32),
                jax.ShapeDtypeStruct(block, jnp.bool_),
                jax.ShapeDtypeStruct((size,), jnp.bool_),
                options,
            )
        return self._programs[key]


def _compile(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """An executable for these argument shapes; argument 1, the cache, is donated."""
    return jax.jit(function, donate_argnums=1).lower(*arguments).compile()
