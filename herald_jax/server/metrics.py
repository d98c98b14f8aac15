"""The engine's figures in the form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from herald_jax.server.service import Service

# Name of the metric: key in the figures, and what it is.
GAUGES = {
    "herald_waiting_samples": ("waiting", "Samples that wait for a row"),
    "herald_pending_steps": ("pending_steps", "Steps on the device whose results are unread"),
    "herald_kv_pages": ("pages_total", "Pages of the KV pool"),
    "herald_kv_pages_used": ("pages_used", "Pages of the KV pool that running samples hold"),
    "herald_kv_device_bytes": ("kv_bytes", "Device bytes of the KV pool"),
    "herald_kv_device_bytes_used": ("kv_bytes_used", "Device bytes of the pages in use"),
    "herald_kv_host_bytes": ("kv_host_bytes", "Pinned host bytes of finished blocks"),
    "herald_tokens_per_second": ("tokens_per_second", "Generated tokens, last ten seconds"),
    "herald_tokens_per_forward": ("tokens_per_forward", "Generated tokens by forwards of rows"),
    "herald_steps_per_block": ("steps_per_block", "Denoising steps by blocks"),
    "herald_bubble_row_steps": ("bubbles", "Row-steps that no finished block has used"),
}
COUNTERS = {
    "herald_requests": ("requests", "Requests taken into the queue"),
    "herald_failed_requests": ("failed_requests", "Requests that a failure ended"),
    "herald_prompt_tokens": ("prompt_tokens", "Prompt tokens of these requests"),
    "herald_generated_tokens": ("generated_tokens", "Generated tokens that count"),
    "herald_reused_tokens": ("reused_tokens", "Prompt tokens found in shared pages"),
    "herald_prefill_blocks": ("prefill_blocks", "Prompt blocks prefilled"),
    "herald_blocks": ("blocks", "Finished blocks"),
    "herald_denoising_steps": ("denoising_steps", "Denoising steps of finished blocks"),
    "herald_forwards": ("forwards", "Denoising and commit passes of finished blocks"),
    "herald_row_steps": ("row_steps", "Rows, summed over the steps they took part in"),
    "herald_stalled_row_steps": ("stalled", "Rows left out of a step for want of a page"),
    "herald_preemptions": ("preempted", "Samples set back to make room"),
    "herald_recalls": ("retrieval_recalls", "Pools filled for the next block of a row"),
    "herald_host_bytes_scanned": ("retrieval_bytes_scanned", "Keys scored in host memory"),
    "herald_link_bytes_to_device": ("retrieval_bytes_sent", "Selected entries sent to the device"),
    "herald_link_bytes_to_host": ("retrieval_bytes_kept", "Finished blocks brought to the host"),
    "herald_pool_waits": ("retrieval_waits", "Times that every row waited for its pool"),
    "herald_pool_wait_seconds": ("retrieval_wait_seconds", "Time of these waits"),
    "herald_stale_blocks": ("stale_blocks", "Blocks read after their sample had ended"),
}
HISTOGRAMS = {
    "herald_queue_seconds": ("queue_seconds", "Time from arrival to a row"),
    "herald_time_to_first_block_seconds": (
        "first_block_seconds",
        "Time from arrival to the first finished block, which brings the first tokens",
    ),
    "herald_block_seconds": ("block_seconds", "Time of a block"),
    "herald_block_steps": ("block_steps", "Denoising steps of a block"),
}


class FiguresCollector:
    """Makes metrics of the figures when they are asked for."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Any]:
        """All metrics, as prometheus_client wants them."""
        from prometheus_client.core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        service = self._service
        figures = service.llm.stats.snapshot()
        for name, (key, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, value=float(figures.get(key, 0)))
        rows = GaugeMetricFamily("herald_rows", "Rows by state", labels=["state"])
        for state in ("prefill", "decode", "free"):
            rows.add_metric([state], float(figures.get(f"rows_{state}", 0)))
        yield rows
        for name, (key, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, value=float(figures.get(key, 0)))
        ended = CounterMetricFamily("herald_samples", "Samples that ended", labels=["reason"])
        for reason, count in figures["ended"].items():
            ended.add_metric([reason], float(count))
        yield ended
        for name, (key, text) in HISTOGRAMS.items():
            values = figures[key]
            bounds = [*map(str, values["bounds"]), "+Inf"]
            buckets = [(b, float(c)) for b, c in zip(bounds, values["cumulative"], strict=True)]
            yield HistogramMetricFamily(name, text, buckets=buckets, sum_value=values["sum"])
            recent = GaugeMetricFamily(
                f"{name}_recent", f"{text}: quantiles of recent values", labels=["quantile"]
            )
            for quantile, value in values["quantiles"].items():
                recent.add_metric([str(quantile)], float("nan") if value is None else value)
            yield recent
        answers = CounterMetricFamily(
            "herald_http_answers", "Answers by route and status", labels=["route", "status"]
        )
        for (route, status), count in list(service.answers.items()):
            answers.add_metric([route, str(status)], float(count))
        yield answers
        refusals = CounterMetricFamily(
            "herald_http_refusals", "Refused and failed requests by code", labels=["code"]
        )
        for code, count in list(service.refusals.items()):
            refusals.add_metric([code], float(count))
        yield refusals
        yield GaugeMetricFamily(
            "herald_http_active", "Requests that are being answered", value=float(service.active)
        )


class MetricsRoute:
    """The text of `/metrics`; the process's own figures, such as host bytes, are in it, too."""

    def __init__(self, service: Service) -> None:
        from prometheus_client import CollectorRegistry, ProcessCollector

        self._registry = CollectorRegistry()
        self._registry.register(FiguresCollector(service))
        ProcessCollector(registry=self._registry)

    def text(self) -> tuple[bytes, str]:
        """The metrics and their content type."""
        from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

        return generate_latest(self._registry), CONTENT_TYPE_LATEST
