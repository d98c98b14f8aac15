"""`herald plan`: what fits in memory, what binds, and which placement would be fastest."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from herald_jax._checks import ConfigError
from herald_jax.commands.cache_option import CacheAction
from herald_jax.commands.fields import parse_fields

if TYPE_CHECKING:
    from herald_jax.planner import Plan, Workload

HELP = "Say how many rows fit, what binds, and which placement would be fastest."

SIZES = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "GiB": 2**30}


def parse_bytes(text: str) -> int:
    """A number of bytes such as `34GB`, `64GiB` or `34000000000`."""
    for unit, size in SIZES.items():
        if text.endswith(unit):
            text, factor = text.removesuffix(unit), size
            break
    else:
        factor = 1
    try:
        found = int(float(text) * factor)
    except ValueError:
        found = 0
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, such as 34GB or 64GiB")
    return found


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    parser.add_argument(
        "--model", required=True, help="converted folder, Hugging Face folder or hub id"
    )
    parser.add_argument(
        "--context", type=int, required=True, metavar="N", help="tokens of prompt and output"
    )
    parser.add_argument("--rows", type=int, metavar="N", help="rows; the fastest if left out")
    parser.add_argument(
        "--device-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="device bytes for keys and values, as 34GB; what the device has beside the weights "
        "if left out",
    )
    parser.add_argument(
        "--host-bytes",
        type=parse_bytes,
        metavar="BYTES",
        help="host bytes that may be pinned; what the machine leaves if left out",
    )
    parser.add_argument(
        "--cache",
        nargs="+",
        action=CacheAction,
        metavar="FIELD=VALUE",
        help="look at this cache alone, fields of CacheConfig; all placements if left out",
    )
    parser.add_argument(
        "--steps", type=int, default=20, metavar="N", help="denoising passes of a block (20)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument(
        "--machine", nargs="+", default=(), metavar="FIELD=VALUE", help="rates of Machine"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object for each placement")


def run(options: argparse.Namespace) -> int:
    """Prints a plan for every placement that fits, and returns the exit code."""
    from herald_jax.machine import Machine
    from herald_jax.model_source import read_model_config
    from herald_jax.planner import Workload, choose, placements, plan_rows

    model = read_model_config(options.model)
    work = Workload(
        model=model,
        context=options.context,
        steps=options.steps,
        itemsize=2 if options.dtype == "bfloat16" else 4,
    )
    machine = Machine(**parse_fields("--machine", options.machine, Machine))
    device, host = _limits(options, work)
    caches = placements() if options.cache is None else (options.cache,)
    plans, refusals = [], []
    for cache in caches:
        try:
            plan = plan_rows(
                work,
                cache,
                device_bytes=device,
                host_bytes=host,
                rows=options.rows,
                machine=machine,
            )
        except ConfigError as error:
            refusals.append(str(error))
        else:
            plans.append(plan)
    if not plans:
        raise ConfigError(" ".join(refusals))
    if not options.json:
        given = f"{device / 1e9:.4g} GB on the device and {host / 1e9:.4g} GB on the host"
        print(f"{work.context} tokens a row, {work.steps} passes a block, {given}")
    for plan in plans:
        print(json.dumps(_facts(plan, work)) if options.json else _text(plan, work))
    for refusal in refusals:
        print(json.dumps({"refused": refusal}) if options.json else f"refused: {refusal}")
    if not options.json and len(plans) > 1:
        best = choose(plans)
        print(f"fastest: {best.name}, {best.rows} rows, {best.tokens_per_second:.0f} tokens/s")
    return 0


def _limits(options: argparse.Namespace, work: Workload) -> tuple[int, int]:
    """Device and host bytes: those given, or those that this machine has."""
    import jax

    from herald_jax.cache.host_memory import pinnable_bytes
    from herald_jax.engine.config import EngineConfig, device_bytes_limit
    from herald_jax.pass_times import weight_bytes

    device, host = options.device_bytes, options.host_bytes
    if device is None:
        limit = device_bytes_limit(jax.devices()[0]) * EngineConfig().device_memory_fraction
        device = int(limit) - weight_bytes(work.model, work.itemsize)
        if device < 1:
            raise ConfigError(
                f"The weights take all of the {limit / 1e9:.4g} GB of this device. "
                "Give --device-bytes to plan for another one."
            )
    if host is None:
        host = pinnable_bytes(is_gpu=jax.devices()[0].platform == "gpu")
    return device, host


def _facts(plan: Plan, work: Workload) -> dict[str, Any]:
    times = plan.times
    return {
        "placement": plan.name,
        "rows": plan.rows,
        "most_rows": plan.most_rows,
        "device_bytes": plan.device_bytes,
        "device_bytes_per_row": plan.device_bytes // plan.rows,
        "host_bytes": plan.host_bytes,
        "host_bytes_per_row": plan.host_bytes // plan.rows,
        "ms_per_pass": 1e3 * times.step,
        "ms_per_block": 1e3 * times.block,
        "device_ms": 1e3 * times.main,
        "host_ms": 1e3 * times.host,
        "link_ms": 1e3 * times.link,
        "tokens_per_second": plan.tokens_per_second,
        "binds": plan.binding,
        "cache": None if plan.cache is None else dataclasses.asdict(plan.cache),
        "context": work.context,
    }


def _text(plan: Plan, work: Workload) -> str:
    facts = _facts(plan, work)
    room: Sequence[str] = [f"{rows} by {name}" for name, rows in plan.most_rows.items()]
    lines = [
        f"{plan.name}: {plan.rows} rows, {plan.tokens_per_second:.0f} tokens/s; "
        f"{plan.binding} binds",
        f"  bytes: {facts['device_bytes_per_row'] / 1e6:,.0f} MB of the device a row"
        + (f", {facts['host_bytes_per_row'] / 1e6:,.0f} MB of the host" if plan.host_bytes else "")
        + f"; room for {', '.join(room)}",
        f"  a block: {facts['ms_per_block']:.0f} ms, of which passes {facts['device_ms']:.0f} "
        f"(one {facts['ms_per_pass']:.2f})"
        + (f", host {facts['host_ms']:.0f}, link {facts['link_ms']:.0f}" if plan.host_bytes else "")
        + (" (host and link run beside the passes)" if plan.times.host else ""),
    ]
    return "\n".join(lines)
