"""Settings and fixtures that all tests share.

The environment is set before JAX is imported, so nothing here may import JAX or the package at
module level.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parent.parent
IN_CI = bool(os.environ.get("CI"))
USE_GPU = os.environ.get("HERALD_TEST_GPU") == "1"

if not USE_GPU:
    os.environ["JAX_PLATFORMS"] = "cpu"
# Mixing dtypes is an error in tests: fp32 that slips into a bf16 model costs speed unnoticed.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
# Programs that tests start find the package in this checkout.
os.environ["PYTHONPATH"] = os.pathsep.join(
    [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
)
# Nothing that tests convert or compile goes into the user's own cache.
os.environ["HERALD_JAX_CACHE_DIR"] = str(ROOT / "build" / "test-cache")
if IN_CI:
    os.environ["HERALD_JAX_COMPILE_CACHE"] = "0"
else:
    # Repeated runs skip compilation; CI measures what a fresh clone does.
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / "build" / "test-compile-cache"))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")

# The first example of a property test compiles, so a deadline says nothing about the code.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("ci" if IN_CI else "local")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips GPU tests unless they are asked for."""
    if USE_GPU:
        return
    skip = pytest.mark.skip(reason="needs a GPU and HERALD_TEST_GPU=1")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="module", autouse=True)
def forget_programs() -> Iterator[None]:
    """Lets go of a module's compiled programs.

    On a CPU each of them maps memory of its own, and a process that has mapped 65,530 pieces ends
    with a segmentation fault in the compiler.
    """
    yield
    for name in ("tests.engine.engines", "tests.engine.sparse_engines"):
        if name in sys.modules:
            sys.modules[name].PROGRAMS.clear()  # type: ignore[attr-defined]
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()  # type: ignore[attr-defined]
        gc.collect()


@pytest.fixture(scope="session")
def tiny_config() -> Any:
    """A `ModelConfig` in which sizes that could be confused differ."""
    from herald_jax.configs import ModelConfig

    return ModelConfig(
        family="test",
        vocab_size=61,
        hidden_size=24,
        intermediate_size=40,
        num_layers=3,
        num_heads=6,
        num_kv_heads=2,
        head_dim=8,
        block_length=4,
        mask_token_id=60,
        stop_token_ids=(1,),
        rope_theta=1234.5,
        rms_norm_eps=3e-5,
    )


@pytest.fixture(scope="session")
def tiny_params(tiny_config: Any) -> Any:
    """Random fp32 parameters of `tiny_config`; every tensor differs."""
    import jax.numpy as jnp

    from herald_jax.models import random_params

    return random_params(tiny_config, seed=0, dtype=jnp.float32)


@pytest.fixture(scope="session")
def run_python() -> Callable[..., str]:
    """Runs code in a fresh interpreter at the repository root and returns what it printed.

    `devices` fakes that many CPU devices; `env` adds to the environment. The test fails with the
    program's output if it exits with another status than zero.
    """

    def run(
        code: str, *, devices: int = 1, env: dict[str, str] | None = None, timeout: float = 300
    ) -> str:
        environment = dict(os.environ)
        if devices > 1:
            flag = f"--xla_force_host_platform_device_count={devices}"
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {flag}".strip()
        environment.update(env or {})
        done = subprocess.run(
            [sys.executable, "-c", code],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if done.returncode != 0:
            pytest.fail(f"exit status {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    return run
