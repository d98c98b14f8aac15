"""How much host memory a pool may take, checked before anything is allocated. No JAX."""

from __future__ import annotations

from pathlib import Path

from herald_jax._checks import ConfigError
from herald_jax.settings import PINNED_LIMIT_VARIABLE, pinned_limit_bytes

XLA_PINNED_BYTES = 1 << 30
"""Part of its pinned memory that is left to XLA, which stages ordinary transfers in it."""

SYSTEM_BYTES = 1 << 30
"""Memory that is left to everything else on the machine."""

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_host_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Bytes that the machine, or the container, could still give; `None` if unknown.

    File caches count as available, since the kernel drops them first.
    """
    found = []
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found.append(int(line.split()[1]) << 10)
    except (OSError, ValueError):
        pass
    try:
        limit = int((cgroup / "memory.max").read_text(encoding="ascii"))
        used = int((cgroup / "memory.current").read_text(encoding="ascii"))
        stat = (cgroup / "memory.stat").read_text(encoding="ascii").splitlines()
        kept = dict(line.split() for line in stat)
        caches = int(kept["inactive_file"]) + int(kept["active_file"])
        found.append(max(limit - used + caches, 0))
    except (OSError, ValueError, KeyError):  # no such files, or "max"
        pass
    return min(found, default=None)


def _limits(
    *, is_gpu: bool, host_bytes: int | None, available: int | None
) -> list[tuple[int, str, str]]:
    """Bytes that there are, what limits them, and what to do about it."""
    limits = []
    if host_bytes is not None:
        limits.append((host_bytes, "`host_bytes`", "raise `host_bytes`"))
    if is_gpu:
        cap = max(pinned_limit_bytes() - XLA_PINNED_BYTES, 0)
        what = f"the cap of pinned memory that {PINNED_LIMIT_VARIABLE} sets, less what XLA uses"
        limits.append((cap, what, f"raise {PINNED_LIMIT_VARIABLE} before the process starts"))
    if available is not None:
        free = max(available - SYSTEM_BYTES, 0)
        limits.append((free, "the machine's available memory", "free memory on this machine"))
    return limits


def pinnable_bytes(host_bytes: int | None = None, *, is_gpu: bool) -> int:
    """The most bytes that `check_host_memory` would let pass."""
    limits = _limits(is_gpu=is_gpu, host_bytes=host_bytes, available=available_host_bytes())
    return min((have for have, _, _ in limits), default=1 << 62)


def check_host_memory(
    need: int, *, is_gpu: bool, host_bytes: int | None = None, available: int | None = None
) -> None:
    """Checks that pools of `need` bytes may be allocated.

    Args:
        need: Bytes of everything that is going to be allocated.
        is_gpu: True if the memory is pinned for a GPU, whose runtime has a cap of its own.
        host_bytes: The user's own limit.
        available: What the machine can give; `None` asks it.

    Raises:
        ConfigError: If it is too much; the message names need, have and the setting to change.
    """
    if available is None:
        available = available_host_bytes()
    limits = _limits(is_gpu=is_gpu, host_bytes=host_bytes, available=available)
    for have, what, remedy in sorted(limits):
        if need > have:
            raise ConfigError(
                f"The keys and values on the host need {_gib(need)}, and there are {_gib(have)} "
                f"({what}). Lower `max_num_seqs` or `max_model_len`, or {remedy}."
            )


def _gib(number: int) -> str:
    return f"{number / 2**30:.2f} GiB ({number:,} bytes)"
