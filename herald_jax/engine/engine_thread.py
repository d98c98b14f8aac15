"""The thread that runs an engine, and the ways to and from it.

Threads. The engine runs on a thread of its own, which sleeps while there is nothing to do.
Whatever changes the engine (a new request, an abort, new weights, the shutdown) is put into a
queue and done between two of its steps. Events go back through `loop.call_soon_threadsafe`.

Failures. A request that fails ends alone: its task gets a `GenerationError` with what there is
of its output. A step that fails on the device ends the requests that were on it. If the engine
cannot go on at all, every request fails and further ones get `EngineDead`.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from herald_jax.engine.call import CallRequest
from herald_jax.engine.intake import Intake
from herald_jax.engine.live import LiveSample, SampleEvent
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import sample_seeds
from herald_jax.engine.stats import EngineStats
from herald_jax.engine.stream import RequestStream
from herald_jax.outputs import GenerationError, StreamEvent

MAX_FAILURES = 3
"""Steps in a row that may raise before the engine counts as dead."""

STALL_SECONDS = 0.001
"""Pause of the engine's thread where a step can do nothing until a copy has ended."""

_log = logging.getLogger(__name__)


class EngineClosed(RuntimeError):
    """Raised for requests that come after the shutdown began."""


class EngineDead(RuntimeError):
    """Raised for requests that come after the engine failed for good; the cause is chained."""


@dataclasses.dataclass(slots=True)
class _Running:
    """A request in the engine, as the engine's thread sees it."""

    stream: RequestStream
    call: CallRequest
    taken_ids: list[int]
    taken_blocks: list[int]
    block_ends: list[float | None]
    ended: set[int] = dataclasses.field(default_factory=set)


class EngineThread:
    """Runs an engine for the event loops of other threads.

    Args:
        engine: The engine; from now on only this thread may use it.
        intake: Makes progress objects.
        stats: Gets the figures.
    """

    def __init__(self, engine: LLMEngine, intake: Intake, stats: EngineStats) -> None:
        self._engine, self._intake, self._stats = engine, intake, stats
        self._condition = threading.Condition()
        # The next four belong to the condition.
        self._commands: collections.deque[Callable[[], None]] = collections.deque()
        self._deadline: float | None = None
        self._is_over = False
        self._death: Exception | None = None
        # The rest is the thread's.
        self._running: dict[str, _Running] = {}
        self._posts: dict[asyncio.AbstractEventLoop, list[Callable[[], None]]] = {}
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="herald-engine", daemon=True)
        stats.look_at(engine)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def join(self) -> None:
        """Waits for the thread's end, which `begin_shutdown` brings about."""
        self._thread.join()

    @property
    def state(self) -> str:
        """`running`, `draining` once the shutdown began, `closed` after it, or `dead`."""
        with self._condition:
            if self._death is not None:
                return "dead"
            if self._is_over:
                return "closed"
            return "running" if self._deadline is None else "draining"

    @property
    def request_ids(self) -> list[str]:
        """Names of the requests that wait or run just now."""
        return list(self._running)

    def begin_shutdown(self, drain_seconds: float | None = None) -> None:
        """What `shutdown` does first; it does not wait, and any thread may call it."""
        seconds = float("inf") if drain_seconds is None else drain_seconds
        deadline = time.monotonic() + seconds
        with self._condition:
            self._deadline = deadline if self._deadline is None else min(self._deadline, deadline)
            self._condition.notify_all()

    def _send(self, command: Callable[[], None], *, is_new: bool = False) -> None:
        with self._condition:
            if self._death is not None:
                raise EngineDead(
                    f"the engine has failed for good and takes no more requests: {self._death}. "
                    "Start it anew."
                ) from self._death
            if self._is_over or (is_new and self._deadline is not None):
                raise EngineClosed("the engine is shutting down and takes no more requests.")
            self._commands.append(command)
            self._condition.notify_all()

    def drop(self, stream: RequestStream) -> None:
        """Aborts a request that nobody listens to any more; any thread may call it."""
        try:
            self._send(lambda: self._drop(stream))
        except (EngineClosed, EngineDead):
            pass  # the end of the thread has ended all requests

    def call(self, work: Callable[[], Any], *, is_new: bool = True) -> asyncio.Future[Any]:
        """The result of work that the engine's thread does between two steps."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()

        def settle(result: Any, error: Exception | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        def command() -> None:
            result, error = None, None
            try:
                result = work()
            except Exception as raised:
                error = raised
            self._post(loop, functools.partial(settle, result, error))

        self._send(command, is_new=is_new)
        return future

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                self._do_commands()
                self._flush()  # a step may take long, as when it compiles
                if self._engine.has_unfinished:
                    self._step()
                self._stats.look_at(self._engine)
                self._flush()
        except BaseException as error:
            _log.exception("the engine's thread has failed")
            with self._condition:
                self._death = error if isinstance(error, Exception) else RuntimeError(repr(error))
        finally:
            self._end()

    def _wait_for_work(self) -> bool:
        """Sleeps until there is something to do; false if the thread shall end."""
        with self._condition:
            while True:
                is_due = self._deadline is not None and time.monotonic() >= self._deadline
                if self._commands:
                    break
                if self._engine.has_unfinished and not is_due:
                    return True
                if self._deadline is not None and (is_due or not self._engine.has_unfinished):
                    if not self._running:
                        self._is_over = True
                        return False
                    break
                self._condition.wait()
        if is_due:
            for name in list(self._running):
                self.abort(name)
        return True

    def _do_commands(self) -> None:
        while True:
            with self._condition:
                if not self._commands:
                    return
                command = self._commands.popleft()
            command()

    def _step(self) -> None:
        counts = dataclasses.replace(self._engine.scheduler.counts)
        try:
            events = self._engine.step()
        except Exception as error:
            self._failures += 1
            _log.exception("a step of the engine raised")
            self._fail_all(error)
            if self._failures >= MAX_FAILURES:
                raise
            return
        self._failures = 0
        for event in events:
            self._take(event)
        if not events and self._engine.scheduler.counts == counts:
            if self._engine.stats()["pending_steps"] == 0 and self._engine.has_unfinished:
                with self._condition:
                    if not self._commands:
                        self._condition.wait(STALL_SECONDS)

    def add(self, stream: RequestStream, priority: int) -> None:
        """Puts a request into the queue; as work for `call`.

        Raises:
            ConfigError: If the request could never run.
            OutOfPages: If it would not fit the empty page pool.
            QueueFull: If too many samples are waiting.
        """
        request, name = stream.request, stream.request_id
        call = CallRequest(
            index=0,
            request=request,
            seeds=sample_seeds(request.sampling),
            progresses=self._intake.progresses(request.sampling),
        )
        call.samples = self._engine.add_request(
            name, request, call.progresses, call.seeds, priority=priority
        )
        count = len(call.samples)
        self._running[name] = _Running(stream, call, [0] * count, [0] * count, [None] * count)
        self._stats.on_request(len(request.prompt_token_ids))

    def _take(self, event: SampleEvent) -> None:
        sample = event.sample
        running = self._running.get(sample.request_id)
        if running is None or sample is not running.call.samples[sample.sample_index]:
            return
        if event.error is not None:
            self._fail(sample.request_id, event.error)
            return
        try:
            self._report(running, sample)
        except Exception as error:  # as when the tokenizer fails on the ids
            self._fail(sample.request_id, error)

    def _report(self, running: _Running, sample: LiveSample) -> None:
        """Sends what is new of a sample; one step may have told of it twice."""
        at, progress = sample.sample_index, sample.progress
        if at in running.ended:
            return
        ids = progress.token_ids[running.taken_ids[at] :]
        steps = progress.steps_per_block[running.taken_blocks[at] :]
        text = progress.take_text()
        reason = progress.finish_reason
        running.taken_ids[at] += len(ids)
        running.taken_blocks[at] += len(steps)
        if steps:
            now, since = self._engine.clock(), running.block_ends[at]
            self._stats.on_block(sample, len(ids), steps, now, since)
            running.block_ends[at] = now
        output = None
        if reason is not None:
            running.ended.add(at)
            self._stats.on_end(reason)
            if len(running.ended) == len(running.call.samples):
                output = running.call.output(self._engine)
                del self._running[sample.request_id]
        event = StreamEvent(
            index=at,
            text=text,
            token_ids=ids,
            steps=sum(steps),
            finish_reason=reason,
            output=output,
        )
        self._post(running.stream.loop, functools.partial(running.stream.put, event))

    def abort(self, request_id: str) -> bool:
        """Ends a request with what it has, if there is one; as work for `call`."""
        running = self._running.get(request_id)
        if running is None:
            return False
        try:
            for sample in self._engine.abort(request_id):
                self._report(running, sample)
        except Exception as error:
            self._fail(request_id, error)
        return True

    def _drop(self, stream: RequestStream) -> None:
        running = self._running.get(stream.request_id)
        if running is not None and running.stream is stream:
            self.abort(stream.request_id)

    def _fail(self, request_id: str, cause: Exception) -> None:
        """Ends one request with an error; the others go on."""
        running = self._running.pop(request_id, None)
        if running is None:
            return
        try:
            self._engine.abort(request_id)
        except Exception:
            _log.exception("the abort of a failed request raised")
        for at in range(len(running.call.samples)):
            if at not in running.ended:
                self._stats.on_end("error")
        self._stats.on_failure()
        running.call.error = cause
        outputs = []
        try:
            outputs = [running.call.output(self._engine)]
        except Exception:
            _log.exception("the output of a failed request cannot be made")
        error = GenerationError(f"{type(cause).__name__}: {cause}", outputs)
        error.__cause__ = cause
        self._post(running.stream.loop, functools.partial(running.stream.fail, error))

    def _fail_all(self, cause: Exception) -> None:
        for name in list(self._running):
            self._fail(name, cause)

    def _end(self) -> None:
        """Leaves nothing behind: no request, and no command that somebody waits for."""
        with self._condition:
            self._is_over = True
            death = self._death
        error = death or EngineClosed("the engine was shut down.")
        self._fail_all(error)
        self._do_commands()  # each tells its caller what came of it
        self._fail_all(error)
        self._stats.look_at(self._engine)
        self._flush()

    def _post(self, loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
        self._posts.setdefault(loop, []).append(call)

    def _flush(self) -> None:
        """Hands over what a step brought, with one wake-up for each loop."""
        posts, self._posts = self._posts, {}
        for loop, calls in posts.items():
            try:
                loop.call_soon_threadsafe(_call_all, calls)
            except RuntimeError:  # the loop is closed, so nobody is left to listen
                for name, running in list(self._running.items()):
                    if running.stream.loop is loop:
                        self.abort(name)


def _call_all(calls: Sequence[Callable[[], None]]) -> None:
    for call in calls:
        call()
