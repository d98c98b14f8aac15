"""Named query positions and the settings of the selection."""

from __future__ import annotations

import dataclasses

import pytest

from herald_jax import ConfigError
from herald_jax.retrieval import SelectionConfig, query_positions


@pytest.mark.parametrize(
    ("name", "block", "positions"),
    [
        ("all", 4, (0, 1, 2, 3)),
        ("centre", 32, (16,)),
        ("centre", 5, (2,)),
        ("first", 7, (0,)),
        ("even4", 32, (0, 8, 16, 24)),
        ("even3", 16, (0, 5, 10)),
        ("log8", 32, (0, 1, 2, 3, 5, 8, 14, 23)),
        ("log8", 16, (0, 1, 2, 3, 4, 5, 7, 11)),
        ("log8", 64, (0, 2, 4, 6, 10, 16, 28, 46)),
        ("log8", 5, (0, 1, 2, 3, 4)),
    ],
)
def test_named_positions(name, block, positions):
    assert query_positions(name, block) == positions


def test_log8_is_distinct_ascending_and_front_weighted():
    for block in range(1, 130):
        positions = query_positions("log8", block)
        assert len(positions) == min(block, 8)
        assert list(positions) == sorted(set(positions))
        assert positions[0] == 0 and positions[-1] < block
        front = sum(position < block / 2 for position in positions)
        assert front >= len(positions) / 2


@pytest.mark.parametrize(
    "name", ["", "even", "even0", "even-1", "log4", "Centre", 8, None, "even٣"]
)
def test_unknown_sets_are_refused_with_what_is_allowed(name):
    with pytest.raises(ConfigError, match=r"queries=.*even<n>"):
        SelectionConfig(queries=name)


def test_more_positions_than_the_block_has_are_refused():
    assert query_positions("even5", 4) == (0, 1, 2, 3)
    assert query_positions("even4", 4) == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("heads", "sum"),
        ("pooling", "min"),
        ("dilation", -1),
        ("dilation", 1025),
        ("dilation", 1.5),
        ("dilation", True),
        ("dilation_weight", -0.1),
        ("dilation_weight", 1.1),
        ("dilation_weight", float("nan")),
    ],
)
def test_settings_name_the_field_that_is_wrong(field, value):
    with pytest.raises(ConfigError, match=f"^{field}="):
        SelectionConfig(**{field: value})


def test_settings_are_frozen_and_can_key_a_compiled_program():
    spec = SelectionConfig()
    assert spec == SelectionConfig(queries="even16", heads="mean", pooling="max", dilation=8)
    assert hash(spec) == hash(SelectionConfig()) and spec != SelectionConfig(dilation_weight=1.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.dilation = 3  # type: ignore[misc]
