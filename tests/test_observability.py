"""Observers see every request once, with names that do not change."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from cachegen_rag import observability as seen
from cachegen_rag.errors import MissingDependencyError
from cachegen_rag.metrics import RequestRecord, SegmentRecord
from cachegen_rag.report import load_runs
from cachegen_rag.shadow import ShadowCheck

HIT = SegmentRecord(
    "document", 100, source="store", level=2, recomputed=4, bytes=5000, fetch_ms=2, decode_ms=8, splice_ms=1
)
MISS = SegmentRecord("document", 50, reason="CorruptBitstreamError: 17 bytes of object 0a1b2c3d4e5f, which has 90")
RECORD = RequestRecord(model="m", started_at=1.7e9, prompt_tokens=170, completion_tokens=9, spliced_tokens=96,
                       recomputed_tokens=4, stored_tokens=50, bytes_fetched=5000, wait_ms=10, ttft_ms=120, total_ms=900,
                       finish_reason="stop", segments=[SegmentRecord("text", 20), HIT, MISS])  # fmt: skip
CANCELLED = RequestRecord(model="m", prompt_tokens=10)


def test_prometheus() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    observer = seen.PrometheusObserver(registry)
    observer(RECORD)
    observer(CANCELLED)
    observer.shadow(ShadowCheck("m", kl=0.02, top1=0.5, tokens=4))
    observer.shadow(ShadowCheck("m", kl=0.04, top1=1.0, tokens=4))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", **labels})

    assert value("cachegen_requests_total", finish_reason="stop") == 1
    assert value("cachegen_requests_total", finish_reason="cancelled") == 1
    assert value("cachegen_prompt_tokens_total", source="spliced") == 96
    assert value("cachegen_prompt_tokens_total", source="recomputed") == 4
    assert value("cachegen_prompt_tokens_total", source="computed") == 70 + 10
    assert value("cachegen_completion_tokens_total") == 9
    assert value("cachegen_bytes_fetched_total") == 5000
    assert value("cachegen_stored_tokens_total") == 50
    assert value("cachegen_documents_total", outcome="hit") == 1 == value("cachegen_documents_total", outcome="miss")
    reason = "CorruptBitstreamError: N bytes of object N, which has N"
    assert value("cachegen_document_misses_total", reason=reason) == 1
    assert value("cachegen_time_to_first_token_seconds_count") == 1, "a request without a token has no time to it"
    assert value("cachegen_time_to_first_token_seconds_sum") == pytest.approx(0.12)
    assert value("cachegen_stage_seconds_sum", stage="decode") == pytest.approx(0.008)
    assert value("cachegen_shadow_checks_total") == 2 and value("cachegen_shadow_top1") == 1.0
    assert value("cachegen_shadow_kl_nats_sum") == pytest.approx(0.06)
    assert value("cachegen_shadow_kl_nats_bucket", le="0.03") == 1
    exported = {m.name for m in registry.collect()}
    assert exported == set(seen.METRICS)


def test_reasons_do_not_become_endless_labels() -> None:
    prometheus = pytest.importorskip("prometheus_client")
    registry = prometheus.CollectorRegistry()
    observer = seen.PrometheusObserver(registry)
    words = [f"{a}{b}" for a in "abcdefghij" for b in "klmnopqrst"]
    for word in words:
        observer(RequestRecord(model="m", segments=[SegmentRecord("document", 1, reason=f"because of {word}")]))
    labels = {s.labels["reason"] for m in registry.collect() if m.name == seen.MISSES for s in m.samples}
    assert len(labels) == seen.MAX_REASONS + 1 and "other" in labels


def test_opentelemetry() -> None:
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = provider.get_tracer("test")
    with tracer.start_as_current_span("outer") as outer:
        seen.OpenTelemetryObserver(tracer)(RECORD)
    spans = {span.name: span for span in exporter.get_finished_spans() if span.name != seen.SPAN_SEGMENT}
    request = spans["chat m"]
    assert request.parent.span_id == outer.get_span_context().span_id
    assert request.end_time - request.start_time == 900_000_000 and request.start_time == int(1.7e18)
    assert request.attributes["gen_ai.usage.input_tokens"] == 170
    assert request.attributes["cachegen.spliced_tokens"] == 96
    parts = [span for span in exporter.get_finished_spans() if span.name == seen.SPAN_SEGMENT]
    assert [part.attributes["cachegen.source"] for part in parts] == ["store", "text"]
    assert all(part.parent.span_id == request.context.span_id for part in parts)
    assert parts[0].end_time - parts[0].start_time == 11_000_000
    assert "0a1b2c3d4e5f" in parts[1].attributes["cachegen.reason"]


def test_a_file_of_records_makes_a_report(tmp_path: Path) -> None:
    log = seen.RequestLog(tmp_path / "requests.jsonl")
    log(RECORD)
    log(CANCELLED)
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [RECORD.as_dict(), CANCELLED.as_dict()]
    assert load_runs([log.path]).requests == [RECORD.as_dict(), CANCELLED.as_dict()]


def test_one_failing_observer_does_not_silence_another(caplog: pytest.LogCaptureFixture) -> None:
    got: list[RequestRecord] = []

    def fails(record: RequestRecord) -> None:
        raise RuntimeError("no")

    seen.together(fails, got.append)(RECORD)
    assert got == [RECORD] and "an observer failed" in caplog.text


@pytest.mark.parametrize(
    ("module", "observer"),
    [("prometheus_client", seen.PrometheusObserver), ("opentelemetry", seen.OpenTelemetryObserver)],
)
def test_without_the_extra(monkeypatch: pytest.MonkeyPatch, module: str, observer: type) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingDependencyError, match=r"cachegen-rag\[observability\]"):
        observer()


def test_logging_is_silent_unless_asked_for() -> None:
    code = (
        "import logging, cachegen_rag; log = logging.getLogger('cachegen_rag.cache'); log.warning('hidden');"
        "print(any(isinstance(h, logging.NullHandler) for h in logging.getLogger('cachegen_rag').handlers))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout.strip(), done.stderr) == ("True", "")


def test_the_dashboard_uses_these_names() -> None:
    dashboard = Path(__file__).resolve().parents[1] / "cookbook" / "grafana-dashboard.json"
    text = dashboard.read_text(encoding="utf-8")
    queries = [t["expr"] for p in json.loads(text)["panels"] for t in p.get("targets", [])]
    assert queries
    for name in seen.METRICS:
        assert any(name in query for query in queries), f"{name} is on no panel"
    assert logging.getLogger("cachegen_rag").handlers
