"""`Machine`: the measured rates that the planner predicts times with. Plain Python: no JAX."""

from __future__ import annotations

import dataclasses

from herald_jax._checks import require_float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Rates of a GPU and its host; the defaults were measured on one H200 with 16 host cores.

    Attributes:
        device_bytes_per_second: Copy rate of the device's memory, reads and writes counted.
        flops_per_second: Rate of large matrix products in bfloat16.
        expert_flops_per_second: Rate of the experts' batched matrix products.
        attention_share: Share of the copy rate at which attention reads keys and values.
        pool_share: The same of sparse layers: pools, rings and blocks, with all that such a layer
            does besides. From whole passes of SDAR-8B's shapes with 6 and 17 rows.
        attention_seconds: Fixed part of one layer's attention.
        pass_seconds: What one pass takes beside its bytes and operations.
        scan_bytes_per_second: Rate at which the host scores keys.
        scan_columns: Score columns up to which that rate holds; beyond, it falls with them.
        choose_keys_per_second: Rate at which the host takes the best of scored keys.
        gather_bytes_per_second: Rate at which the host copies chosen keys and values.
        link_bytes_per_second: Rate of copies to the device in chunks of a few MB.
        fetch_bytes_per_second: Rate at which whole layers come from the host.
    """

    device_bytes_per_second: float = 4.28e12
    flops_per_second: float = 8.0e14
    expert_flops_per_second: float = 6.5e14
    attention_share: float = 0.85
    pool_share: float = 0.2
    attention_seconds: float = 2.0e-5
    pass_seconds: float = 1.45e-3
    scan_bytes_per_second: float = 7.7e10
    scan_columns: int = 16
    choose_keys_per_second: float = 2.0e9
    gather_bytes_per_second: float = 3.2e10
    link_bytes_per_second: float = 2.3e10
    fetch_bytes_per_second: float = 4.5e10

    def __post_init__(self) -> None:
        """Checks every field."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            require_float(field.name, value, 1e-9, 1e18, "a number above zero")
