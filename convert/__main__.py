"""Command line of the converter: `python -m convert SRC DST`."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

import jax

from convert.convert import convert_checkpoint
from convert.examine import examine
from convert.families import families
from convert.report import ConversionError
from herald_jax._checks import ConfigError

OK, FAULTS, USAGE = 0, 1, 2
"""Exit codes. argparse ends with `USAGE` by itself."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="herald-convert",
        description="Converts a Hugging Face checkpoint of a block-diffusion language model.",
        epilog="Exit codes: 0 converted, or nothing against it with --dry-run; 1 faults in the "
        "checkpoint or target; 2 wrong usage.",
    )
    parser.add_argument("src", metavar="SRC", help="folder of the checkpoint, or a hub id")
    parser.add_argument(
        "dst", metavar="DST", nargs="?", help="folder to write; not needed with --dry-run"
    )
    parser.add_argument(
        "--family", choices=sorted(families()), help="key table, if config.json does not tell"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--mask-token-id", type=int, metavar="N", help="beats what the files say")
    parser.add_argument(
        "--block-length", type=int, metavar="N", help="needed if config.json has no block size"
    )
    parser.add_argument(
        "--check", action="store_true", help="compare logits with torch (extra `parity`)"
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="read the headers only, print the key map and all faults, and write nothing",
    )
    parser.add_argument("--force", action="store_true", help="replace a checkpoint at DST")
    parser.add_argument("--quiet", action="store_true", help="no progress bar and no summary")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Converts and returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.dst is None and not options.dry_run:
        parser.error("the following arguments are required: DST")
    # A conversion needs no accelerator, and must not take the memory of one.
    jax.config.update("jax_platforms", "cpu")
    # Being ended politely leaves nothing behind either.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        if options.dry_run:
            found = examine(
                options.src,
                options.dst,
                family=options.family,
                mask_token_id=options.mask_token_id,
                block_length=options.block_length,
                force=options.force,
                check=options.check,
            )
            if not options.quiet or found.findings.faults:
                print(found.summary())
            return FAULTS if found.findings.faults else OK
        assert options.dst is not None, "the parser has seen to it"
        report = convert_checkpoint(
            options.src,
            options.dst,
            family=options.family,
            dtype=options.dtype,
            mask_token_id=options.mask_token_id,
            block_length=options.block_length,
            force=options.force,
            check=options.check,
            progress=not options.quiet,
        )
    except (ConversionError, ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return FAULTS
    if not options.quiet:
        print(report.summary())
    return OK


if __name__ == "__main__":
    sys.exit(main())
