"""A commit schedule recorded from a trained model, and the rule that replays it.

Random weights never pass a confidence threshold, so their blocks would take any number of steps
that the benchmark likes. `schedule.json` holds, for rows of the tiny model, the step at which
each position of each block was committed (`low_confidence_dynamic`, a low threshold);
`python -m benchmarks.schedule` records it anew.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from herald_jax.decoding.rules import RULES, BlockView
from herald_jax.decoding.rules.base import register_rule

FILE = Path(__file__).parent / "schedule.json"

ROWS, BLOCKS, PROMPT_CHARACTERS = 16, 8, 600

THRESHOLD = 0.4
"""So low that blocks take very different numbers of steps."""


def schedule(block_length: int) -> Int[np.ndarray, "N blocks B"]:
    """Step of every position; blocks of another length take what fits, or repeat it."""
    steps = np.asarray(json.loads(FILE.read_text(encoding="utf-8"))["steps"], np.int32)
    return np.resize(steps, (*steps.shape[:2], block_length)) if block_length else steps


@register_rule
@dataclasses.dataclass(frozen=True)
class Recorded:
    """Commits, in each row by its seed, what the recorded row committed at that step."""

    unused: Float[Any, " R"]
    option: ClassVar[str | None] = None
    option_default: ClassVar[float | None] = None

    @classmethod
    def of_rows(cls, options: Float[Any, " R"]) -> Self:
        return cls(options)

    def __call__(self, view: BlockView) -> Bool[Array, "R B"]:
        table = jnp.asarray(schedule(view.is_masked.shape[1]))
        row = (view.seed % table.shape[0]).astype(jnp.int32)
        steps: jax.Array = table[row, view.block % table.shape[1]]
        return view.is_masked & (steps <= view.step[:, None])


def use() -> None:
    """Makes the strategy `recorded` known."""
    RULES["recorded"] = Recorded


def main() -> None:
    """Records rows of the tiny model."""
    from herald_jax import LLM, SamplingParams

    root = Path(__file__).parents[1] / "assets"
    text = (root / "text" / "held-out.txt").read_text(encoding="ascii")
    prompts = [text[at * 3000 : at * 3000 + PROMPT_CHARACTERS] for at in range(ROWS)]
    llm = LLM(str(root / "tiny-sdar"), max_model_len=1024, max_num_seqs=ROWS)
    block = llm.config.block_length
    assert llm.tokenizer is not None
    ids = [llm.tokenizer.encode(prompt)[: 4 * block] for prompt in prompts]
    sampling = SamplingParams(
        max_tokens=BLOCKS * block,
        ignore_eos=True,
        strategy="low_confidence_dynamic",
        threshold=THRESHOLD,
    )
    outputs = llm.generate(ids, sampling)
    steps = [
        np.asarray(output.outputs[0].unmask_steps).reshape(BLOCKS, block).tolist()
        for output in outputs
    ]
    FILE.write_text(json.dumps({"model": "tiny-sdar", "steps": steps}) + "\n", encoding="utf-8")
    counts = np.asarray(steps).max(-1) + 1
    print(f"steps of a block: mean {counts.mean():.2f}, {counts.min()} to {counts.max()}")


if __name__ == "__main__":
    main()
