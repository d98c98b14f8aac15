"""Continuous batching at block boundaries: requests in, finished blocks out, step by step.

The engine joins the scheduler, which decides, with the device, which runs. Up to `run_ahead`
steps are on the device while their results are unread; a row's block boundary, its stop ids and
its length are handled there, so the device does not wait for the host between steps.

One thread at a time may use an engine; `AsyncLLM` gives one to many tasks.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from herald_jax._checks import ConfigError, require
from herald_jax.cache.host_memory import pinnable_bytes
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import require_block_decoding
from herald_jax.decoding.propose import ProposalSpec
from herald_jax.engine.config import (
    EngineConfig,
    EngineSizes,
    device_bytes_limit,
    size_engine,
)
from herald_jax.engine.live import LiveSample, SampleEvent
from herald_jax.engine.pages import PageAllocator
from herald_jax.engine.protocols import PendingLike, RunnerLike
from herald_jax.engine.request import Request, RowProgress
from herald_jax.engine.retrievals import RowFailure
from herald_jax.engine.sample import Sample
from herald_jax.engine.scheduler import Scheduler
from herald_jax.engine.slot_arrays import RowSampling
from herald_jax.engine.slot_runner import CommittedBlock, SlotRunner
from herald_jax.engine.sparse_runner import SparseRunner
from herald_jax.engine.sparse_sizes import size_sparse_engine
from herald_jax.engine.trace import Sent, Trace, Traced
from herald_jax.models.decoder import (
    Params,
    check_params,
    copy_params,
    describe_params,
    require_same_params,
)


class _InFlight(NamedTuple):
    """A device step that is not read yet, and the samples whose first block it begins.

    `sent` is for a trace.
    """

    step: PendingLike
    starting: Sequence[LiveSample]
    sent: Sent | None = None


class EngineStepError(RuntimeError):
    """Raised for requests that were on the device when a step failed; the cause is chained."""


class LLMEngine:
    """Decodes many requests at once.

    Args:
        config: The model.
        params: Its parameters, on the device.
        engine: Settings.
        runner: Runs the plans, instead of one that is made here (tests).

    Attributes:
        config: The model.
        settings: The settings.
        sizes: What the settings came to on this machine.
        itemsize: Bytes of a cached number.
        scheduler: The queue, rows and pages.

    Raises:
        ConfigError: If the parameters are not the model's, or a sample of `max_model_len` would
            not fit.
    """

    def __init__(
        self,
        config: ModelConfig,
        params: Params,
        engine: EngineConfig | None = None,
        runner: RunnerLike | None = None,
    ) -> None:
        require_block_decoding(config, may_shift=engine is None or engine.cache is None)
        check_params(config, params)
        self.config = config
        self.settings = engine or EngineConfig()
        leaves = jax.tree.leaves(params)
        device = next(iter(leaves[0].devices()))
        limit = int(device_bytes_limit(device) * self.settings.device_memory_fraction)
        self.itemsize: int = params["embed_tokens"]["embedding"].dtype.itemsize
        free_bytes = limit - sum(leaf.nbytes for leaf in leaves)
        cache = self.settings.cache
        if cache is None:
            self.sizes: EngineSizes = size_engine(
                self.settings,
                config,
                itemsize=self.itemsize,
                free_bytes=free_bytes,
                is_cpu=device.platform == "cpu",
            )
        else:
            self.sizes = size_sparse_engine(
                self.settings,
                cache,
                config,
                itemsize=self.itemsize,
                free_bytes=free_bytes,
                host_bytes=pinnable_bytes(cache.host_bytes, is_gpu=device.platform == "gpu"),
                is_cpu=device.platform == "cpu",
            )
        self._params = params
        self._params_version = 0
        self.scheduler = self._make_scheduler()
        self._runner = self._make_runner() if runner is None else runner
        self._trace: Trace | None = None
        self._pending: collections.deque[_InFlight] = collections.deque()
        self._samples: dict[tuple[str, int], LiveSample] = {}
        self._options: dict[tuple[str, int], RowSampling] = {}

    def _make_scheduler(self) -> Scheduler:
        sizes, settings, block = self.sizes, self.settings, self.config.block_length
        pages = PageAllocator(
            sizes.num_pages,
            sizes.page_tokens,
            # With a sparse cache prompts are shared by the runner, row by row: keys of blocks that
            # attended to a part of their prefix are their request's own.
            # A shifted model needs an output of each prompt's end, not its keys alone.
            share_prefixes=settings.share_prefixes
            and settings.cache is None
            and not self.config.shifts_predictions,
            setting=sizes.setting,
        )
        return Scheduler(
            pages,
            block_length=block,
            max_rows=sizes.max_rows,
            max_step_tokens=(sizes.max_rows + sizes.prefill_slots) * block,
            max_model_len=sizes.max_model_len,
            run_ahead=settings.run_ahead,
            max_waiting=settings.max_waiting,
            aging_ticks=settings.aging_ticks,
            prefix_root=self._prefix_root(),
        )

    def _make_runner(self) -> RunnerLike:
        sizes, cache = self.sizes, self.settings.cache
        if cache is not None and sizes.sparse is not None:
            shares = self.settings.share_prefixes
            return SparseRunner(self.config, self._params, cache, sizes.sparse, shares)
        return SlotRunner(
            self.config,
            self._params,
            max_rows=sizes.max_rows,
            num_pages=sizes.num_pages,
            page_tokens=sizes.page_tokens,
            table_pages=sizes.table_pages,
            prefill_slots=sizes.prefill_slots,
        )

    def _prefix_root(self) -> bytes:
        text = f"{self.config.to_json()}:{self._params_version}"
        return hashlib.blake2b(text.encode(), digest_size=32).digest()

    @property
    def params(self) -> Params:
        """The parameters that the next step will use."""
        return self._params

    @property
    def runner(self) -> RunnerLike:
        """What runs the plans on the device."""
        return self._runner

    @property
    def has_unfinished(self) -> bool:
        """True while a request waits or runs, or results are unread."""
        return bool(self._pending) or not self.scheduler.is_idle

    @property
    def compile_seconds(self) -> float:
        """Time that programs took to compile so far."""
        return self._runner.compile_seconds

    @property
    def trace(self) -> Trace | None:
        """What is told when steps, blocks and the host's jobs were; `None` to tell nobody."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        retrieval = getattr(self._runner, "retrieval", None)
        if isinstance(retrieval, Traced):
            retrieval.set_trace(trace)

    def _wait_seconds(self) -> float:
        return self._runner.stats().get("retrieval_wait_seconds", 0.0)

    def clock(self) -> float:
        """Seconds on a clock that stands still while a program compiles."""
        return time.perf_counter() - self._runner.compile_seconds

    def update_params(self, params: Params) -> None:
        """Swaps the weights in place; no program is compiled again.

        The new ones are copied, so the caller may donate or overwrite theirs.

        Raises:
            ConfigError: If requests are running, or the new ones differ in structure, shape or
                dtype; the old ones stay then.
        """
        if self.scheduler.is_idle:
            self._drain()  # steps that nobody waits for any more
        if self.has_unfinished:
            raise ConfigError(
                "update_params needs an idle engine: the keys and values of running requests "
                "belong to the old parameters. Wait for them or abort them first."
            )
        require_same_params(describe_params(self._params), describe_params(params))
        self._params = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), copy_params(params), self._params
        )
        self._runner.params = self._params
        self._params_version += 1
        self.scheduler.set_prefix_root(self._prefix_root())

    def warmup(self, specs: Sequence[ProposalSpec] = ()) -> None:
        """Compiles, ahead of time, everything that requests can need, or these kinds of step."""
        if specs:
            self._runner.warmup(specs)
        else:
            self._runner.warmup()

    def add_request(
        self,
        request_id: str,
        request: Request,
        progresses: Sequence[RowProgress],
        seeds: Sequence[int],
        *,
        priority: int = 0,
    ) -> list[LiveSample]:
        """The samples of a request that was put into the queue.

        Args:
            request_id: A name that no live request has.
            request: The checked request.
            progresses: A fresh progress object for each sample.
            seeds: The seed of each sample.
            priority: Lower goes first.

        Raises:
            ConfigError: If the request could never run.
            OutOfPages: If it would not fit the empty page pool.
            QueueFull: If too many samples are waiting.
        """
        require(len(progresses) == len(seeds), "seeds", len(seeds), f"{len(progresses)} of them")
        with self._trusting():
            self.scheduler.add(
                request_id,
                request.prompt_token_ids,
                progresses,
                max_tokens=request.sampling.max_tokens,
                priority=priority,
            )
            arrived, live = self.clock(), []
            for index, (progress, seed) in enumerate(zip(progresses, seeds, strict=True)):
                sample = LiveSample(
                    request_id=request_id,
                    sample_index=index,
                    seed=seed,
                    progress=progress,
                    arrived=arrived,
                    compile_seconds=-self.compile_seconds,  # the end's are added
                )
                self._samples[request_id, index] = sample
                self._options[request_id, index] = RowSampling(request.sampling, seed)
                live.append(sample)
            return live

    def abort(self, request_id: str) -> list[LiveSample]:
        """The samples that this call ended; empty if the request is unknown or has ended."""
        with self._trusting():
            return [self._close(sample) for sample in self.scheduler.abort(request_id)]

    def step(self) -> list[SampleEvent]:
        """Dispatches the next step and reads what is due; what happened to which sample.

        A step that fails on the device ends the requests that were running, with an
        `EngineStepError` in their events. If anything else is raised, such as an interrupt, all
        requests have been aborted, and the engine can be used again.
        """
        with self._trusting(is_step=True):
            return self._step()

    @contextlib.contextmanager
    def _trusting(self, *, is_step: bool = False) -> Iterator[None]:
        """Starts over where an interrupt, or a fault within a step, left accounts half-written."""
        try:
            yield
        except BaseException as error:
            if is_step or not isinstance(error, Exception):
                self._start_over()
            raise

    def _start_over(self) -> None:
        """Aborts every request, and makes queue, rows, pages and the device's state anew."""
        live, self._samples = self._samples, {}
        self._options.clear()
        self._pending.clear()
        for sample in live.values():
            sample.progress.abort()
            self._stamp_end(sample)
        counts = self.scheduler.counts
        self.scheduler = self._make_scheduler()
        self.scheduler.counts = counts
        self._runner.reset()

    def _step(self) -> list[SampleEvent]:
        events: list[SampleEvent] = []
        while len(self._pending) >= self.settings.run_ahead:
            events += self._read()
        plan = self.scheduler.schedule()
        if plan is None:
            return events + (self._read() if self._pending else [])
        now = self.clock()
        options, starting = {}, []
        for slot in plan.prefill:
            self._note_admitted(slot.row, slot.epoch, now)
        for start in plan.starts:
            sample = self._note_admitted(start.row, start.epoch, now)
            options[start.row] = self._options[sample.request_id, sample.sample_index]
            starting.append(sample)
        trace = self._trace
        waited = 0.0
        if trace is not None:
            waited = self._wait_seconds()
            for start in plan.starts:
                trace.on_start(start.row, start.epoch)
        try:
            steps = self._runner.dispatch(plan, options)
        except Exception as error:
            return events + self._fail_step(error)
        sent = None
        if trace is not None:
            sent = Sent(trace.now(), len(plan.decode), self._wait_seconds() - waited)
        was_idle = not self._pending
        # The last of a plan's device steps is the one that decodes.
        self._pending.extend(_InFlight(step, (), sent) for step in steps[:-1])
        self._pending.extend(_InFlight(step, starting, sent) for step in steps[-1:])
        if was_idle:
            self._note_started()
        return events

    def _note_admitted(self, row: int, epoch: int, now: float) -> LiveSample:
        """The sample of a stay that a plan prefills or starts."""
        sample = self.scheduler.sample_at(row, epoch)
        assert sample is not None, "the plan was made just now"
        live = self._samples[sample.request_id, sample.sample_index]
        if live.admitted is None:
            live.admitted = now
        return live

    def _note_started(self) -> None:
        """Sets the times of the samples that start in the step that the device runs next."""
        for live in self._pending[0].starting if self._pending else ():
            if live.started is None:
                live.started = self.clock()

    def _drain(self) -> None:
        while self._pending:
            self._read()

    def _read(self) -> list[SampleEvent]:
        step, _, sent = self._pending.popleft()
        try:
            results = step.read()
        except Exception as error:
            return self._fail_step(error)
        if self._trace is not None and sent is not None:
            self._trace.on_step(sent)
            for result in results:
                if isinstance(result, CommittedBlock):
                    self._trace.on_block(result)
        self._note_started()
        return [event for result in results for event in self._take(result)]

    def _take(self, block: CommittedBlock | RowFailure) -> list[SampleEvent]:
        sample = self.scheduler.sample_at(block.row, block.epoch)
        if isinstance(block, RowFailure):
            return [] if sample is None else self._fail_request(sample.request_id, block.error)
        if sample is None:
            self.scheduler.on_block(block.row, block.epoch, block.index, block.block)
            return []
        live = self._samples[sample.request_id, sample.sample_index]
        try:
            self.scheduler.on_block(block.row, block.epoch, block.index, block.block)
        except Exception as error:
            # The host could not take the block, as when a tokenizer fails on it: this request
            # ends with what it has, and the others go on.
            return self._fail_request(sample.request_id, error)
        if live.first_block is None:
            live.first_block = self.clock()
        if live.progress.finish_reason is not None:
            self._close(sample)
        return [SampleEvent(live)]

    def _close(self, sample: Sample) -> LiveSample:
        live = self._samples.pop((sample.request_id, sample.sample_index))
        self._options.pop((sample.request_id, sample.sample_index))
        live.reused_tokens, live.preemptions = sample.reused_tokens, sample.preemptions
        live.peak_pages = sample.peak_pages
        self._stamp_end(live)
        return live

    def _stamp_end(self, live: LiveSample) -> None:
        live.ended = self.clock()
        live.compile_seconds += self.compile_seconds

    def _fail_request(self, request_id: str, error: Exception) -> list[SampleEvent]:
        return [SampleEvent(live, error) for live in self.abort(request_id)]

    def _fail_step(self, cause: Exception) -> list[SampleEvent]:
        """Ends the requests that were on the device and makes the device's state anew.

        The failed program had the cache by donation, so nothing that it held can be trusted.
        Requests that only wait are not touched.
        """
        error = EngineStepError(f"a step failed on the device: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        self._pending.clear()
        running = {sample.request_id: None for sample in self.scheduler.running}
        events = [event for name in running for event in self._fail_request(name, error)]
        self.scheduler.set_prefix_root(self._prefix_root())
        self._runner.reset()
        return events

    def stats(self) -> dict[str, Any]:
        """What the engine holds and has done, for metrics."""
        return {
            "waiting": len(self.scheduler.waiting),
            "running": len(self.scheduler.running),
            "pending_steps": len(self._pending),
            "kv_bytes": self.sizes.kv_bytes,
            "kv_host_bytes": self.sizes.host_bytes,
            **self._runner.stats(),
            **dataclasses.asdict(self.scheduler.counts),
        }
