"""`SamplingParams`: every option checked, none silently dropped."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from herald_jax._checks import ConfigError
from herald_jax.sampling import SamplingParams


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": 2.0}, "max_tokens=2.0"),
        ({"n": 0}, "n=0"),
        ({"n": True}, "n=True"),
        ({"temperature": -0.1}, "temperature=-0.1"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": "hot"}, "temperature='hot'"),
        ({"top_k": -1}, "top_k=-1.*0 to keep all"),
        ({"top_p": 0.0}, "top_p=0.0"),
        ({"top_p": 1.01}, "top_p=1.01"),
        ({"top_p": float("nan")}, "top_p=nan"),
        ({"seed": -1}, "seed=-1"),
        ({"seed": 2**32}, "seed=4294967296"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a", 3]}, "stop"),
        ({"stop": 3}, "stop=3"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": "1"}, "stop_token_ids"),
        ({"stop_token_ids": [1.0]}, "stop_token_ids"),
        ({"ignore_eos": 1}, "ignore_eos=1"),
        ({"strategy": "random"}, "strategy='random'.*low_confidence_dynamic.*sequential"),
        ({"confidence": "entropy"}, "confidence='entropy'.*filtered, raw, scaled"),
        ({"confidence": "scaled"}, "confidence='scaled'.*temperature 0"),
        ({"confidence": "filtered"}, "confidence='filtered'"),
        ({"denoising_steps": 0}, "denoising_steps=0"),
        ({"threshold": 1.5}, "threshold=1.5"),
        ({"threshold": 0.9, "strategy": "sequential"}, "threshold=0.9.*sequential"),
        ({"entropy_bound": 0.3}, "entropy_bound=0.3.*low_confidence_dynamic"),
        ({"factor": 1.0}, "factor=1.0.*low_confidence_dynamic"),
        ({"factor": -0.5, "strategy": "factor"}, "factor=-0.5"),
        ({"entropy_bound": -1.0, "strategy": "entropy_bounded"}, "entropy_bound=-1.0"),
        (
            {"threshold": 0.9, "entropy_bound": 0.3, "strategy": "entropy_bounded"},
            "threshold=0.9.*entropy_bounded",
        ),
    ],
)
def test_values_that_cannot_be_used_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SamplingParams(**options)


def test_single_items_and_lists_become_tuples() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4])
    assert params.stop == ("end",) and params.stop_token_ids == (3, 4)
    assert hash(params) == hash(SamplingParams(stop=["end"], stop_token_ids=(3, 4)))
    assert SamplingParams(stop_token_ids=7).stop_token_ids == (7,)  # type: ignore[arg-type]
    assert SamplingParams().stop == () and SamplingParams().stop_token_ids == ()


def test_falsy_stops_are_not_dropped() -> None:
    """Id 0 counts, and an empty stop string is refused, alone as in a list."""
    assert SamplingParams(stop_token_ids=0).stop_token_ids == (0,)  # type: ignore[arg-type]
    assert SamplingParams(stop_token_ids=[0]).stop_token_ids == (0,)
    with pytest.raises(ConfigError, match="stop"):
        SamplingParams(stop="")


def test_rule_options_have_defaults() -> None:
    assert SamplingParams().rule_option == 0.9
    assert SamplingParams(threshold=0.25).rule_option == 0.25
    assert SamplingParams(threshold=0).rule_option == 0.0
    assert SamplingParams(strategy="entropy_bounded").rule_option == 0.35
    assert SamplingParams(strategy="sequential").rule_option == 0.0
    assert SamplingParams(strategy="threshold").rule_option == 0.9
    assert SamplingParams(strategy="factor").rule_option == 1.0


def test_limits_are_inclusive() -> None:
    params = SamplingParams(
        max_tokens=1, temperature=1e4, top_p=1.0, seed=2**32 - 1, threshold=1.0, denoising_steps=1
    )
    assert dataclasses.replace(params, seed=0).seed == 0


def test_options_are_checked_against_the_model() -> None:
    SamplingParams(denoising_steps=4, stop_token_ids=[60]).check_against(4, 61)
    with pytest.raises(ConfigError, match=r"denoising_steps=5.*1\.\.4"):
        SamplingParams(denoising_steps=5).check_against(4, 61)
    with pytest.raises(ConfigError, match="stop_token_ids=61.*61"):
        SamplingParams(stop_token_ids=[61]).check_against(4, 61)
