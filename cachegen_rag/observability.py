"""Seeing requests from outside: Prometheus metrics, OpenTelemetry spans, a file of records. Every name is in this file.

Each observer is called with a finished RequestRecord: ``KVCache(..., on_request=PrometheusObserver())``, several with
``on_request=together(a, b)``. Logging needs no extra: the loggers are named after the modules, below ``cachegen_rag``,
and stay silent unless the application configures logging.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachegen_rag.errors import MissingDependencyError
from cachegen_rag.metrics import RequestRecord, SegmentRecord
from cachegen_rag.shadow import ShadowCheck

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer
    from prometheus_client import CollectorRegistry

Observer = Callable[[RequestRecord], None]
log = logging.getLogger(__name__)

REQUESTS = "cachegen_requests"
TTFT = "cachegen_time_to_first_token_seconds"
WAIT = "cachegen_wait_seconds"
DURATION = "cachegen_request_duration_seconds"
PROMPT_TOKENS = "cachegen_prompt_tokens"
COMPLETION_TOKENS = "cachegen_completion_tokens"
BYTES_FETCHED = "cachegen_bytes_fetched"
STORED_TOKENS = "cachegen_stored_tokens"
DOCUMENTS = "cachegen_documents"
MISSES = "cachegen_document_misses"
STAGE = "cachegen_stage_seconds"
SHADOW_CHECKS = "cachegen_shadow_checks"
SHADOW_KL = "cachegen_shadow_kl_nats"
SHADOW_TOP1 = "cachegen_shadow_top1"
METRICS = {
    REQUESTS: "Requests by how they ended",
    TTFT: "From the request to its first token",
    WAIT: "From the request until the engine was free",
    DURATION: "From the request to its end",
    PROMPT_TOKENS: "Tokens of prompts: computed, spliced, or recomputed inside a spliced document",
    COMPLETION_TOKENS: "Tokens generated",
    BYTES_FETCHED: "Bytes of KV read from the store",
    STORED_TOKENS: "Tokens of documents that were missed and are stored when idle",
    DOCUMENTS: "Documents in prompts: hit (spliced) or miss (computed from the text)",
    MISSES: "Documents computed from the text, by reason",
    STAGE: "Time spent in fetch, decode, splice and recompute",
    SHADOW_CHECKS: "Spliced requests that were computed in full too",
    SHADOW_KL: "KL per token of a spliced request against the same computed in full",
    SHADOW_TOP1: "Share of its tokens whose most likely token is the same, the last check",
}
STAGES = ("fetch", "decode", "splice", "recompute")
SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
"""Upper bounds of the histograms' buckets."""

NATS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Upper bounds of the KL's buckets."""

SPAN_REQUEST = "chat"
SPAN_SEGMENT = "cachegen.segment"
ATTRIBUTE_PREFIX = "cachegen."

MAX_REASONS = 50
"""Different reasons that get a label of their own; the rest are counted as ``other``."""


def reason_class(reason: str | None) -> str:
    """A reason without its numbers and hashes, so that it can be a label.

    >>> reason_class("CorruptBitstreamError: 17 bytes of object 0a1b2c3d4e5f, which has 90")
    'CorruptBitstreamError: N bytes of object N, which has N'
    """
    return re.sub(r"\b(?:[0-9a-f]{8,}|\d[\d.,]*\d|\d)\b", "N", reason or "unknown")[:80]


def together(*observers: Observer) -> Observer:
    """One observer that calls each of these; one that fails does not keep the others from being called."""

    def call(record: RequestRecord) -> None:
        for observer in observers:
            try:
                observer(record)
            except Exception:
                log.exception("an observer failed")

    return call


class RequestLog:
    """Appends every record to a file, one JSON object a line: what ``cachegen-rag report`` reads."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()

    def __call__(self, record: RequestRecord) -> None:
        line = json.dumps(record.as_dict()) + "\n"
        with self._lock, self.path.open("a", encoding="utf-8") as lines:
            lines.write(line)


class PrometheusObserver:
    """Counters and histograms for Prometheus, in the default registry or the one given.

    Raises MissingDependencyError without the ``observability`` extra.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        try:
            from prometheus_client import REGISTRY, Counter, Gauge, Histogram
        except ImportError as error:
            raise _missing("prometheus-client") from error
        home = registry or REGISTRY

        def counter(name: str, *labels: str) -> Any:
            return Counter(name, METRICS[name], ("model", *labels), registry=home)

        def histogram(name: str, *labels: str, buckets: tuple[float, ...] = SECONDS) -> Any:
            return Histogram(name, METRICS[name], ("model", *labels), registry=home, buckets=buckets)

        self._requests = counter(REQUESTS, "finish_reason")
        self._prompt = counter(PROMPT_TOKENS, "source")
        self._completion = counter(COMPLETION_TOKENS)
        self._bytes = counter(BYTES_FETCHED)
        self._stored = counter(STORED_TOKENS)
        self._documents = counter(DOCUMENTS, "outcome")
        self._misses = counter(MISSES, "reason")
        self._ttft, self._wait, self._duration = histogram(TTFT), histogram(WAIT), histogram(DURATION)
        self._stage = histogram(STAGE, "stage")
        self._shadow_checks, self._shadow_kl = counter(SHADOW_CHECKS), histogram(SHADOW_KL, buckets=NATS)
        self._shadow_top1 = Gauge(SHADOW_TOP1, METRICS[SHADOW_TOP1], ("model",), registry=home)
        self._reasons: set[str] = set()

    def __call__(self, record: RequestRecord) -> None:
        model = record.model
        self._requests.labels(model, record.finish_reason or "cancelled").inc()
        computed = record.prompt_tokens - record.spliced_tokens - record.recomputed_tokens
        self._prompt.labels(model, "computed").inc(max(0, computed))
        self._prompt.labels(model, "spliced").inc(record.spliced_tokens)
        self._prompt.labels(model, "recomputed").inc(record.recomputed_tokens)
        self._completion.labels(model).inc(record.completion_tokens)
        self._bytes.labels(model).inc(record.bytes_fetched)
        self._stored.labels(model).inc(record.stored_tokens)
        self._wait.labels(model).observe(record.wait_ms / 1e3)
        self._duration.labels(model).observe(record.total_ms / 1e3)
        if record.completion_tokens:
            self._ttft.labels(model).observe(record.ttft_ms / 1e3)
        for segment in record.segments:
            if segment.kind == "document":
                self._document(model, segment)

    def shadow(self, check: ShadowCheck) -> None:
        """Count a shadow check: ``KVCache(..., on_shadow=observer.shadow)``."""
        self._shadow_checks.labels(check.model).inc()
        self._shadow_kl.labels(check.model).observe(check.kl)
        self._shadow_top1.labels(check.model).set(check.top1)

    def _document(self, model: str, segment: SegmentRecord) -> None:
        if segment.source == "text":
            self._documents.labels(model, "miss").inc()
            self._misses.labels(model, self._label(segment.reason)).inc()
            return
        self._documents.labels(model, "hit").inc()
        for stage in STAGES:
            self._stage.labels(model, stage).observe(getattr(segment, f"{stage}_ms") / 1e3)

    def _label(self, reason: str | None) -> str:
        label = reason_class(reason)
        if label not in self._reasons:
            if len(self._reasons) >= MAX_REASONS:
                return "other"
            self._reasons.add(label)
        return label


class OpenTelemetryObserver:
    """One span a request, with a child span for each document; attributes follow the GenAI conventions.

    Spans are made when the request has ended, at the times it had; they become children of the span that is current
    then. Raises MissingDependencyError without the ``observability`` extra.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        try:
            from opentelemetry import trace
        except ImportError as error:
            raise _missing("opentelemetry-api") from error
        self._trace = trace
        self._tracer = tracer or trace.get_tracer("cachegen_rag")

    def __call__(self, record: RequestRecord) -> None:
        began = int((record.started_at or time.time() - record.total_ms / 1e3) * 1e9)
        span = self._tracer.start_span(
            f"{SPAN_REQUEST} {record.model}",
            kind=self._trace.SpanKind.INTERNAL,
            start_time=began,
            attributes={
                "gen_ai.operation.name": "chat",
                "gen_ai.provider.name": "cachegen_rag",
                "gen_ai.request.model": record.model,
                "gen_ai.usage.input_tokens": record.prompt_tokens,
                "gen_ai.usage.output_tokens": record.completion_tokens,
                "gen_ai.response.finish_reasons": [record.finish_reason or "cancelled"],
                f"{ATTRIBUTE_PREFIX}ttft_ms": record.ttft_ms,
                f"{ATTRIBUTE_PREFIX}wait_ms": record.wait_ms,
                f"{ATTRIBUTE_PREFIX}spliced_tokens": record.spliced_tokens,
                f"{ATTRIBUTE_PREFIX}recomputed_tokens": record.recomputed_tokens,
                f"{ATTRIBUTE_PREFIX}stored_tokens": record.stored_tokens,
                f"{ATTRIBUTE_PREFIX}bytes_fetched": record.bytes_fetched,
            },
        )
        inside = self._trace.set_span_in_context(span)
        at = began + int(record.wait_ms * 1e6)
        for segment in record.segments:
            if segment.kind == "document":
                at = self._segment(segment, inside, at)
        span.end(began + int(record.total_ms * 1e6))

    def _segment(self, segment: SegmentRecord, inside: Any, at: int) -> int:
        attributes = {f"{ATTRIBUTE_PREFIX}{name}": value for name, value in vars(segment).items() if value is not None}
        span = self._tracer.start_span(SPAN_SEGMENT, context=inside, start_time=at, attributes=attributes)
        end = at + int(1e6 * sum(getattr(segment, f"{stage}_ms") for stage in STAGES))
        span.end(end)
        return end


def _missing(package: str) -> MissingDependencyError:
    return MissingDependencyError(f"{package} is not installed: pip install 'cachegen-rag[observability]'")
