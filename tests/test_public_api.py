"""The list of public names, and what importing them costs."""

from __future__ import annotations

import importlib

import pytest

import herald_jax

PUBLIC = {
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
}


def test_public_names():
    assert set(herald_jax.__all__) == PUBLIC
    assert set(dir(herald_jax)) >= PUBLIC


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_each_name_has_a_docstring_and_one_home(name):
    value = getattr(herald_jax, name)
    assert value.__name__ == name
    assert value.__doc__
    assert getattr(importlib.import_module(value.__module__), name) is value


def test_unknown_names_are_attribute_errors():
    with pytest.raises(AttributeError, match="no attribute 'LLMEngine'"):
        _ = herald_jax.LLMEngine


def test_import_loads_nothing_heavy(run_python):
    run_python(
        "import sys, herald_jax\n"
        "from herald_jax import RequestOutput, ConfigError\n"
        "heavy = {'jax', 'flax', 'numpy', 'torch', 'transformers', 'tokenizers'}\n"
        "assert not heavy & set(sys.modules), heavy & set(sys.modules)"
    )
