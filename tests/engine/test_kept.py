"""Arguments that stay on the device are renewed exactly when their contents change."""

from __future__ import annotations

import numpy as np

from herald_jax.engine.kept import KeptOnDevice


def test_a_copy_stays_until_contents_shape_dtype_or_structure_change():
    kept = KeptOnDevice()
    first = kept("a", (np.arange(6, dtype=np.int32), np.zeros(2, np.float32)))
    assert kept("a", (np.arange(6, dtype=np.int32), np.zeros(2, np.float32))) is first
    kept("b", (np.arange(6, dtype=np.int32), np.ones(2, np.float32)))
    assert kept("a", (np.arange(6, dtype=np.int32), np.zeros(2, np.float32))) is first
    for other in (
        (np.arange(6, dtype=np.int32), np.ones(2, np.float32)),
        (np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(2, np.float32)),
        (np.arange(6, dtype=np.uint32).reshape(2, 3), np.ones(2, np.float32)),
        [np.arange(6, dtype=np.uint32).reshape(2, 3), np.ones(2, np.float32)],
    ):
        now = kept("a", other)
        assert now is not first and type(now) is type(other)
        for array, expected in zip(now, other, strict=True):
            np.testing.assert_array_equal(np.asarray(array), expected)
            assert array.dtype == expected.dtype
        first = now
