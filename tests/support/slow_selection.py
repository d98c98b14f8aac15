"""Selection written as loops over single keys, in fp64; what every fast form is compared with."""

from __future__ import annotations

import math

import numpy as np

from herald_jax.retrieval import SelectionConfig


def slow_columns(q: np.ndarray, num_kv_heads: int, heads: str) -> np.ndarray:
    """[n, H, D] -> [K, c, D]."""
    positions, num_heads, dim = q.shape
    group = num_heads // num_kv_heads
    out = []
    for kv_head in range(num_kv_heads):
        rows = []
        for position in range(positions):
            members = [q[position, kv_head * group + g] / math.sqrt(dim) for g in range(group)]
            rows += members if heads == "apart" else [sum(members) / group]
        out.append(rows)
    return np.array(out)


def slow_scores(
    cols: np.ndarray, k: np.ndarray, candidates: int, spec: SelectionConfig, group: int = 1
) -> np.ndarray:
    """[K, c, D] and [K, S, D] -> [K, candidates]."""
    kv_heads, num_columns, _ = cols.shape
    scores = np.zeros((kv_heads, candidates))
    for head in range(kv_heads):
        share = np.zeros((num_columns, candidates))
        is_number = np.zeros(candidates, bool)
        for column in range(num_columns):
            logits = [float(cols[head, column] @ k[head, s]) for s in range(candidates)]
            numbers = [x for x in logits if not math.isnan(x)]
            total = sum(math.exp(x - max(numbers)) for x in numbers)
            for s, logit in enumerate(logits):
                if not math.isnan(logit):
                    is_number[s] = True
                    share[column, s] = math.exp(logit - max(numbers)) / total
        for s in range(candidates):
            places = [
                np.mean([share[p * group + g, s] for g in range(group)])
                for p in range(num_columns // group)
            ]
            scores[head, s] = max(places) if spec.pooling == "max" else sum(places) / len(places)
        lifted = scores[head].copy()
        for s in range(candidates):
            window = scores[head, max(0, s - spec.dilation) : s + spec.dilation + 1]
            lifted[s] = max(scores[head, s], spec.dilation_weight * window.max())
        scores[head] = np.where(is_number, lifted, -1.0)
    return scores


def slow_choice(scores: np.ndarray, candidates: int, sinks: int, wanted: int) -> list[list[int]]:
    """[K, >= candidates] -> the chosen positions of each KV head, ascending."""
    chosen = []
    for row in scores:
        taken = list(range(min(sinks, candidates)))
        others = range(len(taken), candidates)

        def rank(s: int, row: np.ndarray = row) -> tuple[float, int]:
            return (math.inf if math.isnan(row[s]) else -row[s], s)

        chosen.append(sorted(taken + sorted(others, key=rank)[:wanted]))
    return chosen
