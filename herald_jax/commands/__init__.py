"""Sub-commands of `herald`, one module each."""
