"""`LLM`: a model in memory and the calls that generate with it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

from herald_jax import checkpoint
from herald_jax._checks import ConfigError
from herald_jax.configs import ModelConfig
from herald_jax.engine.batches import Row, RunnerLike, run_rows
from herald_jax.engine.collect import by_request, partial_outputs, request_output
from herald_jax.engine.detokenizer import TextStream
from herald_jax.engine.request import Request, RowProgress, sample_seeds
from herald_jax.engine.runner import RowRequest, Runner
from herald_jax.model_source import find_checkpoint, resolve_dtype
from herald_jax.outputs import (
    GenerationError,
    GenerationInterrupted,
    RequestOutput,
    StreamEvent,
)
from herald_jax.prompts import Prompt, check_request, list_prompts, pair_params, read_prompt
from herald_jax.sampling import SamplingParams
from herald_jax.settings import enable_compile_cache
from herald_jax.tokenizer import Message, Tokenizer

_log = logging.getLogger(__name__)


class LLM:
    """A block-diffusion language model, ready to generate.

    One instance serves one call at a time.

    Args:
        model: A converted folder, a Hugging Face folder (converted on the fly into the cache
            directory) or a hub id.
        dtype: `bfloat16`, `float32`, or `auto`: bfloat16 on a GPU and float32 on a CPU.
        mask_token_id: Id of the mask token, instead of the checkpoint's.
        block_length: Positions denoised together, instead of the checkpoint's.
        max_model_len: Most tokens of a prompt and its generation together. Left out, it is the
            checkpoint's `max_position_embeddings`, or what memory allows if that is less.
        max_num_seqs: Most samples decoded at the same time; left out, it follows from memory.
        device_memory_fraction: Share of the device's memory that may be used, in (0, 1].
        tokenizer: Folder of another tokenizer than the model's.

    Attributes:
        config: Description of the model.
        tokenizer: The tokenizer, or `None`: then prompts are lists of ids and texts are empty.
        runner: The compiled programs.

    Raises:
        ConfigError: If an argument does not fit, or a single sample would not fit in memory.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: Any = "auto",
        mask_token_id: int | None = None,
        block_length: int | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        device_memory_fraction: float = 0.9,
        tokenizer: str | Path | None = None,
    ) -> None:
        name = resolve_dtype(dtype)
        enable_compile_cache()
        folder, config = find_checkpoint(
            model, dtype=name, mask_token_id=mask_token_id, block_length=block_length
        )
        found = Tokenizer.from_folder(folder if tokenizer is None else tokenizer)
        if found is None:
            if tokenizer is not None:
                raise ConfigError(f"tokenizer={str(tokenizer)!r} holds no tokenizer.json.")
            _log.warning("%s has no tokenizer: prompts must be lists of ids", folder)
        runner = Runner(
            config,
            checkpoint.load_params(folder, dtype=name),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device_memory_fraction=device_memory_fraction,
        )
        self._attach(config, runner, found)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Mapping[str, Any],
        *,
        tokenizer: Tokenizer | None = None,
        max_model_len: int | None = None,
        max_num_seqs: int | None = None,
        device_memory_fraction: float = 0.9,
    ) -> Self:
        """An engine over parameters that are in memory already, as in training.

        Args:
            config: Description of the model.
            params: Nested dict in the structure of `models.abstract_params(config)`.
            tokenizer: For text; without one, prompts are lists of ids.
            max_model_len: As for the class.
            max_num_seqs: As for the class.
            device_memory_fraction: As for the class.
        """
        resolve_dtype("auto")  # says so if there is no device
        enable_compile_cache()
        runner = Runner(
            config,
            jax.device_put(dict(params)),
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device_memory_fraction=device_memory_fraction,
        )
        return cls.from_runner(config, runner, tokenizer)

    @classmethod
    def from_runner(
        cls, config: ModelConfig, runner: RunnerLike, tokenizer: Tokenizer | None = None
    ) -> Self:
        """An engine over a runner, or over anything with a runner's methods (tests)."""
        llm = cls.__new__(cls)
        llm._attach(config, runner, tokenizer)
        return llm

    def _attach(self, config: ModelConfig, runner: RunnerLike, tokenizer: Tokenizer | None) -> None:
        self.config = config
        self.runner = runner
        self.tokenizer = tokenizer
        self._in_use = threading.Lock()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its generation together."""
        return self.runner.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The generations for one or many prompts, in their order.

        Args:
            prompts: A text, a list of ids, `{"prompt": text}` or `{"prompt_token_ids": ids}`,
                or a list of these. Long lists are split into batches that fit.
            sampling_params: One for all prompts, one a prompt, or none for the defaults.
            use_tqdm: True to show a progress bar on stderr.

        Raises:
            ConfigError: If a prompt or its options do not fit; nothing has run then, and the
                message names the prompt's index.
            GenerationInterrupted: On Ctrl-C; a `KeyboardInterrupt` with the results so far.
            GenerationError: If a batch fails; it has the results so far, too.
        """
        return self._generate(self._read(prompts, sampling_params), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
        use_tqdm: bool = False,
    ) -> list[RequestOutput]:
        """The replies to one conversation or to a list of conversations.

        Args:
            messages: A list of `{"role": ..., "content": ...}`, or a list of such lists.
            sampling_params: As for `generate`.
            add_generation_prompt: True to open the assistant's turn.
            chat_template: Jinja text instead of the tokenizer's own template.
            use_tqdm: True to show a progress bar on stderr.

        Raises:
            ConfigError: If there is no template, and as for `generate`.
        """
        is_one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: Any = [messages] if is_one else messages
        prompts = [
            self.render_chat(
                turns, add_generation_prompt=add_generation_prompt, chat_template=chat_template
            )
            for turns in conversations
        ]
        # The template writes the special tokens itself.
        requests = self._read(prompts, sampling_params, add_special_tokens=False)
        return self._generate(requests, use_tqdm)

    def render_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        chat_template: str | None = None,
    ) -> str:
        """The text that a conversation becomes before it is tokenized.

        Raises:
            ConfigError: If there is no tokenizer or no template.
        """
        if self.tokenizer is None:
            raise ConfigError("chat needs a tokenizer, and this model's folder has none.")
        return self.tokenizer.apply_chat_template(
            messages, add_generation_prompt=add_generation_prompt, chat_template=chat_template
        )

    def iter_generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> Iterator[RequestOutput]:
        """Like `generate`, but yields each request's output as soon as it is complete.

        `RequestOutput.index` tells which prompt it belongs to. Everything is checked before
        this returns; closing the iterator stops the running batch.
        """
        requests = self._read(prompts, sampling_params)
        return self._finished(self._rows(requests), requests)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamEvent]:
        """Yields an event for every finished block of every sample of one prompt.

        The texts of a sample's events join to its final text. The prompt is checked before
        this returns. Closing the iterator aborts the request; another call of this object has
        to wait until the iterator is exhausted or closed.
        """
        requests = self._read([prompt], sampling_params)
        return self._stream(requests, self._rows(requests))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Iterator[StreamEvent]:
        """Like `stream`, for a conversation."""
        prompt = self.render_chat(messages)
        requests = self._read([prompt], sampling_params, add_special_tokens=False)
        return self._stream(requests, self._rows(requests))

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> list[int]:
        """The ids of a prompt that may be generated from with these options.

        Raises:
            ConfigError: If `generate` would refuse it.
        """
        return list(self._request(prompt, sampling_params, True).prompt_token_ids)

    def update_params(self, params: Mapping[str, Any]) -> None:
        """Swaps the weights in place; programs stay compiled. The next call uses the new ones.

        Args:
            params: Nested dict with the structure, shapes and dtypes of the present ones.

        Raises:
            ConfigError: If they differ in any of these; the old weights stay.
        """
        self._acquire()  # a batch that is running has keys and values of the old weights
        try:
            self.runner.params = dict(params)
        finally:
            self._in_use.release()

    def _request(self, prompt: Prompt, params: SamplingParams, special: bool) -> Request:
        text, ids = read_prompt(prompt, self.tokenizer, add_special_tokens=special)
        has_text = self.tokenizer is not None
        check_request(ids, params, self.config, self.max_model_len, has_text=has_text)
        return Request(prompt=text, prompt_token_ids=ids, sampling=params)

    def _read(
        self, prompts: Any, sampling_params: Any, *, add_special_tokens: bool = True
    ) -> list[Request]:
        listed = list_prompts(prompts)
        requests = []
        for index, (prompt, params) in enumerate(
            zip(listed, pair_params(sampling_params, len(listed)), strict=True)
        ):
            try:
                requests.append(self._request(prompt, params, add_special_tokens))
            except ConfigError as error:
                raise ConfigError(f"prompt {index}: {error}") from error
        return requests

    def _rows(self, requests: Sequence[Request]) -> list[Row]:
        rows = []
        for index, request in enumerate(requests):
            params = request.sampling
            for sample, seed in enumerate(sample_seeds(params)):
                text = None
                if self.tokenizer is not None:
                    text = TextStream(
                        self.tokenizer.decode, params.stop or (), self.tokenizer.byte_pieces
                    )
                row_request = RowRequest(
                    prompt_token_ids=request.prompt_token_ids, sampling=params, seed=seed
                )
                progress = RowProgress(params, self.config.stop_token_ids, text)
                rows.append(
                    Row(
                        request_index=index,
                        sample_index=sample,
                        request=row_request,
                        sampling=params,
                        progress=progress,
                    )
                )
        return rows

    def _acquire(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is busy with another call: exhaust or close the iterator of stream() "
                "or iter_generate() first"
            )

    def _running(self, rows: Sequence[Row]) -> Generator[Row]:
        self._acquire()
        try:
            yield from run_rows(self.runner, rows)
        finally:
            self._in_use.release()

    def _generate(self, requests: Sequence[Request], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        rows = self._rows(requests)
        done: dict[int, RequestOutput] = {}
        try:
            with (
                tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as bar,
                contextlib.closing(self._finished(rows, requests)) as finished,
            ):
                tokens = 0
                for output in finished:
                    done[output.index] = output
                    tokens += output.stats.generated_tokens
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1.0
                    bar.set_postfix_str(f"{tokens / elapsed:.1f} tokens/s", refresh=False)
        except KeyboardInterrupt as error:
            raise GenerationInterrupted(partial_outputs(rows, requests, done)) from error
        except Exception as error:
            message = f"generation failed: {type(error).__name__}: {error}"
            raise GenerationError(message, partial_outputs(rows, requests, done)) from error
        return [done[index] for index in range(len(requests))]

    def _finished(
        self, rows: Sequence[Row], requests: Sequence[Request]
    ) -> Generator[RequestOutput]:
        left = {index: request.sampling.n for index, request in enumerate(requests)}
        grouped = by_request(rows)
        with contextlib.closing(self._running(rows)) as running:
            for row in running:
                if row.progress.finish_reason is not None:
                    index = row.request_index
                    left[index] -= 1
                    if left[index] == 0:
                        yield request_output(index, requests[index], grouped.pop(index))

    def _stream(self, requests: Sequence[Request], rows: Sequence[Row]) -> Generator[StreamEvent]:
        reported = [0] * len(rows)
        ended = 0
        with contextlib.closing(self._running(rows)) as running:
            for row in running:
                progress = row.progress
                ended += progress.finish_reason is not None
                new_ids = progress.token_ids[reported[row.sample_index] :]
                reported[row.sample_index] += len(new_ids)
                yield StreamEvent(
                    index=row.sample_index,
                    text=progress.take_text(),
                    token_ids=new_ids,
                    steps=progress.steps_per_block[-1],
                    finish_reason=progress.finish_reason,
                    output=request_output(0, requests[0], rows) if ended == len(rows) else None,
                )
