"""A client on a process of its own, which measures how long its requests take.

    python -m tests.harness.http_prober PORT KEY

One request each 20 ms, every tenth on a new connection, until its input ends; then it prints the
times in milliseconds as JSON. A time counts from the moment when the request was due, so that a
pause of the gateway counts in all requests that it delays. In the process of a test it would
measure the test's other clients instead.
"""

from __future__ import annotations

import http.client
import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

PERIOD_S = 0.02
REQUESTS_A_CONNECTION = 10


@contextmanager
def probing(port: int, key: str, times_ms: list[float]) -> Iterator[None]:
    """Probe a gateway; `times_ms` has the times at the end. An answer but 200 is an error."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.harness.http_prober", str(port), key],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield
    finally:
        out, _ = process.communicate("", 20)
        assert process.returncode == 0
        times_ms += json.loads(out)


def main(port: str, key: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=20)
    times_ms: list[float] = []
    due = time.perf_counter()
    while not select.select([sys.stdin], [], [], max(0.0, due - time.perf_counter()))[0]:
        if len(times_ms) % REQUESTS_A_CONNECTION == 0:
            connection.close()
        connection.request("GET", "/v1/models", headers={"authorization": f"Bearer {key}"})
        response = connection.getresponse()
        response.read()
        times_ms.append(1000 * (time.perf_counter() - due))
        assert response.status == 200
        due += PERIOD_S
    sys.stdout.write(json.dumps(times_ms))


if __name__ == "__main__":
    main(*sys.argv[1:])
