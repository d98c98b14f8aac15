"""`herald generate`: text for one prompt, or for a file of prompts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError
from herald_jax.commands.cache_option import CacheAction
from herald_jax.outputs import RequestOutput, RequestStats

if TYPE_CHECKING:
    from herald_jax.sampling import SamplingParams

HELP = "Generate text for a prompt, or for a file of prompts."

# Options named after the arguments of LLM and the fields of SamplingParams. Only those that were
# given reach them, so that every default is written down once, in the library.
MODEL_OPTIONS: dict[str, dict[str, Any]] = {
    "dtype": dict(help="auto, bfloat16 or float32; auto is bfloat16 on a GPU"),
    "mask_token_id": dict(type=int, metavar="ID", help="mask id, instead of the checkpoint's"),
    "block_length": dict(type=int, metavar="N", help="block length, instead of the checkpoint's"),
    "max_model_len": dict(type=int, metavar="N", help="most tokens of prompt and output together"),
    "max_num_seqs": dict(type=int, metavar="N", help="most samples decoded at the same time"),
    "device_memory_fraction": dict(
        type=float, metavar="F", help="share of the device's memory to use"
    ),
    "kv_cache_bytes": dict(type=int, metavar="N", help="bytes of the KV cache"),
    "max_prefill_tokens": dict(
        type=int, metavar="N", help="prompt tokens that share a step with samples that decode"
    ),
    "run_ahead": dict(
        type=int, metavar="N", help="steps sent to the device before the first of them is read"
    ),
    "share_prefixes": dict(
        action=argparse.BooleanOptionalAction, help="reuse the cache of prompts that begin alike"
    ),
    "cache": dict(
        nargs="*",
        action=CacheAction,
        metavar="FIELD=VALUE",
        help="sparse KV cache, as placement=host budget=0.1 (a share; budget=64: tokens); "
        "fields of CacheConfig",
    ),
    "tokenizer": dict(metavar="DIR", help="folder of another tokenizer than the model's"),
}
SAMPLING_OPTIONS: dict[str, dict[str, Any]] = {
    "max_tokens": dict(type=int, metavar="N", help="most tokens to generate"),
    "n": dict(type=int, metavar="N", help="independent samples of each prompt"),
    "temperature": dict(type=float, metavar="T", help="0 takes the most probable token"),
    "top_k": dict(type=int, metavar="K", help="keep the K most probable tokens; 0 keeps all"),
    "top_p": dict(type=float, metavar="P", help="keep tokens up to this total probability"),
    "seed": dict(type=int, metavar="S", help="repeats a generation; fresh if left out"),
    "stop": dict(action="append", metavar="TEXT", help="text that ends the output; repeatable"),
    "stop_token_ids": dict(type=int, nargs="+", metavar="ID", help="ids that end the output"),
    "ignore_eos": dict(action="store_true", help="go on past the model's own stop ids"),
    "strategy": dict(help="unmask rule, such as low_confidence_dynamic; a wrong name lists all"),
    "threshold": dict(
        type=float,
        metavar="C",
        help="confidence asked by low_confidence_dynamic, threshold, sub_blocks",
    ),
    "entropy_bound": dict(
        type=float, metavar="NATS", help="what entropy_bounded may commit a step"
    ),
    "factor": dict(type=float, metavar="F", help="how much doubt factor allows; 1 if left out"),
    "denoising_steps": dict(type=int, metavar="N", help="most denoising steps of a block"),
    "confidence": dict(help="distribution that confidences come from: raw, scaled or filtered"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--model", required=True, help="converted folder, Hugging Face folder or hub id"
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT")
    source.add_argument(
        "--prompt-file", metavar="FILE", help="text file without its last line break; - reads stdin"
    )
    source.add_argument("--input", metavar="JSONL", help="file of prompts; needs --output")
    parser.add_argument(
        "--output", metavar="JSONL", help="results of --input; a run that was ended goes on there"
    )
    parser.add_argument(
        "--restart", action="store_true", help="replace the results in --output, do not go on"
    )
    parser.add_argument(
        "--chat", action="store_true", help="put the prompt into the model's chat template"
    )
    parser.add_argument("--system", metavar="TEXT", help="system message before it, with --chat")
    parser.add_argument("--json", action="store_true", help="one JSON object per result on stdout")
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        help="progress bar of --input on stderr; default: if stderr is a terminal",
    )
    for title, options in (("model", MODEL_OPTIONS), ("sampling", SAMPLING_OPTIONS)):
        group = parser.add_argument_group(title)
        for name, settings in options.items():
            flag = "--" + name.replace("_", "-")
            group.add_argument(flag, dest=name, default=argparse.SUPPRESS, **settings)


def run(options: argparse.Namespace) -> int:
    """Generates and returns the exit code."""
    _check_combination(options)
    from herald_jax.llm import LLM
    from herald_jax.sampling import SamplingParams

    params = SamplingParams(**_given(options, SAMPLING_OPTIONS))
    model_options = _given(options, MODEL_OPTIONS)
    if options.input is not None:
        return _run_file(options, params, model_options)
    prompt = _read_prompt(options)
    llm = LLM(options.model, **model_options)
    if options.chat:
        messages = [{"role": "user", "content": prompt}]
        if options.system is not None:
            messages.insert(0, {"role": "system", "content": options.system})
        if options.json or params.n > 1:
            _print_result(llm.chat(messages, params)[0], options.json)
        else:
            _print_stream(llm.stream_chat(messages, params))
    elif options.json or params.n > 1:
        _print_result(llm.generate(prompt, params)[0], options.json)
    else:
        _print_stream(llm.stream(prompt, params))
    return 0


def _given(options: argparse.Namespace, names: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(options, name) for name in names if hasattr(options, name)}


def _check_combination(options: argparse.Namespace) -> None:
    """Refuses options that would have no effect."""
    faults = [
        (options.input is not None and options.output is None, "--input needs --output"),
        (options.input is None and options.output is not None, "--output needs --input"),
        (options.restart and options.input is None, "--restart needs --input and --output"),
        (options.progress is not None and options.input is None, "--progress needs --input"),
        (options.chat and options.input is not None, "--chat does not go with --input"),
        (options.system is not None and not options.chat, "--system needs --chat"),
    ]
    found = [message for is_fault, message in faults if is_fault]
    if found:
        raise ConfigError("; ".join(found))


def _read_prompt(options: argparse.Namespace) -> str:
    if options.prompt is not None:
        return options.prompt
    try:
        if options.prompt_file == "-":
            text = sys.stdin.read()
        else:
            text = Path(options.prompt_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompt-file {options.prompt_file}: {error}") from error
    return text.removesuffix("\n")  # editors put it there, and a model would go on after it


def _print_stream(events: Any) -> None:
    """Prints text as it becomes final."""
    output = None
    for event in events:
        print(event.text, end="", flush=True)
        output = event.output
    print()
    if output is not None:
        _print_stats(output.stats)


def _print_result(output: RequestOutput, as_json: bool) -> None:
    if as_json:
        print(json.dumps(output.to_dict(), ensure_ascii=False), flush=True)
        return
    for sample in output.outputs:
        print(f"--- sample {sample.index}")
        print(sample.text)
    _print_stats(output.stats)


def _print_stats(stats: RequestStats) -> None:
    steps = [count for sample in stats.steps_per_block for count in sample]
    print(
        f"{stats.generated_tokens} tokens in {stats.decode_seconds:.2f} s "
        f"({stats.tokens_per_second:.1f} tokens/s), {sum(steps) / max(len(steps), 1):.2f} steps "
        f"per block, {stats.tokens_per_forward:.2f} tokens per forward; "
        f"prefill {stats.prefill_seconds:.2f} s, compilation {stats.compile_seconds:.2f} s",
        file=sys.stderr,
    )


def _run_file(
    options: argparse.Namespace, params: SamplingParams, model_options: dict[str, Any]
) -> int:
    from tqdm import tqdm

    from herald_jax.batch_file import ResultFile, model_identity, read_items, run_file
    from herald_jax.llm import LLM

    items = read_items(options.input, params)
    if Path(options.output).exists() and Path(options.input).samefile(options.output):
        raise ConfigError("--input and --output are the same file")
    show = sys.stderr.isatty() if options.progress is None else options.progress
    with ResultFile(options.output, restart=options.restart) as results:
        llm = LLM(options.model, **model_options)
        named = ("dtype", "tokenizer", "mask_token_id", "block_length")
        given = {name: model_options[name] for name in named if name in model_options}
        identity = model_identity(options.model, **given)
        old, tokens = len(results.records), 0
        records = run_file(llm, items, results, identity)
        with tqdm(total=len(items), initial=old, unit="prompt", disable=not show) as bar:
            for record in records:
                tokens += record["stats"]["generated_tokens"]
                bar.update()
                if options.json:
                    print(json.dumps(record, ensure_ascii=False), flush=True)
    print(
        f"{len(items) - old} prompts done, {old} were there; {tokens} tokens generated; "
        f"results in {options.output}",
        file=sys.stderr,
    )
    return 0
