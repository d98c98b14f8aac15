"""Puts the rows that the engine has run together into request outputs."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from herald_jax.engine.batches import Row
from herald_jax.engine.request import Request
from herald_jax.outputs import RequestOutput, RequestStats


def by_request(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The rows of each request."""
    grouped: dict[int, list[Row]] = collections.defaultdict(list)
    for row in rows:
        grouped[row.request_index].append(row)
    return grouped


def partial_outputs(
    rows: Sequence[Row], requests: Sequence[Request], done: Mapping[int, RequestOutput]
) -> list[RequestOutput]:
    """Outputs of all requests, those that had not ended as far as they came."""
    for row in rows:
        row.progress.abort()
    grouped = by_request(rows)
    return [
        done[index] if index in done else request_output(index, request, grouped[index])
        for index, request in enumerate(requests)
    ]


def request_output(index: int, request: Request, rows: Sequence[Row]) -> RequestOutput:
    """The result of a request whose samples have all ended."""
    outputs = [
        row.progress.output(
            row.sample_index, row.request.seed, row.prefill_seconds, row.decode_seconds
        )
        for row in rows
    ]
    compiling: dict[int, float] = {}  # each by batch, as samples of one batch share its times
    prefill: dict[int, float] = {}
    decode: dict[int, float] = {}
    for row in rows:
        batch = row.batch_number
        compiling[batch] = row.compile_seconds
        prefill[batch] = row.prefill_seconds
        decode[batch] = max(decode.get(batch, 0.0), row.decode_seconds)
    return RequestOutput(
        index=index,
        prompt=request.prompt,
        prompt_token_ids=list(request.prompt_token_ids),
        outputs=outputs,
        stats=RequestStats(
            steps_per_block=[output.stats.steps_per_block for output in outputs],
            forwards=sum(output.stats.forwards for output in outputs),
            generated_tokens=sum(output.stats.generated_tokens for output in outputs),
            compile_seconds=sum(compiling.values()),
            prefill_seconds=sum(prefill.values()),
            decode_seconds=sum(decode.values()),
            kv_device_bytes=max(row.kv_device_bytes for row in rows),
            kv_host_bytes=max(row.kv_host_bytes for row in rows),
        ),
    )
