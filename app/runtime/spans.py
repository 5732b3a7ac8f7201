"""Spans of requests, by OpenTelemetry; off unless KVLANE_TRACE_ENDPOINT names a receiver.

    gateway.request, preprocessor.prompt     below the span of the client, if it sends `traceparent`
      ├─ router.select_worker                of each attempt, as the two below
      └─ router.route_request                of each phase of an attempt
           └─ worker.run                     linked to the run of the attempt before; of decode, to
                │                            that of its prefill
                └─ engine.generate           its `traceparent` goes to the engine, for vLLM's spans

The ids of the spans of an attempt follow from the id of the request and the attempt: routers and
workers can name them as parent or link, and no record holds them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from hashlib import blake2b
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, Span, SpanContext, SpanKind, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from kvlane.app.operator_error import OperatorError, install_hint
from kvlane.streams.records import Phase
from kvlane.streams.request import Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor, TracerProvider

    from kvlane.app.settings import Settings

TRACEPARENT = "traceparent"
NO_SPAN: Span = trace.INVALID_SPAN
EXPORT_TIMEOUT_S = 5.0
ROUTE, RUN = "route", "run"
DECODE_ROUTE, DECODE_RUN = "decode route", "decode run"
"""Spans with an id of their own for each attempt: of its first or only phase, and of decode."""

provider: TracerProvider | None = None
tracer: trace.Tracer | None = None
"""That of this process; without one, and without a `traceparent`, there are no spans."""
_chosen_id: ContextVar[int] = ContextVar("chosen_id", default=0)
_FORMAT = TraceContextTextMapPropagator()


class SpansUnavailable(OperatorError):
    correction = f"{install_hint('traces')}, or unset KVLANE_TRACE_ENDPOINT."


@contextmanager
def exported(settings: Settings, process: str) -> Iterator[None]:
    """Export the spans of this process, if there is a receiver; spans beyond the exporter's queue
    are dropped. Raises SpansUnavailable."""
    global provider, tracer  # noqa: PLW0603 - one for the process, as the packages have it
    if not settings.trace_endpoint:
        yield
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        raise SpansUnavailable(f"spans cannot be exported: {e}") from e
    url = f"{settings.trace_endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
    provider = new_provider(settings.trace_sample_ratio, BatchSpanProcessor(exporter), process)
    tracer = provider.get_tracer("kvlane")
    try:
        yield
    finally:
        tracer = None
        provider.shutdown()
        provider = None


def new_provider(ratio: float, processor: SpanProcessor, process: str) -> TracerProvider:
    """A provider with the ids and the sampling of this project. `ratio`: share of the requests
    without a sampled parent that are sampled."""
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
    from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio

    class SpanIds(RandomIdGenerator):
        def generate_span_id(self) -> int:
            return _chosen_id.get() or super().generate_span_id()

    provider = TracerProvider(
        sampler=ParentBasedTraceIdRatio(ratio),
        resource=Resource.create({"service.name": f"kvlane-{process}"}),
        id_generator=SpanIds(),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    return provider


def valid_traceparent(text: str | bytes | None) -> str:
    """A received `traceparent`, or "" if it is missing or malformed."""
    if not text:
        return ""
    text = text.decode(errors="replace") if isinstance(text, bytes) else text
    return text if _parse(text).is_valid else ""


def start_first_span(name: str, received: str, kind: SpanKind) -> Span:
    if tracer is None:
        return NO_SPAN
    parent = _below(_parse(received)) if received else Context()
    return tracer.start_span(name, context=parent, kind=kind)


def set_error(span: Span, code: str, *, is_server_error: bool) -> None:
    """The end of a request with an error. No text of the error: it may quote the prompt."""
    span.set_attribute("error.type", code)
    if is_server_error:
        span.set_status(StatusCode.ERROR)


def traceparent_of(span: Span, received: str = "") -> str:
    """The trace context for the next process: "" if the request is not sampled. Without a provider
    here: the `received` one, if that is sampled."""
    context = span.get_span_context()
    if isinstance(span, NonRecordingSpan) and received:
        context = _parse(received)
    if not (context.is_valid and context.trace_flags.sampled):
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-01"


def start_span(
    name: str,
    request: Request,
    attributes: Mapping[str, str | int],
    attempt: int = 0,
    *,
    below: str = "",
    own_id: str = "",
) -> Span:
    """A span of an attempt of a request that has a `traceparent`. `below`: ROUTE or RUN of the same
    attempt, else the first span is its parent. `own_id`: for a span that others refer to. A RUN is
    linked to that of the attempt before, a DECODE_RUN to that of its ended prefill."""
    if tracer is None:
        return NO_SPAN
    first = _parse(request.traceparent)
    parent = _attempt_span(first, request.id, attempt, below) if below else first
    links: Sequence[Link] = ()
    if own_id == DECODE_RUN and request.bootstrap_info is None:
        links = [Link(_attempt_span(first, request.id, attempt, RUN))]
    elif own_id == RUN and attempt:
        links = [Link(_attempt_span(first, request.id, attempt - 1, RUN))]
    chosen = _chosen_id.set(_span_id(request.id, attempt, own_id) if own_id else 0)
    try:
        return tracer.start_span(
            name,
            context=_below(parent),
            attributes={"request_id": request.id, "attempt": attempt, **attributes},
            links=links,
        )
    finally:
        _chosen_id.reset(chosen)


def route_of(phase: Phase) -> str:
    return DECODE_ROUTE if phase == "decode" else ROUTE


def run_of(phase: Phase) -> str:
    return DECODE_RUN if phase == "decode" else RUN


def _attempt_span(first: SpanContext, request_id: str, attempt: int, which: str) -> SpanContext:
    """The ids of the ROUTE or RUN span of an attempt. `first`: of the first span."""
    span_id = _span_id(request_id, attempt, which)
    return SpanContext(first.trace_id, span_id, is_remote=True, trace_flags=first.trace_flags)


def _span_id(request_id: str, attempt: int, which: str) -> int:
    digest = blake2b(f"{which}\0{attempt}\0{request_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") or 1


def _below(parent: SpanContext) -> Context:
    return trace.set_span_in_context(NonRecordingSpan(parent), Context())


def _parse(traceparent: str) -> SpanContext:
    """Invalid for a malformed one."""
    context = _FORMAT.extract({TRACEPARENT: traceparent}, Context())
    return trace.get_current_span(context).get_span_context()
