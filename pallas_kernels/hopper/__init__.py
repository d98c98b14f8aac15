"""Kernels for Hopper GPUs (Mosaic GPU): imported only where one of them is to run."""
