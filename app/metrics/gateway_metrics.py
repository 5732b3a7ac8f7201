"""Prometheus metrics of a gateway. Every series exists, at zero, before the first request."""

from __future__ import annotations

from kvlane.app.metrics.metric_set import TOKEN_BUCKETS, MetricSet
from kvlane.streams.clock import Clock

RESPONSE_OUTCOMES = (
    "stop", "length", "content_filter", "tool_calls", "function_call", "left", "cancelled",
    "deadline", "no_workers", "none_eligible", "all_busy", "pinned_gone", "pinned_busy",
    "queue_full", "unreadable", "error",
)  # fmt: skip

BLOCK_TOKENS = 16
"""Tokens per sample of the inter-token latency: long answers weigh more, and a stall in the middle
of one is visible."""


class GatewayMetrics(MetricSet):
    def __init__(self) -> None:
        super().__init__()
        self.responses = self.counter(
            "kvlane_gateway_http_responses",
            "HTTP responses by endpoint and status",
            "endpoint",
            "status",
        )
        self.refused_requests = self.counter(
            "kvlane_gateway_refused_requests", "Requests beyond a limit of their tenant", "limit"
        )
        self.completed_responses = self.counter(
            "kvlane_gateway_completions", "Ended completions, by outcome for the client", "outcome"
        )
        self.responses_in_flight = self.gauge(
            "kvlane_gateway_completions_in_flight", "Completions that are being streamed"
        )
        self.time_to_first_token = self.histogram(
            "kvlane_gateway_time_to_first_token_seconds", "Time from a request to its first token"
        )
        self.inter_token_latency = self.histogram(
            "kvlane_gateway_inter_token_latency_seconds",
            "Inter-token latency, averaged over blocks of 16 tokens",
        )
        self.prompt_tokens = self.histogram(
            "kvlane_gateway_prompt_tokens", "Prompt tokens of a request", buckets=TOKEN_BUCKETS
        )
        self.output_tokens = self.histogram(
            "kvlane_gateway_output_tokens", "Output tokens of a completion", buckets=TOKEN_BUCKETS
        )
        self.stream_gaps = self.counter(
            "kvlane_gateway_stream_gaps", "Runs with a lost Chunk; must stay 0"
        )
        self.duplicate_chunks = self.counter(
            "kvlane_gateway_skipped_chunks", "Chunks that were duplicates, or of abandoned runs"
        )
        self.caught_up = self.gauge(
            "kvlane_view_caught_up",
            "Whether a view has caught up with the end of its topics at start",
            "view",
        )
        self.log_silent = self.gauge(
            "kvlane_gateway_broker_last_response_age_seconds",
            "Time since the broker last answered; it is asked every 5 s",
        )
        for outcome in RESPONSE_OUTCOMES:
            self.completed_responses.labels(outcome)

    def observe_response(
        self, outcome: str, output_tokens: int | None, gaps: int, skipped: int
    ) -> None:
        """Count a response. `outcome`: its finish reason, or the code of its error;
        `output_tokens`: None if unknown."""
        self.completed_responses.labels(outcome if outcome in RESPONSE_OUTCOMES else "error").inc()
        if output_tokens is not None:
            self.output_tokens.observe(output_tokens)
        self.stream_gaps.inc(gaps)
        self.duplicate_chunks.inc(skipped)


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
        """Report the latencies of an ended answer. `seen`: its last position; `tokens`: 0
        if unknown."""
        if self._first_at is None:
            return
        metrics.time_to_first_token.observe(self._first_at - self._began_at)
        if seen > self._block_from:
            self._gaps.append((self._last_at - self._block_at) / (seen - self._block_from))
        for gap in self._gaps if tokens else ():
            metrics.inter_token_latency.observe(gap * seen / tokens)
