"""`LLM`: a model in memory and the calls that generate with it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from herald_jax import checkpoint
from herald_jax._checks import ConfigError, require
from herald_jax.cache_config import CacheConfig
from herald_jax.configs import ModelConfig
from herald_jax.decoding.options import require_block_decoding
from herald_jax.engine.call import CallRequest, call_outputs, raise_failures, run_call
from herald_jax.engine.config import EngineConfig
from herald_jax.engine.intake import Intake
from herald_jax.engine.live import LiveSample
from herald_jax.engine.llm_engine import LLMEngine
from herald_jax.engine.request import sample_seeds
from herald_jax.model_source import find_checkpoint, resolve_dtype
from herald_jax.models import check_params, copy_params
from herald_jax.outputs import (
    GenerationError,
    GenerationInterrupted,
    RequestOutput,
    StreamEvent,
)
from herald_jax.prompts import Prompt, list_prompts, pair_params
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
        kv_cache_bytes: Bytes of the KV cache; left out, it takes what memory leaves, and no more
            than `max_num_seqs` samples can use.
        max_prefill_tokens: Prompt tokens that share a step with the samples that decode.
        run_ahead: Steps that are sent to the device before the first of them is read.
        share_prefixes: True if prompts reuse the keys and values of equal beginnings.
        cache: A sparse KV cache, on the device or in host memory; left out, everything stays on
            the device and every block attends to all of it.
        tokenizer: Folder of another tokenizer than the model's.

    Attributes:
        config: Description of the model.
        tokenizer: The tokenizer, or `None`: then prompts are lists of ids and texts are empty.
        engine: The queue, the KV cache and the compiled programs.

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
        kv_cache_bytes: int | None = None,
        max_prefill_tokens: int = 512,
        run_ahead: int = 2,
        share_prefixes: bool = True,
        cache: CacheConfig | None = None,
        tokenizer: str | Path | None = None,
    ) -> None:
        # What the engine would refuse is refused before minutes go into reading weights.
        settings = EngineConfig(
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            device_memory_fraction=device_memory_fraction,
            kv_cache_bytes=kv_cache_bytes,
            max_prefill_tokens=max_prefill_tokens,
            run_ahead=run_ahead,
            share_prefixes=share_prefixes,
            cache=cache,
        )
        name = resolve_dtype(dtype)
        enable_compile_cache()
        folder, config = find_checkpoint(
            model, dtype=name, mask_token_id=mask_token_id, block_length=block_length
        )
        require_block_decoding(config, may_shift=cache is None)
        found = Tokenizer.from_folder(folder if tokenizer is None else tokenizer)
        if found is None:
            if tokenizer is not None:
                raise ConfigError(f"tokenizer={str(tokenizer)!r} holds no tokenizer.json.")
            _log.warning("%s has no tokenizer: prompts must be lists of ids", folder)
        params = checkpoint.load_params(folder, dtype=name)
        self._attach(LLMEngine(config, params, settings), found)

    @classmethod
    def from_params(
        cls,
        config: ModelConfig,
        params: Mapping[str, Any],
        *,
        tokenizer: Tokenizer | None = None,
        **settings: Any,
    ) -> Self:
        """An engine over parameters that are in memory already, as in training.

        Args:
            config: Description of the model.
            params: Nested dict in the structure of `models.abstract_params(config)`. They are
                copied, so a trainer may donate its own.
            tokenizer: For text; without one, prompts are lists of ids.
            **settings: Fields of `EngineConfig`, such as `max_model_len` and `max_num_seqs`.
        """
        resolve_dtype("auto")  # says so if there is no device
        enable_compile_cache()
        check_params(config, dict(params))
        own = copy_params(dict(params))
        engine = LLMEngine(config, own, EngineConfig(**settings))
        return cls.from_engine(engine, tokenizer)

    @classmethod
    def from_engine(cls, engine: LLMEngine, tokenizer: Tokenizer | None = None) -> Self:
        """A front for an engine, which nobody else may use meanwhile."""
        llm = cls.__new__(cls)
        llm._attach(engine, tokenizer)
        return llm

    def _attach(self, engine: LLMEngine, tokenizer: Tokenizer | None) -> None:
        self.config = engine.config
        self.engine = engine
        self.tokenizer = tokenizer
        self._intake = Intake(engine.config, tokenizer, engine.sizes.max_model_len)
        self._in_use = threading.Lock()
        self._calls = itertools.count()

    @property
    def max_model_len(self) -> int:
        """Most tokens of a prompt and its generation together."""
        return self.engine.sizes.max_model_len

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
                or a list of these; as many as fit are decoded at the same time, those with the
                largest `max_tokens` first.
            sampling_params: One for all prompts, one a prompt, or none for the defaults.
            use_tqdm: True to show a progress bar on stderr.

        Raises:
            ConfigError: If a prompt or its options do not fit; nothing has run then, and the
                message names the prompt's index.
            GenerationInterrupted: On Ctrl-C; a `KeyboardInterrupt` with the results so far.
            GenerationError: If requests failed, once all others are done; it has all results.
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
    ) -> Generator[RequestOutput]:
        """Like `generate`, but yields each request's output as soon as it is complete.

        `RequestOutput.index` tells which prompt it belongs to. Everything is checked before
        this returns; closing the iterator aborts what is left.

        Raises:
            ConfigError: As for `generate`.
            GenerationError: If requests failed, once all others are done. They were yielded,
                too, with their `error` set.
        """
        return self._finished(self._read(prompts, sampling_params))

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None
    ) -> Generator[StreamEvent]:
        """Yields an event for every finished block of every sample of one prompt.

        The texts of a sample's events join to its final text. The prompt is checked before
        this returns. Closing the iterator aborts the request; another call of this object has
        to wait until the iterator is exhausted or closed.

        Raises:
            ConfigError: As for `generate`.
            GenerationError: If the request failed; it has the partial result.
        """
        return self._stream(self._read([prompt], sampling_params))

    def stream_chat(
        self, messages: Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Generator[StreamEvent]:
        """Like `stream`, for a conversation."""
        prompt = self.render_chat(messages)
        return self._stream(self._read([prompt], sampling_params, add_special_tokens=False))

    def check(self, prompt: Prompt, sampling_params: SamplingParams) -> list[int]:
        """The ids of a prompt that may be generated from with these options.

        Raises:
            ConfigError: If `generate` would refuse it.
        """
        return list(self._intake.request(prompt, sampling_params).prompt_token_ids)

    def update_params(self, params: Mapping[str, Any]) -> None:
        """Swaps the weights in place; programs stay compiled. The next call uses the new ones.

        Args:
            params: Nested dict with the structure, shapes and dtypes of the present ones.

        Raises:
            ConfigError: If they differ in any of these; the old weights stay.
        """
        self._acquire()  # requests that are running have keys and values of the old weights
        try:
            self.engine.update_params(dict(params))
        finally:
            self._in_use.release()

    def warmup(self) -> None:
        """Compiles all programs ahead of time; no later call compiles anything."""
        self._acquire()
        try:
            self.engine.warmup()
        finally:
            self._in_use.release()

    def _read(
        self, prompts: Any, sampling_params: Any, *, add_special_tokens: bool = True
    ) -> list[CallRequest]:
        listed = list_prompts(prompts)
        most = self.engine.settings.max_waiting
        fix = "Ask several times instead."
        requests = []
        for index, (prompt, params) in enumerate(
            zip(listed, pair_params(sampling_params, len(listed)), strict=True)
        ):
            try:
                request = self._intake.request(
                    prompt, params, add_special_tokens=add_special_tokens
                )
                require(params.n <= most, "n", params.n, f"at most max_waiting={most}", fix)
            except ConfigError as error:
                raise ConfigError(f"prompt {index}: {error}") from error
            requests.append(
                CallRequest(
                    index=index,
                    request=request,
                    seeds=sample_seeds(params),
                    progresses=self._intake.progresses(params),
                )
            )
        return requests

    def _acquire(self) -> None:
        if not self._in_use.acquire(blocking=False):
            raise RuntimeError(
                "this LLM is busy with another call: exhaust or close the iterator of stream() "
                "or iter_generate() first"
            )

    def _running(
        self, requests: Sequence[CallRequest]
    ) -> Generator[tuple[CallRequest, LiveSample]]:
        self._acquire()
        try:
            yield from run_call(self.engine, f"call {next(self._calls)}", requests)
        finally:
            self._in_use.release()

    def _generate(self, requests: Sequence[CallRequest], use_tqdm: bool) -> list[RequestOutput]:
        from tqdm import tqdm

        done: dict[int, RequestOutput] = {}
        try:
            with (
                tqdm(total=len(requests), unit="prompt", disable=not use_tqdm) as bar,
                contextlib.closing(self._finished(requests, longest_first=True)) as finished,
            ):
                tokens = 0
                for output in finished:
                    done[output.index] = output
                    tokens += output.stats.generated_tokens
                    bar.update()
                    elapsed = bar.format_dict["elapsed"] or 1.0
                    bar.set_postfix_str(f"{tokens / elapsed:.1f} tokens/s", refresh=False)
        except KeyboardInterrupt as error:
            raise GenerationInterrupted(call_outputs(self.engine, requests)) from error
        except GenerationError:
            raise
        except Exception as error:
            message = f"generation failed: {type(error).__name__}: {error}"
            raise GenerationError(message, call_outputs(self.engine, requests)) from error
        return [done[index] for index in range(len(requests))]

    def _finished(
        self, requests: Sequence[CallRequest], *, longest_first: bool = False
    ) -> Generator[RequestOutput]:
        left = {request.index for request in requests}
        served = requests
        if longest_first:  # else the last long ones run alone at the end, beside empty rows
            served = sorted(requests, key=lambda one: -one.request.sampling.max_tokens)
        with contextlib.closing(self._running(served)) as running:
            for request, _ in running:
                if request.index in left and request.is_done:
                    left.remove(request.index)
                    yield request.output(self.engine)
        raise_failures(self.engine, requests)

    def _stream(self, requests: Sequence[CallRequest]) -> Generator[StreamEvent]:
        (request,) = requests
        reported = [0] * len(request.progresses)
        ended = 0
        with contextlib.closing(self._running(requests)) as running:
            for _, sample in running:
                if request.error is not None:
                    break
                progress, index = sample.progress, sample.sample_index
                try:
                    text = progress.take_text()
                except Exception as error:  # the tokenizer's
                    request.error = error
                    break
                ended += progress.finish_reason is not None
                new_ids = progress.token_ids[reported[index] :]
                reported[index] += len(new_ids)
                yield StreamEvent(
                    index=index,
                    text=text,
                    token_ids=new_ids,
                    steps=progress.steps_per_block[-1],
                    finish_reason=progress.finish_reason,
                    output=request.output(self.engine) if ended == len(reported) else None,
                )
        raise_failures(self.engine, requests)
