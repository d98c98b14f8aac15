"""Blocks whose tokens may be replaced, against the NumPy loop and diffusers' scheduler."""

from __future__ import annotations

import dataclasses
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from herald_jax import ConfigError, SamplingParams, generate, pad_prompts
from herald_jax.cache.dense import DenseCache
from herald_jax.decoding.editing import Editing, decode_edited_block, edit_step
from herald_jax.decoding.options import decoding_options, proposal_spec
from herald_jax.decoding.steps import BlockState
from tests.decoding.test_generate import CONFIG, oracle_params, params_of, prompt_of
from tests.oracle import MARGIN, assert_row, decode
from tests.stub_decoder import StubDecoder, logits_for, stub_config

LENGTHS = (0, 1, 3, 4, 6, 9)
DYNAMIC = {"strategy": "low_confidence_dynamic", "threshold": 0.3}


def run(sampling: SamplingParams, editing: Editing | None, lengths: Any = LENGTHS) -> Any:
    prompts = [prompt_of(length) for length in lengths]
    padded, sizes = pad_prompts([*prompts, [0] * 12])
    seeds = np.arange(len(prompts), dtype=np.uint32)
    return generate(
        params_of("plain"), padded[:-1], sizes[:-1], seeds,
        model=CONFIG, sampling=sampling, editing=editing,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("options", "editing"),
    [
        (DYNAMIC, Editing(threshold=0.2)),
        ({**DYNAMIC, "temperature": 0.7, "ignore_eos": True}, Editing(threshold=0.1, max_steps=3)),
        ({"strategy": "sequential", "denoising_steps": 2}, Editing(threshold=0.0, max_steps=1)),
    ],
)
def test_equals_the_numpy_loop(options: dict[str, Any], editing: Editing) -> None:
    sampling = SamplingParams(max_tokens=10, **options)
    output = run(sampling, editing)
    rows = [
        decode(CONFIG, oracle_params("plain"), prompt_of(n), seed, sampling, editing=editing)
        for seed, n in enumerate(LENGTHS)
    ]
    clear = [index for index, row in enumerate(rows) if row.margin > MARGIN]
    assert len(clear) >= len(rows) - 2, [row.margin for row in rows]
    assert sum(rows[index].edits for index in clear) > 3
    for index in clear:
        assert_row(output, index, rows[index])


def test_without_replacements_the_text_is_the_same_and_each_block_takes_a_pass_more() -> None:
    sampling = SamplingParams(max_tokens=10, **DYNAMIC)
    plain, edited = (jax.device_get(run(sampling, e)) for e in (None, Editing(threshold=1.0)))
    np.testing.assert_array_equal(plain.tokens, edited.tokens)
    is_block = plain.steps_per_block > 0
    np.testing.assert_array_equal(plain.steps_per_block + is_block, edited.steps_per_block)


def settle(table: np.ndarray, editing: Editing) -> tuple[list[int], int]:
    """Tokens and steps of one block of a table of logits; its first position is a prompt's."""
    config = stub_config()
    sampling = SamplingParams(strategy="low_confidence_static")
    options = jax.tree.map(jnp.asarray, decoding_options([sampling], [0], config))
    state = BlockState.start(
        jnp.zeros(1, jnp.int32), jnp.array([[7, 0, 0, 0]]), jnp.array([[False, True, True, True]])
    )
    cache = DenseCache.zeros(config, 1, 4, jnp.float32)
    active = jnp.ones(1, bool)
    cache, state = decode_edited_block(
        StubDecoder(config, jnp.asarray(table)), cache, state, active, options,
        proposal_spec([sampling]), editing,
    )  # fmt: skip
    assert np.asarray(cache.k[0])[0, 0, :, 0].tolist() == np.asarray(state.tokens)[0].tolist()
    return np.asarray(state.tokens)[0].tolist(), int(state.steps[0])


def test_a_token_is_replaced_when_the_model_changes_its_mind() -> None:
    """Also while masks are left; a token of the prompt stays, and so does a doubtful one."""
    tables = [
        logits_for([2, 2, 2, 2]),  # no pass settles nothing: the prompt stands
        logits_for([2, 3, 4, 5], [6.0, 7.0, 6.5, 6.0]),
        logits_for([2, 4, 4, 5], [6.0, 6.0, 5.0, 7.0]),
        logits_for([2, 4, 6, 5], [6.0, 6.0, 1.0, 6.0]),
        logits_for([2, 4, 3, 5], [6.0, 6.0, 1.0, 6.0]),
    ]
    tokens, steps = settle(np.stack(tables), Editing(threshold=0.9))
    assert tokens == [7, 4, 6, 5] and steps == 4
    tokens, steps = settle(np.stack(tables), Editing(threshold=0.2))
    assert tokens == [7, 4, 3, 5] and steps == 5


def test_passes_without_masks_are_bounded() -> None:
    table = np.stack([logits_for([2, 3, 4, 5])] * 5)
    assert settle(table, Editing(threshold=0.5))[1] == 4  # three to fill, one that finds nothing
    assert settle(table, Editing(threshold=0.5, max_steps=0))[1] == 3


def test_settings_are_checked() -> None:
    with pytest.raises(ConfigError, match="threshold=1.5"):
        Editing(threshold=1.5)
    with pytest.raises(ConfigError, match="max_steps=-1"):
        Editing(max_steps=-1)
    shifted = dataclasses.replace(CONFIG, shifts_predictions=True)
    zeros = np.zeros((1, 1), np.int32)
    with pytest.raises(ConfigError, match="editing=.*shifts"):
        generate(
            {}, zeros, zeros[0], zeros[0],
            model=shifted, sampling=SamplingParams(), editing=Editing(),
        )  # fmt: skip


@pytest.mark.parity
def test_a_step_is_that_of_diffusers() -> None:
    """One pass over random logits, where some positions are masked and some of the prompt."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        schedulers = pytest.importorskip("diffusers.schedulers.scheduling_block_refinement")
    rng = np.random.default_rng(3)
    config = stub_config(block_length=8, vocab_size=23, mask_token_id=22)
    sampling = SamplingParams(**DYNAMIC, denoising_steps=4)
    options = jax.tree.map(jnp.asarray, decoding_options([sampling], [0], config))
    edits = 0
    for _ in range(40):
        logits = rng.normal(size=(1, 8, 23)).astype(np.float32) * 3
        logits[..., 22] = -100.0
        tokens = rng.integers(0, 22, (1, 8))
        is_masked = rng.random((1, 8)) < rng.choice([0.0, 0.6])
        is_prompt = np.arange(8) < 2
        is_masked &= ~is_prompt
        scheduler = schedulers.BlockRefinementScheduler(
            block_length=8, num_inference_steps=4, threshold=0.3, editing_threshold=0.5
        )
        scheduler.set_timesteps(4)
        wanted = scheduler.step(
            torch.from_numpy(logits), 0, torch.from_numpy(np.where(is_masked, 22, tokens)),
            mask_token_id=22, prompt_mask=torch.from_numpy(is_prompt),
        )  # fmt: skip
        found = one_pass(logits, tokens, is_masked, is_prompt, config, options, sampling)
        edits += int(wanted.editing_transfer_index.sum())
        expected = wanted.prev_sample.numpy()
        is_left = expected == 22
        np.testing.assert_array_equal(np.asarray(found.is_masked), is_left)
        np.testing.assert_array_equal(np.where(is_left, 22, found.tokens), expected)
    assert edits > 20


def one_pass(
    logits: np.ndarray,
    tokens: np.ndarray,
    is_masked: np.ndarray,
    is_prompt: np.ndarray,
    config: Any,
    options: Any,
    sampling: SamplingParams,
) -> BlockState:
    """The block after one step from the middle of its life."""
    state = BlockState.start(
        jnp.zeros(1, jnp.int32), jnp.asarray(tokens, jnp.int32), jnp.asarray(is_masked)
    )
    is_own = jnp.asarray(~is_prompt)[None]
    spec = proposal_spec([sampling])
    return edit_step(config, jnp.asarray(logits), state, is_own, options, spec, 0.5)[0]
