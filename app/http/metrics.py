"""What a gateway counts, for Prometheus. All of it is there, at zero, before the first request."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
    generate_latest,
)

from app.http.answers import Choice
from streams.clock import Clock
from streams.reply import Reply

ENDPOINTS = ("chat", "completion", "embedding", "streams", "other")
_STATUSES = (200, 400, 404, 408, 413, 499, 500, 503, 529)
OUTCOMES = (
    "stop", "length", "content_filter", "tool_calls", "function_call", "left", "cancelled",
    "deadline", "no_workers", "none_eligible", "all_busy", "pinned_gone", "pinned_busy",
    "queue_full", "error",
)  # fmt: skip

SECONDS = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 500)
TOKENS = (1, 10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_DELAYS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1)

BLOCK_TOKENS = 16
"""Tokens of an answer that count as one in the times from token to token: long answers weigh more,
and a stall in the middle of one shows."""
DELAY_EVERY_S = 0.05
"""How often the delay of the event loop is measured: 20 times a second cost nothing, and a p99
over a minute rests on 1200 values."""


class Metrics:
    """The metrics of one gateway, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.responses = Counter(
            "kvlane_http_responses", "HTTP responses by endpoint and status",
            ["endpoint", "status"], registry=registry,
        )  # fmt: skip
        self.answers = Counter(
            "kvlane_answers", "Answers by how they ended for the client",
            ["outcome"], registry=registry,
        )  # fmt: skip
        self.under_way = Gauge(
            "kvlane_answers_under_way", "Answers that are being told", registry=registry
        )
        self.ttft = Histogram(
            "kvlane_ttft_seconds", "From the request to its first token",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.itl = Histogram(
            "kvlane_itl_seconds", "From token to token, mean of a block of an answer",
            buckets=SECONDS, registry=registry,
        )  # fmt: skip
        self.prompt_tokens = Histogram(
            "kvlane_prompt_tokens", "Tokens of a prompt", buckets=TOKENS, registry=registry
        )
        self.output_tokens = Histogram(
            "kvlane_output_tokens", "Tokens of an answer", buckets=TOKENS, registry=registry
        )
        self.loop_delay = LoopDelay(registry)
        self.holes = Counter(
            "kvlane_holes", "Runs that lost a Chunk; must stay 0", registry=registry
        )
        self.skipped = Counter(
            "kvlane_chunks_skipped", "Chunks that were repeats, or of runs that were given up",
            registry=registry,
        )  # fmt: skip
        self.caught_up = Gauge(
            "kvlane_fold_caught_up", "Whether a fold has read its topics to where they ended",
            ["fold"], registry=registry,
        )  # fmt: skip
        self.log_silent = Gauge(
            "kvlane_log_silent_seconds", "Since the log last answered; it is asked every 5 s",
            registry=registry,
        )  # fmt: skip
        ProcessCollector(registry=registry)
        for endpoint in ENDPOINTS:
            for status in _STATUSES:
                self.responses.labels(endpoint, str(status))
        for outcome in OUTCOMES:
            self.answers.labels(outcome)

    def page(self) -> bytes:
        """Everything, in Prometheus' text format."""
        return generate_latest(self.registry)

    def answered(self, choice: Choice, reply: Reply, outcome: str) -> None:
        """An answer is over for its client; `outcome`: its finish reason, or what went wrong."""
        self.answers.labels(outcome if outcome in OUTCOMES else "error").inc()
        self.output_tokens.observe(choice.counted_tokens)
        self.holes.inc(reply.holes)
        self.skipped.inc(reply.skipped)


class LoopDelay:
    """How late the event loop runs timers: whatever holds it up holds up everybody."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._histogram = Histogram(
            "kvlane_event_loop_delay_seconds", "How late the event loop ran a timer",
            buckets=_DELAYS, registry=registry,
        )  # fmt: skip

    async def watch(self, clock: Clock) -> None:
        """Measure, until cancelled."""
        while True:
            due = clock.now() + DELAY_EVERY_S
            await clock.sleep(DELAY_EVERY_S)
            self._histogram.observe(max(0.0, clock.now() - due))


class Pace:
    """When the tokens of one answer came. Times are of the given clock, in seconds."""

    def __init__(self, clock: Clock, began_at: float) -> None:
        """`began_at`: when its request came."""
        self._clock = clock
        self._began_at = began_at
        self._first_at: float | None = None
        self._last_at = 0.0
        self._block_at = 0.0
        """Since when its present block is told, and how many tokens there were before."""
        self._block_from = 0
        self._gaps: list[float] = []
        """From token to token, in each block that is over."""

    def seen(self, tokens: int) -> None:
        """So many tokens were shown by now; of an answer without any, its position."""
        now = self._last_at = self._clock.now()
        if self._first_at is None:
            if tokens:
                self._first_at = self._block_at = now
                self._block_from = tokens
        elif tokens - self._block_from >= BLOCK_TOKENS:
            self._gaps.append((now - self._block_at) / (tokens - self._block_from))
            self._block_at, self._block_from = now, tokens

    def report(self, metrics: Metrics, seen: int, tokens: int) -> None:
        """The answer is over for its client, who has seen so much of it: so many tokens, 0 where
        nobody counted them."""
        if self._first_at is None:
            return
        metrics.ttft.observe(self._first_at - self._began_at)
        if seen > self._block_from:
            self._gaps.append((self._last_at - self._block_at) / (seen - self._block_from))
        for gap in self._gaps if tokens else ():
            metrics.itl.observe(gap * seen / tokens)
