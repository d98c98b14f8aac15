"""Block-diffusion language models in JAX.

Names are imported on first use, so that `import herald_jax` is quick and starts no backend.

Example:
    >>> from herald_jax import SamplingParams
    >>> SamplingParams(max_tokens=8, temperature=0.7).strategy
    'low_confidence_dynamic'
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from herald_jax._checks import ConfigError
    from herald_jax.cache_config import CacheConfig
    from herald_jax.checkpoint import load_params
    from herald_jax.configs import ModelConfig
    from herald_jax.decoding.bidirectional import (
        generate_bidirectional,
        generate_bidirectional_program,
    )
    from herald_jax.decoding.canvas import CanvasSampling, generate_canvas
    from herald_jax.decoding.editing import Editing
    from herald_jax.decoding.generate import generate, generate_program, pad_prompts
    from herald_jax.decoding.texts import GenerationOutput
    from herald_jax.engine.async_llm import AsyncLLM
    from herald_jax.engine.config import EngineConfig
    from herald_jax.llm import LLM
    from herald_jax.outputs import (
        CompletionOutput,
        GenerationError,
        GenerationInterrupted,
        RequestOutput,
        RequestStats,
        SampleStats,
        StreamEvent,
    )
    from herald_jax.sampling import SamplingParams

__version__ = "0.1.0"

_HOMES = {
    "LLM": "herald_jax.llm",
    "SamplingParams": "herald_jax.sampling",
    "RequestOutput": "herald_jax.outputs",
    "CompletionOutput": "herald_jax.outputs",
    "RequestStats": "herald_jax.outputs",
    "SampleStats": "herald_jax.outputs",
    "StreamEvent": "herald_jax.outputs",
    "GenerationError": "herald_jax.outputs",
    "GenerationInterrupted": "herald_jax.outputs",
    "GenerationOutput": "herald_jax.decoding.texts",
    "generate": "herald_jax.decoding.generate",
    "generate_program": "herald_jax.decoding.generate",
    "Editing": "herald_jax.decoding.editing",
    "generate_canvas": "herald_jax.decoding.canvas",
    "CanvasSampling": "herald_jax.decoding.canvas",
    "generate_bidirectional": "herald_jax.decoding.bidirectional",
    "generate_bidirectional_program": "herald_jax.decoding.bidirectional",
    "pad_prompts": "herald_jax.decoding.generate",
    "load_params": "herald_jax.checkpoint",
    "AsyncLLM": "herald_jax.engine.async_llm",
    "CacheConfig": "herald_jax.cache_config",
    "EngineConfig": "herald_jax.engine.config",
    "ModelConfig": "herald_jax.configs",
    "ConfigError": "herald_jax._checks",
}

__all__ = [
    "LLM",
    "SamplingParams",
    "RequestOutput",
    "CompletionOutput",
    "RequestStats",
    "SampleStats",
    "StreamEvent",
    "GenerationError",
    "GenerationInterrupted",
    "GenerationOutput",
    "generate",
    "generate_program",
    "Editing",
    "generate_canvas",
    "CanvasSampling",
    "generate_bidirectional",
    "generate_bidirectional_program",
    "pad_prompts",
    "load_params",
    "AsyncLLM",
    "CacheConfig",
    "EngineConfig",
    "ModelConfig",
    "ConfigError",
]


def __getattr__(name: str) -> Any:
    """The public object of that name, imported from the module that defines it."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names, loaded or not."""
    return sorted({*globals(), *__all__})
