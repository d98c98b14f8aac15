"""Scores by the matrix units (AMX) of a core: sixteen keys by sixteen columns at a time.

A tile of 32 keys is multiplied where it lies in memory, so the vector units are left with the
softmax alone, whose columns are the lanes of one register. Logits of a chunk become weights
relative to the chunk's largest, while they are in the core's cache.

LLVM has instructions of these units only where the machine has them; elsewhere it would end the
process. So nothing here may be compiled unless `has_matrix_units()`. Numba keeps what it
compiles by the features of the machine.
"""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
from typing import Any

import numba
import numpy as np
from llvmlite import binding, ir
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from herald_jax.retrieval import _kernels

COLUMNS = 16
"""Columns of a product; fewer are filled up."""

TILE_KEYS = 32
"""Keys of a product."""

DIM_STEP = 32
MAX_DIM = 128
"""The columns stay in four tile registers, of 32 numbers each."""

_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18
_FEATURES = ("amx-tile", "amx-bf16", "avx512f", "avx512bw")

_I8, _I32, _I64, _F32, _VOID = (
    ir.IntType(8),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.VoidType(),
)
_LANES = ir.VectorType(_F32, COLUMNS)
_WORDS = ir.VectorType(_I32, COLUMNS)
_WIDE = ir.VectorType(ir.DoubleType(), COLUMNS)
_ROW_BYTES = COLUMNS * 4
_AHEAD_BYTES = 1 << 13
"""How far ahead of a product its keys are asked for: two pages, where the hardware stops."""


@functools.cache
def has_matrix_units() -> bool:
    """True if this process may use them; asks the kernel for it."""
    is_linux = sys.platform == "linux" and platform.machine() == "x86_64"
    if not is_linux or numba.config.CPU_FEATURES is not None:  # type: ignore[attr-defined]
        return False
    features = binding.get_host_cpu_features()
    if not all(features.get(name) for name in _FEATURES):
        return False
    call = ctypes.CDLL(None, use_errno=True).syscall
    return call(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def fits(dim: int) -> bool:
    """True if there is a product for keys of so many numbers."""
    return dim % DIM_STEP == 0 and 0 < dim <= MAX_DIM


def tiled_columns(cols: np.ndarray, dtype: Any) -> np.ndarray:
    """Columns [K, c, D] as the units take them: [K, D / 32, 16, 32], pairs of two bytes.

    Copies of the first column fill them up, which changes no maximum.
    """
    kv_heads, count, dim = cols.shape
    bits = np.ascontiguousarray(cols.astype(dtype, copy=False)).view(np.uint16)
    if count < COLUMNS:
        bits = np.concatenate([bits, np.repeat(bits[:, :1], COLUMNS - count, 1)], 1)
    pairs = bits.reshape(kv_heads, COLUMNS, dim // DIM_STEP, DIM_STEP // 2, 2)
    tiles = pairs.transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(tiles).reshape(kv_heads, dim // DIM_STEP, COLUMNS, DIM_STEP)


@functools.cache
def tile_layout() -> np.ndarray:
    """What tells the units that all tiles are of 16 rows of 64 bytes."""
    layout = np.zeros(64, np.uint8)
    layout[0] = 1
    layout[16:32].view(np.uint16)[:] = 64
    layout[48:56] = 16
    return layout


_intrinsic: Any = intrinsic  # what it makes is called without the first parameter


def _call(builder: Any, name: str, result: Any, *args: Any) -> Any:
    kinds = [arg.type for arg in args]
    known = builder.module.globals.get(name)
    function = known or ir.Function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, args)


def _at(builder: Any, address: Any, offset: int = 0, kind: Any = _I8) -> Any:
    if offset:
        address = builder.add(address, _I64(offset))
    return builder.inttoptr(address, ir.PointerType(kind))


def _constant(value: float) -> Any:
    return ir.Constant(_LANES, [float(np.float32(value))] * COLUMNS)


def _load_tile(builder: Any, tile: int, address: Any, stride: int) -> None:
    _call(builder, "llvm.x86.tileloadd64", _VOID, _I8(tile), address, _I64(stride))


@_intrinsic
def _configure(_typing: Any, layout: Any) -> Any:
    """Takes the address of `tile_layout()`; tiles may be used from here on."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.ldtilecfg", _VOID, _at(builder, args[0]))
        return context.get_dummy_value()

    return types.void(types.int64), emit


@_intrinsic
def _release(_typing: Any) -> Any:
    """Tiles are used no more, so that a switch of threads need not save them."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        _call(builder, "llvm.x86.tilerelease", _VOID)
        return context.get_dummy_value()

    return types.void(), emit


@_intrinsic(prefer_literal=True)
def _load_columns(_typing: Any, steps: Any, tiles: Any) -> Any:
    """Takes the columns of a KV head, at an address, into tiles 4 and up."""
    count = steps.literal_value

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        for at in range(count):
            _load_tile(builder, 4 + at, _at(builder, args[1], at * COLUMNS * 64), 64)
        return context.get_dummy_value()

    return types.void(steps, types.int64), emit


@_intrinsic(prefer_literal=True)
def _multiply(_typing: Any, steps: Any, keys: Any, out: Any) -> Any:
    """Logits [32, 16] of the keys at an address, to another address."""
    count = steps.literal_value
    row = count * DIM_STEP * 2
    half = TILE_KEYS // 2

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        for tile in (0, 1):
            _call(builder, "llvm.x86.tilezero", _VOID, _I8(tile))
        for line in range(0, TILE_KEYS * row, 64):
            place = _at(builder, args[1], _AHEAD_BYTES + line)
            hint = (_I32(0), _I32(3), _I32(1))  # a read, to keep, of data
            _call(builder, "llvm.prefetch.p0", _VOID, place, *hint)
        for at in range(count):
            for tile in (0, 1):
                place = _at(builder, args[1], at * 64 + tile * half * row)
                _load_tile(builder, 2 + tile, place, row)
                kinds = (_I8(tile), _I8(2 + tile), _I8(4 + at))
                _call(builder, "llvm.x86.tdpbf16ps", _VOID, *kinds)
        for tile in (0, 1):
            place = _at(builder, args[2], tile * half * _ROW_BYTES)
            _call(builder, "llvm.x86.tilestored64", _VOID, _I8(tile), place, _I64(_ROW_BYTES))
        return context.get_dummy_value()

    return types.void(steps, types.int64, types.int64), emit


@_intrinsic
def _find_tops(_typing: Any, rows: Any, count: Any, tops: Any) -> Any:
    """Cuts off infinities of logits [count, 16]; their largest by column, NaN passed over."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        high, low = (_constant(sign * float(np.finfo(np.float32).max)) for sign in (1, -1))
        top = cgutils.alloca_once_value(builder, low)
        with cgutils.for_range(builder, args[1], intp=_I64) as loop:
            offset = builder.mul(loop.index, _I64(_ROW_BYTES))
            place = _at(builder, builder.add(args[0], offset), kind=_LANES)
            x = builder.load(place, typ=_LANES, align=4)
            # Not true for NaN, which is left as it is.
            x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
            x = builder.select(builder.fcmp_ordered("<", x, low), low, x)
            builder.store(x, place, align=4)
            best = builder.load(top, typ=_LANES)
            builder.store(builder.select(builder.fcmp_ordered(">", x, best), x, best), top)
        builder.store(builder.load(top, typ=_LANES), _at(builder, args[2], kind=_LANES), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), emit


def _exponential(builder: Any, x: Any) -> Any:
    """e^x of x in [-87, 0], as `_kernels._exponential` does it."""

    def fma(a: Any, b: Any, c: Any) -> Any:
        return _call(builder, "llvm.fma.v16f32", _LANES, a, b, c)

    half = _constant(0.5)
    whole = _call(builder, "llvm.floor.v16f32", _LANES, fma(x, _constant(1.44269504), half))
    rest = fma(whole, _constant(-0.693359375), x)
    rest = fma(whole, _constant(2.12194440e-4), rest)
    p = _constant(1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1):
        p = fma(p, rest, _constant(factor))
    p = fma(p, rest, _constant(5.0000001201e-1))
    p = fma(builder.fmul(p, rest), rest, builder.fadd(rest, _constant(1)))
    bias = ir.Constant(_WORDS, [127] * COLUMNS)
    exponent = builder.add(builder.fptosi(whole, _WORDS), bias)
    scale = builder.shl(exponent, ir.Constant(_WORDS, [23] * COLUMNS))
    return builder.fmul(p, builder.bitcast(scale, _LANES))


@_intrinsic
def _weigh(_typing: Any, rows: Any, count: Any, tops: Any, sums: Any) -> Any:
    """Logits [count, 16] become weights relative to `tops`, -1 for NaN; their sums by column."""

    def emit(context: Any, builder: Any, _: Any, args: Any) -> Any:
        top = builder.load(_at(builder, args[2], kind=_LANES), typ=_LANES, align=4)
        least, zero = _constant(-87), _constant(0)
        total = cgutils.alloca_once_value(builder, ir.Constant(_WIDE, [0.0] * COLUMNS))
        with cgutils.for_range(builder, args[1], intp=_I64) as loop:
            offset = builder.mul(loop.index, _I64(_ROW_BYTES))
            place = _at(builder, builder.add(args[0], offset), kind=_LANES)
            x = builder.load(place, typ=_LANES, align=4)
            y = builder.fsub(x, top)
            is_above = builder.fcmp_ordered(">=", y, least)
            w = _exponential(builder, builder.select(is_above, y, least))
            w = builder.select(is_above, w, zero)
            # In fp64, since all of a chunk's weights go one by one into the same sum.
            wide = builder.fadd(builder.load(total, typ=_WIDE), builder.fpext(w, _WIDE))
            builder.store(wide, total)
            is_number = builder.fcmp_ordered("ord", x, x)
            builder.store(builder.select(is_number, w, _constant(-1)), place, align=4)
        found = builder.fptrunc(builder.load(total, typ=_WIDE), _LANES)
        builder.store(found, _at(builder, args[3], kind=_LANES), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@_kernels.compiled()
def _multiply_tile(steps: Any, keys: Any, out: Any) -> None:
    if steps == 1:
        _multiply(1, keys, out)
    elif steps == 2:
        _multiply(2, keys, out)
    elif steps == 3:
        _multiply(3, keys, out)
    else:
        _multiply(4, keys, out)


@_kernels.compiled()
def _load_head(steps: Any, tiles: Any) -> None:
    if steps == 1:
        _load_columns(1, tiles)
    elif steps == 2:
        _load_columns(2, tiles)
    elif steps == 3:
        _load_columns(3, tiles)
    else:
        _load_columns(4, tiles)


@_kernels.compiled()
def _score_chunk(
    plan: Any, work: Any, k: np.ndarray, tiles: np.ndarray, layout: np.ndarray, head: int, at: int
) -> None:
    start, stop = at * plan.chunk, min((at + 1) * plan.chunk, plan.candidates)
    steps = tiles.shape[1]
    keys, out = k[head, start:].ctypes.data, work.rows[head, start:].ctypes.data
    key_bytes, out_bytes = TILE_KEYS * DIM_STEP * 2 * steps, TILE_KEYS * _ROW_BYTES
    _configure(layout.ctypes.data)
    _load_head(steps, tiles[head].ctypes.data)
    whole, rest = (stop - start) // TILE_KEYS, (stop - start) % TILE_KEYS
    for tile in range(whole):
        _multiply_tile(steps, keys + tile * key_bytes, out + tile * out_bytes)
    if rest > 0:
        # What lies behind the last keys may be no memory at all.
        last = np.zeros((TILE_KEYS, DIM_STEP * steps), np.uint16)
        last[:rest] = k[head, stop - rest : stop]
        _multiply_tile(steps, last.ctypes.data, out + whole * out_bytes)
        last[0, 0] = 0  # an array lives until its last use, and an address is none
    _release()
    tops, sums = work.tops[head, at].ctypes.data, work.sums[head, at].ctypes.data
    _find_tops(out, stop - start, tops)
    _weigh(out, stop - start, tops, sums)


@_kernels.compiled(parallel=True)
def score_keys(plan: Any, work: Any, k: np.ndarray, tiles: np.ndarray, layout: np.ndarray) -> None:
    """Fills `rows`, `tops` and `sums` from keys [K, S, D] and `tiled_columns`."""
    chunks = (plan.candidates + plan.chunk - 1) // plan.chunk
    items = k.shape[0] * chunks
    counter = np.zeros(1, np.int64)
    for _thread in prange(plan.threads):
        item = _kernels.next_of(counter.ctypes.data)
        while item < items:
            _score_chunk(plan, work, k, tiles, layout, item // chunks, item % chunks)
            item = _kernels.next_of(counter.ctypes.data)
