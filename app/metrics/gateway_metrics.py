"""Prometheus metrics of a gateway. Every series exists, at zero, before the first request."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from streams.clock import Clock

ENDPOINTS = ("chat", "completion", "embedding", "streams", "other")
_STATUSES = (200, 400, 404, 408, 413, 499, 500, 503, 529)
RESPONSE_OUTCOMES = (
    "stop", "length", "content_filter", "tool_calls", "function_call", "left", "cancelled",
    "deadline", "no_workers", "none_eligible", "all_busy", "pinned_gone", "pinned_busy",
    "queue_full", "error",
)  # fmt: skip

LATENCY_BUCKETS_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500)
TOKEN_BUCKETS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_DELAYS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

BLOCK_TOKENS = 16
"""Tokens per sample of the inter-token latency: long answers weigh more, and a stall in the middle
of one is visible."""
LOOP_DELAY_PERIOD_S = 0.05
"""Period of event loop delay samples: 20 per second have no measurable cost, and a p99 over a
minute is based on 1200 values."""


class GatewayMetrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.responses = Counter(
            "kvlane_gateway_http_responses", "HTTP responses by endpoint and status",
            ["endpoint", "status"], registry=registry,
        )  # fmt: skip
        self.completed_responses = Counter(
            "kvlane_gateway_completions", "Completions that ended, by outcome for the client",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.responses_in_flight = Gauge(
            "kvlane_gateway_completions_in_flight",
            "Completions that are being streamed",
            registry=registry,
        )
        self.time_to_first_token = Histogram(
            "kvlane_gateway_time_to_first_token_seconds", "Time from a request to its first token",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.inter_token_latency = Histogram(
            "kvlane_gateway_inter_token_latency_seconds",
            "Inter-token latency, averaged over blocks of 16 tokens",
            buckets=LATENCY_BUCKETS_S, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Histogram(
            "kvlane_gateway_prompt_tokens",
            "Prompt tokens of a request",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.output_tokens = Histogram(
            "kvlane_gateway_output_tokens",
            "Output tokens of a completion",
            buckets=TOKEN_BUCKETS,
            registry=registry,
        )
        self.loop_delay = LoopDelayMonitor(registry)
        self.stream_gaps = Counter(
            "kvlane_gateway_stream_gaps", "Runs with a lost Chunk; must stay 0", registry=registry
        )
        self.duplicate_chunks = Counter(
            "kvlane_gateway_skipped_chunks", "Chunks that were duplicates, or of abandoned runs",
            registry=registry,
        )  # fmt: skip
        self.caught_up = Gauge(
            "kvlane_view_caught_up",
            "Whether a view has caught up with the end of its topics at start",
            ["view"], registry=registry,
        )  # fmt: skip
        self.log_silent = Gauge(
            "kvlane_gateway_broker_last_response_age_seconds",
            "Time since the broker last answered; it is asked every 5 s",
            registry=registry,
        )  # fmt: skip
        ProcessCollector(registry=registry)
        for endpoint in ENDPOINTS:
            for status in _STATUSES:
                self.responses.labels(endpoint, str(status))
        for outcome in RESPONSE_OUTCOMES:
            self.completed_responses.labels(outcome)

    async def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def observe_response(self, outcome: str, output_tokens: int, gaps: int, skipped: int) -> None:
        """Count a response. `outcome`: its finish reason, or the code of its error."""
        self.completed_responses.labels(outcome if outcome in RESPONSE_OUTCOMES else "error").inc()
        self.output_tokens.observe(output_tokens)
        self.stream_gaps.inc(gaps)
        self.duplicate_chunks.inc(skipped)


class LoopDelayMonitor:
    """Delay of timers in the event loop, a sign of blocking work."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "kvlane_event_loop_delay_seconds", "Delay of timers in the event loop",
            buckets=_DELAYS, registry=registry,
        )  # fmt: skip

    async def watch(self, clock: Clock) -> None:
        """Measure, until cancelled."""
        while True:
            due = clock.now() + LOOP_DELAY_PERIOD_S
            await clock.sleep(LOOP_DELAY_PERIOD_S)
            self._histogram.observe(max(0.0, clock.now() - due))


class TokenTimes:
    """Arrival times of the tokens of one answer, in seconds of the given clock."""

    def __init__(self, clock: Clock, began_at: float) -> None:
        """`began_at`: when its request came."""
        self._clock = clock
        self._began_at = began_at
        self._first_at: float | None = None
        self._last_at = 0.0
        self._block_at = 0.0
        """Start time of the current block, and the number of tokens before it."""
        self._block_from = 0
        self._gaps: list[float] = []
        """Inter-token latency of each complete block."""

    def on_tokens(self, tokens: int) -> None:
        """Record the number of tokens so far, or the position in an answer without token ids."""
        now = self._last_at = self._clock.now()
        if self._first_at is None:
            if tokens:
                self._first_at = self._block_at = now
                self._block_from = tokens
        elif tokens - self._block_from >= BLOCK_TOKENS:
            self._gaps.append((now - self._block_at) / (tokens - self._block_from))
            self._block_at, self._block_from = now, tokens

    def report(self, metrics: GatewayMetrics, seen: int, tokens: int) -> None:
        """Report the latencies of an ended answer. `on_tokens`: its last position; `tokens`: 0
        if unknown."""
        if self._first_at is None:
            return
        metrics.time_to_first_token.observe(self._first_at - self._began_at)
        if seen > self._block_from:
            self._gaps.append((self._last_at - self._block_at) / (seen - self._block_from))
        for gap in self._gaps if tokens else ():
            metrics.inter_token_latency.observe(gap * seen / tokens)
