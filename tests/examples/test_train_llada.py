"""The tiny LLaDA's training code on shapes small enough for a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from convert import convert_checkpoint
from examples.train_tiny import llada, llada_data, llada_export, llada_model, model
from examples.train_tiny import tokenizer as tokenizers
from examples.train_tiny.data import KINDS, MASK
from examples.train_tiny.llada_data import Mixture, Text
from examples.train_tiny.tasks import ASSISTANT, EOS, Tasks, held_out_prose
from herald_jax import ModelConfig, load_params
from tests.models.passes import whole_logits

SHAPE = model.Shape(
    layers=2,
    hidden=32,
    intermediate=48,
    heads=2,
    kv_heads=2,
    head_dim=16,
    rope_theta=5e5,
    eps=1e-5,
    qk_norm=False,
    tied=False,
)
SHARES = {"kv": 0.4, "niah": 0.2, "list": 0.2, "lm": 0.2}


def _texts(single: float, count: int, length: int = 256) -> list[Text]:
    encoder = tokenizers.load()
    prose = held_out_prose(encoder)
    tasks, rng = Tasks(encoder, prose), np.random.default_rng(1)
    mixture = Mixture(shares=SHARES, questions=0.5, single=single)
    return [llada_data.text(rng, tasks, prose, mixture, length) for _ in range(count)]


def _head(params: dict) -> Array:
    return params["head"] + jax.random.normal(jax.random.key(1), params["head"].shape) * 0.05


def test_converted_model_computes_what_training_did(tmp_path: Path) -> None:
    params = model.init(jax.random.key(0), SHAPE)
    params = {**params, "head": _head(params)}  # apart from the embedding, as after training
    llada_export.write(params, SHAPE, tmp_path / "hf")
    loaded = llada_export.from_hf(tmp_path / "hf" / "model.safetensors", SHAPE)
    convert_checkpoint(tmp_path / "hf", tmp_path / "ours", dtype="float32", progress=False)
    config = ModelConfig.load(tmp_path / "ours")
    assert (config.family, config.mask_token_id, config.stop_token_ids) == ("llada", MASK, (EOS,))
    ours = load_params(tmp_path / "ours", config, dtype=jnp.float32)
    tokens = np.random.default_rng(0).integers(3, 2048, (2, 48))
    half = jax.tree.map(lambda a: a.astype(jnp.float32), loaded)
    with jax.default_matmul_precision("highest"):
        trained = llada_model.logits(half, jnp.asarray(tokens), SHAPE, fused=False)
        np.testing.assert_allclose(
            whole_logits(config, ours, tokens), trained, rtol=1e-4, atol=1e-4
        )


def test_texts_end_as_decoding_meets_them() -> None:
    for one in _texts(single=0.5, count=30):
        assert len(one.ids) == 256
        if KINDS[one.kind] == "lm":
            continue
        start, end = one.spans[-1]
        assert end == 256 and end - start in llada_data.ROOMS
        assert one.ids[start - 1] == ASSISTANT
        assert (one.ids[one.fill - 1 :] == EOS).all() and EOS not in one.ids[start : one.fill - 1]


def test_noise_hides_answers_only_and_weighs_them_by_their_level() -> None:
    texts = _texts(single=0.5, count=30)
    mixture = Mixture(shares=SHARES, questions=0.5, full=0.0, given=0.0, prose_weight=0.5)
    batch = llada_data.noise(np.random.default_rng(2), texts, mixture)
    masked = batch["tokens"] == MASK
    assert (batch["tokens"][~masked] == batch["target"][~masked]).all()
    assert ((batch["weight"] > 0) == masked).all()
    for one, row, hidden in zip(texts, batch["weight"], masked, strict=True):
        base = 0.5 if KINDS[one.kind] == "lm" else 1.0
        inside = np.zeros(len(row), bool)
        for start, end in one.spans:
            inside[start:end] = True
            levels = base / row[start : min(end, one.fill)][hidden[start : min(end, one.fill)]]
            assert np.allclose(levels, levels[:1]) and (levels >= 0.0999).all()
        assert not hidden[~inside].any()


def test_training_lowers_the_loss() -> None:
    mixture = Mixture(shares={"kv": 1.0}, questions=0.5)
    batch = llada_data.noise(np.random.default_rng(3), _texts(single=0.0, count=4), mixture)
    state, losses = llada.initial_state(SHAPE), []
    with jax.numpy_dtype_promotion("standard"):  # JAX's own attention wants it
        for _ in range(8):
            counts = jnp.zeros((len(KINDS), 3))
            state, new = llada.train_step(state, counts, batch, jnp.float32(0.5), SHAPE, False)
            losses.append(float(new[:, 0].sum() / new[:, 2].sum()))
    assert losses[-1] < losses[0] - 0.3


@pytest.mark.parametrize(("hits", "answer"), [(97, True), (96, False)])
def test_a_stage_ends_when_both_kinds_are_recalled(hits: int, answer: bool) -> None:
    counts = np.zeros((len(KINDS), 3))
    counts[KINDS.index("kv")] = (0, 100, 100)
    counts[KINDS.index("niah")] = (0, hits, 100)
    assert llada.recalls(counts) is answer


def test_the_rate_falls_over_the_second_half_of_what_is_left() -> None:
    assert llada.rate_at(0, 0.0, 0.2) == pytest.approx(1 / llada.WARMUP)
    assert llada.rate_at(500, 0.6, 0.2) == 1.0
    assert llada.rate_at(500, 0.8, 0.2) == pytest.approx(0.5)
    assert llada.rate_at(500, 1.0, 0.2) == 0.02
