"""Where the time of a program goes on the GPU, kernel by kernel, from a trace of the profiler."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax

LONGEST_NAME = 64

GROUPS = (
    ("matmul", r"gemm|nvjet|cutlass|cublas|dot"),
    ("attention", r"attention|mosaic|segment|attend"),
    ("copy", r"^memcpy|copy|dynamic-update-slice|dynamic_update_slice|scatter"),
    ("memset", r"^memset"),
)
"""Kernels whose name matches belong to the first such group, and else to `other`."""


class KernelTimes(NamedTuple):
    """Kernels of one call.

    Attributes:
        busy_ms: Sum of all kernels.
        span_ms: From the first kernel's begin to the last one's end.
        groups: Milliseconds of each group.
        kernels: Name without numbers -> (count, microseconds), the longest first.
    """

    busy_ms: float
    span_ms: float
    groups: dict[str, float]
    kernels: dict[str, tuple[float, float]]

    def figures(self, most: int = 14) -> dict[str, Any]:
        """For a record."""
        return {
            "kernel_busy_ms": self.busy_ms,
            "kernel_span_ms": self.span_ms,
            "kernel_groups_ms": self.groups,
            "kernels": {
                name: {"count": count, "us": us}
                for name, (count, us) in list(self.kernels.items())[:most]
            },
        }


def group_of(name: str) -> str:
    """The group of a kernel."""
    lower = name.lower()
    return next((group for group, pattern in GROUPS if re.search(pattern, lower)), "other")


def summarise(profile: Any, calls: int) -> KernelTimes | None:
    """The kernels of one of `calls` calls in a `jax.profiler.ProfileData`; None without a GPU."""
    totals: dict[str, list[float]] = {}
    begin, end = float("inf"), 0.0
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = re.sub(r"([._]\d+)+$", "", event.name)[:LONGEST_NAME]
                total = totals.setdefault(name, [0.0, 0.0])
                total[0] += 1
                total[1] += event.duration_ns
                begin = min(begin, event.start_ns)
                end = max(end, event.start_ns + event.duration_ns)
    if not totals:
        return None
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    groups: dict[str, float] = {}
    for name, (_, nanoseconds) in ordered:
        group = group_of(name)
        groups[group] = groups.get(group, 0.0) + nanoseconds * 1e-6 / calls
    return KernelTimes(
        busy_ms=sum(groups.values()),
        span_ms=(end - begin) * 1e-6 / calls,
        groups=groups,
        kernels={
            name: (count / calls, nanoseconds * 1e-3 / calls)
            for name, (count, nanoseconds) in ordered
        },
    )


def kernel_times(call: Callable[[], Any], calls: int = 3) -> KernelTimes | None:
    """The kernels of a call, which should have run before; None where there is no GPU.

    While the profiler looks, kernels are launched one by one instead of as graphs, so the gaps
    between them are wider than otherwise, but each of them takes what it takes.
    """
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            out = None
            for _ in range(calls):
                out = call()
            jax.block_until_ready(out)
        found = sorted(Path(folder).rglob("*.xplane.pb"))
        if not found:
            return None
        return summarise(jax.profiler.ProfileData.from_file(str(found[-1])), calls)


def printed(times: KernelTimes, most: int = 8) -> str:
    """A few lines about the kernels of a call."""
    groups = ", ".join(f"{name} {ms:.2f}" for name, ms in times.groups.items())
    lines = [f"    kernels {times.busy_ms:.2f} ms in {times.span_ms:.2f} ms: {groups}"]
    for name, (count, us) in list(times.kernels.items())[:most]:
        lines.append(f"      {us:>9.1f} us  {count:>5.0f} x  {name}")
    return "\n".join(lines)
