"""`python -m benchmarks NAME`: runs one benchmark."""

from __future__ import annotations

import argparse

from benchmarks import (
    accuracy,
    bidirectional,
    block,
    continuous,
    conversion_memory,
    host_lane,
    identical,
    kernels,
    ladder,
    mixture,
    offload,
    prefill,
    products,
    report,
    serve_load,
    step,
    throughput,
)

BENCHMARKS = {
    "accuracy": accuracy,
    "bidirectional": bidirectional,
    "block": block,
    "continuous": continuous,
    "conversion_memory": conversion_memory,
    "host_lane": host_lane,
    "identical": identical,
    "kernels": kernels,
    "ladder": ladder,
    "mixture": mixture,
    "offload": offload,
    "prefill": prefill,
    "products": products,
    "report": report,
    "serve_load": serve_load,
    "step": step,
    "throughput": throughput,
}


def main() -> None:
    """Parses the command line and runs the benchmark it names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    commands = parser.add_subparsers(dest="benchmark", required=True)
    for name, module in BENCHMARKS.items():
        summary = (module.__doc__ or "").partition("\n")[0]
        module.add_arguments(commands.add_parser(name, help=summary, description=module.__doc__))
    arguments = parser.parse_args()
    BENCHMARKS[arguments.benchmark].main(arguments)


if __name__ == "__main__":
    main()
