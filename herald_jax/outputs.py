"""What a request returns: samples with their text, tokens, trajectory and statistics."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from herald_jax.cache.budget import BlockAccount

FinishReason = Literal["stop", "length", "abort"]
"""`stop`: a stop id or string; `length`: `max_tokens`; `abort`: interrupted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleStats:
    """What one sample cost.

    Attributes:
        steps_per_block: Denoising forwards of each of its blocks.
        generated_tokens: Tokens that count; those behind a stop or past `max_tokens` do not.
        queue_seconds: Time from its arrival in the engine until its prefill began.
        prefill_seconds: Time from there until its first block began.
        decode_seconds: Time from there until it ended; other samples run meanwhile.
        ttft_seconds: Time from its arrival until its first block was there, `None` if none was.
        reused_tokens: Prompt tokens that were not prefilled, as another prompt began alike.
        preemptions: How often it was set back to its last finished block, for want of memory.
        accounts: For each of its blocks, what it attended to in a sparse layer and what was read
            and sent for it; empty with a dense cache.

    No time includes the compilation of programs.
    """

    steps_per_block: list[int]
    generated_tokens: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    ttft_seconds: float | None
    reused_tokens: int
    preemptions: int
    accounts: list[BlockAccount] = dataclasses.field(default_factory=list)

    @property
    def forwards(self) -> int:
        """Denoising passes plus one commit pass a block; the prefill is not counted."""
        return sum(self.steps_per_block) + len(self.steps_per_block)

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens by forwards; 0 if there was none."""
        return self.generated_tokens / self.forwards if self.forwards else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields and the derived numbers, ready for JSON."""
        return {
            **dataclasses.asdict(self),
            "forwards": self.forwards,
            "tokens_per_forward": self.tokens_per_forward,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One sample of a prompt. The four per-token lists are as long as `token_ids`.

    Attributes:
        index: Number of the sample within the request.
        text: Text of `token_ids` without the stop id and special tokens, cut before a stop
            string; empty without a tokenizer.
        token_ids: Generated ids, a stop id included.
        finish_reason: `stop`, `length` or `abort`.
        stop_reason: The stop id or stop string that ended the text, else `None`.
        cumulative_logprob: Sum of `token_logprobs`.
        token_logprobs: Log-probability of each token under the softmax of the raw logits, at
            the step that committed it.
        unmask_steps: Step, within its block and from 0, that committed each token.
        confidences: Confidence with which each token was committed.
        seed: Seed of this sample's random stream; repeats it with `n=1`.
        stats: What the sample cost.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    cumulative_logprob: float
    token_logprobs: list[float]
    unmask_steps: list[int]
    confidences: list[float]
    seed: int
    stats: SampleStats

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            **{f.name: getattr(self, f.name) for f in dataclasses.fields(self)},
            "stats": self.stats.to_dict(),
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestStats:
    """What one request cost, over all its samples.

    Attributes:
        steps_per_block: Denoising forwards of each block, one list a sample.
        forwards: Denoising and commit passes, summed over the samples.
        generated_tokens: Tokens that count, summed over the samples.
        compile_seconds: Time for which it waited for programs to compile; in no other time.
        queue_seconds: Time from its arrival in the engine until its first prefill began.
        prefill_seconds: Time from there until its first block began.
        decode_seconds: Time from there until its last sample ended.
        ttft_seconds: Time from its arrival until its first block was there, `None` if none was.
        reused_tokens: Prompt tokens that were not prefilled, summed over the samples.
        preemptions: How often samples were set back for want of memory, summed.
        kv_device_bytes: KV bytes on the device: the whole page pool, which all requests share.
        kv_host_bytes: The same in host memory.
        kv_request_bytes: Bytes of the pages that its samples held at most, summed; a page that
            several shared counts for each.
    """

    steps_per_block: list[list[int]]
    forwards: int
    generated_tokens: int
    compile_seconds: float
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    ttft_seconds: float | None
    reused_tokens: int
    preemptions: int
    kv_device_bytes: int
    kv_host_bytes: int
    kv_request_bytes: int

    @property
    def tokens_per_forward(self) -> float:
        """Generated tokens by forwards; 0 if there was none."""
        return self.generated_tokens / self.forwards if self.forwards else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens by decoding time; 0 if nothing was decoded."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """The fields and the derived numbers, ready for JSON."""
        return {
            **dataclasses.asdict(self),
            "tokens_per_forward": self.tokens_per_forward,
            "tokens_per_second": self.tokens_per_second,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its samples.

    Attributes:
        index: Number of the prompt within the call.
        prompt: Text of the prompt, `None` if it was given as ids.
        prompt_token_ids: The ids that were decoded from.
        outputs: One entry a sample.
        stats: Totals over the samples.
        error: What went wrong, if a failure ended the request; its samples that had not ended
            then have `finish_reason="abort"`.
    """

    index: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    stats: RequestStats
    error: str | None = None

    @property
    def finished(self) -> bool:
        """True if no sample was aborted."""
        return all(output.finish_reason != "abort" for output in self.outputs)

    def to_dict(self) -> dict[str, Any]:
        """All fields, ready for JSON."""
        return {
            "index": self.index,
            "prompt": self.prompt,
            "prompt_token_ids": self.prompt_token_ids,
            "outputs": [output.to_dict() for output in self.outputs],
            "stats": self.stats.to_dict(),
            "error": self.error,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StreamEvent:
    """One finished block of a streamed sample, or its end.

    Attributes:
        index: Number of the sample.
        text: Text that became final; never taken back. All of a sample's events join to the
            final text. It may be empty while text is held back.
        token_ids: Tokens that the block added.
        steps: Denoising forwards of the block.
        finish_reason: Set on the sample's last event.
        output: The whole request's result, on the very last event.
    """

    index: int
    text: str
    token_ids: list[int]
    steps: int
    finish_reason: FinishReason | None
    output: RequestOutput | None


class GenerationInterrupted(KeyboardInterrupt):
    """Raised when the user interrupts a call; `outputs` holds what there is of each request.

    Samples that had not ended have `finish_reason="abort"` and the text so far.
    """

    def __init__(self, outputs: list[RequestOutput]) -> None:
        """Keeps the results."""
        super().__init__("generation was interrupted")
        self.outputs = outputs


class GenerationError(RuntimeError):
    """Raised when requests failed; the first cause is chained, `outputs` holds what there is.

    The outputs of requests that failed have their `error` set; others of the call are complete.
    Samples that had not ended have `finish_reason="abort"` and the text so far.
    """

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        """Keeps the results."""
        super().__init__(message)
        self.outputs = outputs
