"""Asks the bundled tiny model about one sentence hidden in pages of real text.

    python -m convert assets/tiny-sdar build/tiny-sdar --force
    python examples/demo.py --model build/tiny-sdar

The text is prose that the model was not trained on. The answer is printed block by block, as it is
finished, then what it cost. The exit code is 1 if the answer is wrong. With `--prompt-tokens` the
context can be made longer or shorter. Keys and values of the finished blocks are in host memory,
all layers but the first two; each block attends to a tenth of them, which is on the device.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from herald_jax import LLM, CacheConfig, SamplingParams

TEXT = Path(__file__).resolve().parent.parent / "assets" / "text" / "held-out.txt"
FACT = " The locker number of silver river is 48213."
QUESTION = "What is the locker number of silver river?"
ANSWER = "48213"


def build_context(llm: LLM, prompt_tokens: int, depth: float) -> str:
    """Prose of about that many tokens with the fact at a share `depth` of it."""
    text = TEXT.read_text(encoding="utf-8")
    assert ANSWER not in text and llm.tokenizer is not None
    sentences = re.split(r"(?<=[.?!])(?=\s)", text)
    lengths = [len(llm.tokenizer.encode(sentence)) for sentence in sentences]
    count, total = 0, len(llm.tokenizer.encode(FACT + QUESTION)) + 3
    while count < len(lengths) and total + lengths[count] <= prompt_tokens:
        total += lengths[count]
        count += 1
    at = round(count * depth)
    return "".join([*sentences[:at], FACT, *sentences[at:count]])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--model", default="build/tiny-sdar", help="converted checkpoint")
    parser.add_argument("--prompt-tokens", type=int, default=6000, metavar="N")
    parser.add_argument("--budget", type=float, default=0.1, help="share that a block attends to")
    parser.add_argument("--depth", type=float, default=0.4, help="where the fact stands, 0 to 1")
    options = parser.parse_args()

    params = SamplingParams(max_tokens=96)
    llm = LLM(
        options.model,
        max_model_len=options.prompt_tokens + params.max_tokens,
        max_num_seqs=1,
        cache=CacheConfig(placement="host", budget=options.budget),
    )
    context = build_context(llm, options.prompt_tokens, options.depth)
    messages = [{"role": "system", "content": context}, {"role": "user", "content": QUESTION}]

    print(f"{context[:150].strip()} [...] {context[-100:].strip()}\n\n{QUESTION}\n")
    output = None
    for number, event in enumerate(llm.stream_chat(messages, params), start=1):
        print(f"block {number}, {event.steps} steps: {event.text.strip()}", flush=True)
        output = event.output
    assert output is not None
    answer, stats = output.outputs[0], output.stats
    steps = answer.stats.steps_per_block
    print(f"\nprompt               {len(output.prompt_token_ids)} tokens, of text never trained on")
    print(f"prefill              {stats.prefill_seconds:.2f} s")
    print(f"compilation          {stats.compile_seconds:.2f} s, kept for the next run")
    print(f"generated            {stats.generated_tokens} tokens in {stats.decode_seconds:.2f} s")
    print(f"tokens/s             {stats.tokens_per_second:.1f}")
    print(f"steps per block      {sum(steps) / len(steps):.2f}, block of {llm.config.block_length}")
    print(f"tokens per forward   {stats.tokens_per_forward:.2f}")
    print(f"KV on the device     {stats.kv_device_bytes:,} bytes")
    shape, itemsize = llm.engine.sizes.sparse, llm.engine.itemsize
    assert shape is not None
    for part, count in shape.device_parts(llm.config, itemsize).items():
        print(f"  {part:<19}{count:,} bytes")
    print(f"KV in host memory    {stats.kv_host_bytes:,} bytes")
    last = answer.stats.accounts[-1]
    print(f"attended, last block {last.counts.attended} tokens of each sparse layer: {last.counts}")
    if ANSWER not in answer.text:
        print(f"\nWRONG: {ANSWER} is not in the answer {answer.text!r}", file=sys.stderr)
        return 1
    print(f"\nThe answer is right: {ANSWER}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
