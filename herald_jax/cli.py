"""The command `herald`.

A sub-command is a module in `herald_jax.commands` with `HELP`, `add_arguments` and `run`.
Nothing here imports JAX, so that help and usage errors come at once.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from herald_jax import __version__
from herald_jax._checks import ConfigError
from herald_jax.commands import convert, generate, models, plan, serve

COMMANDS = {
    "generate": generate,
    "serve": serve,
    "convert": convert,
    "models": models,
    "plan": plan,
}
OK, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
"""Exit codes. argparse ends with `USAGE` by itself."""


def build_parser() -> argparse.ArgumentParser:
    """The parser of `herald` with all sub-commands."""
    parser = argparse.ArgumentParser(
        prog="herald",
        description="Block-diffusion language models in JAX.",
        epilog="Exit codes: 0 done, 1 failed, 2 wrong usage or options, 130 interrupted.",
    )
    parser.add_argument("--version", action="version", version=f"herald_jax {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, module in COMMANDS.items():
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a sub-command and returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["convert"]:
        return convert.run(arguments[1:])  # its options are those of `herald-convert`
    options = build_parser().parse_args(arguments)
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        return COMMANDS[options.command].run(options)
    except ConfigError as error:
        print(f"herald {options.command}: {error}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print(f"herald {options.command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader has gone (`| head`); without this Python complains again at exit.
        sys.stdout = None
        return FAILED
    except (ValueError, RuntimeError, OSError) as error:
        print(f"herald {options.command}: {error}", file=sys.stderr)
        return FAILED


if __name__ == "__main__":
    sys.exit(main())
