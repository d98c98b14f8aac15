"""The run-time checker of shapes and types is on while tests run."""

from __future__ import annotations

import dataclasses
from typing import Protocol, Self

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from herald_jax._checks import ConfigError
from herald_jax.models.rope import rotary_phases
from typecheck import check


class Plain(Protocol):
    """Cannot be tested with `isinstance`."""


def test_a_wrong_rank_is_refused():
    with pytest.raises(TypeCheckError, match="positions"):
        rotary_phases(jnp.zeros((3,), jnp.int32), 8, 10.0)


def test_a_wrong_dtype_is_refused():
    with pytest.raises(TypeCheckError, match="positions"):
        rotary_phases(jnp.zeros((2, 3), jnp.float32), 8, 10.0)


def test_methods_that_return_self_are_checked_in_their_other_arguments():
    class Counter:
        @check
        def plus(self, number: int) -> Self:
            return self

    assert isinstance(Counter().plus(1), Counter)
    with pytest.raises(Exception, match="number"):
        Counter().plus("one")


def test_protocols_without_an_instance_check_are_left_out():
    @check
    def use(thing: Plain, number: int) -> int:
        return number

    assert use(object(), 1) == 1
    with pytest.raises(Exception, match="number"):
        use(object(), "one")


def test_an_int_passes_for_a_float():
    @check
    def half(number: float) -> float:
        return number / 2

    assert half(3) == 1.5


def test_constructors_check_their_arguments_themselves(tiny_config):
    with pytest.raises(ConfigError, match="vocab_size"):
        dataclasses.replace(tiny_config, vocab_size="61")
