"""Hugging Face checkpoints to checkpoint folders that herald_jax loads.

`convert_checkpoint` is the whole tool; `python -m convert` is its command line. What differs
between model families is data, one table per file in `convert.families`.
"""

from convert.convert import ConversionReport, convert_checkpoint
from convert.report import ConversionError, Fault

__all__ = ["ConversionError", "ConversionReport", "Fault", "convert_checkpoint"]
