"""The tiny model's training code on shapes small enough for a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array
from tokenizers import Tokenizer

from examples.train_tiny import data, decode, export, model, muon, stories, tokenizer
from examples.train_tiny.attention import attention
from examples.train_tiny.tasks import CELLS, Prose, Tasks, held_out_prose, prompt

SHAPE = model.Shape(
    vocabulary=2048, layers=2, hidden=32, intermediate=48, heads=4, kv_heads=2, head_dim=16
)


@pytest.fixture(scope="module")
def encoder() -> Tokenizer:
    return tokenizer.load()


@pytest.fixture(scope="module")
def prose(encoder: Tokenizer) -> Prose:
    return held_out_prose(encoder)


@pytest.fixture(scope="module")
def batch(encoder: Tokenizer, prose: Prose) -> dict[str, np.ndarray]:
    mixture = data.Mixture(shares={"kv": 0.5, "list": 0.3, "lm": 0.2}, questions=0.5)
    tasks, rng = Tasks(encoder, prose), np.random.default_rng(1)
    documents = [data.document(rng, tasks, prose, mixture, 256) for _ in range(4)]
    return data.noise(rng, documents, mixture, 3)


def test_kernel_and_twin_agree_in_value_and_gradient() -> None:
    rows, clean, blocks = 2, 128, 3
    rng = np.random.default_rng(0)
    noised = np.sort(rng.integers(0, clean // 32, (rows, blocks)), axis=1)
    prefix = np.concatenate([np.tile(np.arange(clean // 32), (rows, 1)), noised], axis=1)
    tokens = clean + 32 * blocks
    hidden = np.zeros((rows, tokens), np.int32)
    hidden[0, clean : clean + 20] = hidden[1, clean + 32 : clean + 64] = 1

    def normal(heads: int) -> Array:
        return jnp.asarray(rng.normal(size=(rows, tokens, heads, 16)), jnp.float32)

    inputs, grad = (normal(4), normal(2), normal(2)), normal(4)
    results = []
    for kernel in (True, False):

        def run(q: Array, k: Array, v: Array, kernel: bool = kernel) -> Array:
            static = (jnp.asarray(prefix, jnp.int32), jnp.asarray(hidden), clean)
            return attention(q, k, v, *static, kernel=kernel, interpret=True)

        out, pullback = jax.vjp(run, *inputs)
        results.append((out, *pullback(grad)))
    for ours, twin in zip(*results, strict=True):
        np.testing.assert_allclose(ours, twin, rtol=2e-5, atol=2e-5)


def test_decoding_sees_what_training_saw(batch: dict[str, np.ndarray]) -> None:
    batch = batch | {"hidden": np.zeros_like(batch["hidden"])}
    params = model.init(jax.random.key(0), SHAPE)
    trained = model.noised_logits(params, batch, SHAPE, kernel=False)
    cache = decode.prefill(params, jnp.asarray(batch["clean"], jnp.int32), SHAPE, False)
    for m in range(batch["block"].shape[1]):
        tokens = jnp.asarray(batch["noised"][:, m], jnp.int32)
        block = jnp.asarray(batch["block"][:, m])
        logits, _ = decode.run_block(params, cache, tokens, block, SHAPE)
        np.testing.assert_allclose(logits, trained[:, m], rtol=1e-4, atol=1e-4)


def test_noise_touches_learned_tokens_only(batch: dict[str, np.ndarray]) -> None:
    masked = batch["noised"] == data.MASK
    assert (batch["noised"][~masked] == batch["target"][~masked]).all()
    assert (batch["weight"] > 0)[masked].all() and not batch["weight"][~masked].any()
    assert masked[batch["hidden"]].all()
    assert (np.diff(batch["block"], axis=1) >= 0).all()


def test_answers_end_anywhere_in_a_block(encoder: Tokenizer, prose: Prose) -> None:
    tasks, rng = Tasks(encoder, prose), np.random.default_rng(2)
    mixture = data.Mixture(shares={"cwe": 1.0}, questions=0.3)
    docs = [data.document(rng, tasks, prose, mixture, 256) for _ in range(40)]
    assert len({doc.spans[-1][1] % data.BLOCK for doc in docs}) > 10


@pytest.mark.parametrize("cell", CELLS)
def test_prompt_is_text_and_holds_its_answer(cell: str, encoder: Tokenizer, prose: Prose) -> None:
    one, again = (prompt(cell, 640, 3, encoder, prose) for _ in range(2))
    assert one == again and 480 < len(one.ids) <= 512
    text = encoder.decode(one.ids, skip_special_tokens=False)
    assert encoder.encode(text).ids == one.ids
    if one.answers is not None:
        assert one.contained(text) and one.exact(one.answers[0])


def test_stories_are_recognised() -> None:
    question, text, hero = stories.story(np.random.default_rng(0))
    assert hero in text and stories.well_formed(text)
    assert not stories.well_formed(text.replace("From that", "From what").replace("was", "is"))


def test_export_keeps_every_value(tmp_path: Path) -> None:
    params = model.init(jax.random.key(0), SHAPE)
    export.write(params, SHAPE, tmp_path)
    loaded = export.from_hf(tmp_path / "model.safetensors", SHAPE)
    for name, array in params.items():
        np.testing.assert_array_equal(loaded[name], np.asarray(array.astype(jnp.bfloat16)))


def test_one_muon_step_lowers_a_quadratic() -> None:
    params = model.init(jax.random.key(0), SHAPE)
    grads = jax.tree.map(lambda a: 2 * a, params)
    new, state = jax.jit(muon.update)(params, grads, muon.init(params), jnp.float32(1.0))
    assert int(state["step"]) == 1
    for name in model.MATRICES:
        assert jnp.sum(new[name] ** 2) < jnp.sum(params[name] ** 2)
