"""The publisher of cache events that runs inside vLLM's engine core.

It speaks as vLLM's own ZMQ publisher does, in frames, numbers and replays, so whoever reads that
one reads this one. But it has no thread that takes turns with the scheduler: a step's events are
encoded and given to the socket at once, which keeps them or drops them and never waits. What a slow
reader has missed shows as a gap in the numbers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import EventPublisher, ZmqEventPublisher

from app.engine.vllm.parent import end_with_parent
from app.engine.vllm.plugin import SCHEME

log = logging.getLogger(__name__)

END = (-1).to_bytes(8, "big", signed=True)


class Publisher(EventPublisher):  # type: ignore[misc]
    """See the module. The arguments are those of vLLM's `KVEventsConfig`.

    Endpoints with a `*` are bound, at a port for each rank as vLLM does it; all others are
    connected to, those of `ipc` as well, so that all ranks can speak to one listener.
    """

    def __init__(
        self,
        data_parallel_rank: int = 0,
        endpoint: str = "",
        replay_endpoint: str | None = None,
        buffer_steps: int = 10_000,
        hwm: int = 100_000,
        topic: str = "",
        **_: object,
    ) -> None:
        super().__init__(data_parallel_rank)
        end_with_parent()
        self._number = 0
        self._topic = topic.encode()
        self._encode = msgspec.msgpack.Encoder().encode
        self._past = deque[tuple[bytes, bytes]](maxlen=buffer_steps if replay_endpoint else 0)
        self._socket: Any = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(hwm)
        self._attach(self._socket, endpoint.removeprefix(SCHEME))
        if replay_endpoint is not None:
            threading.Thread(
                target=self._replay, args=[replay_endpoint], name="replays", daemon=True
            ).start()

    def publish(self, events: Any) -> None:
        """Send a step's events; some 20 microseconds."""
        events.data_parallel_rank = self._data_parallel_rank
        number, payload = self._number.to_bytes(8, "big"), self._encode(events)
        self._number += 1
        self._past.append((number, payload))
        self._socket.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def shutdown(self) -> None:
        """Close the socket; what it holds is dropped."""
        self._socket.close(linger=0)

    def _attach(self, socket: Any, endpoint: str) -> None:
        if "*" in endpoint:
            rank = self._data_parallel_rank
            socket.bind(ZmqEventPublisher.offset_endpoint_port(endpoint, rank))
        else:
            socket.connect(endpoint)

    def _replay(self, endpoint: str) -> None:
        """Answer those who missed something, one at a time; waiting for them costs nothing."""
        socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._attach(socket, endpoint.removeprefix(SCHEME))
        while True:
            asked = socket.recv_multipart()
            if len(asked) != 3:
                log.warning("a request for a replay has %d frames, not 3", len(asked))
                continue
            reader, _, first = asked
            for number, payload in self._past.copy():
                if number >= first:  # big endian: their bytes are in the order of the numbers
                    socket.send_multipart((reader, b"", self._topic, number, payload))
            socket.send_multipart((reader, b"", b"", END, b""))
