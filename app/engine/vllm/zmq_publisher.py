"""Non-blocking publisher of cache events inside vLLM's engine core.

It has the frames, numbers and replays of vLLM's own ZMQ publisher, but no thread that competes with
the scheduler: the events of a step are passed to the socket at once, which queues or drops them. A
slow reader detects dropped messages as a gap in the numbers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import Any

import msgspec
import zmq
from vllm.distributed.kv_events import EventPublisher, ZmqEventPublisher

from kvlane.app.engine.vllm.parent_death import end_with_parent

log = logging.getLogger(__name__)

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)


class NonBlockingPublisher(EventPublisher):  # type: ignore[misc]
    """See the module. The arguments are those of vLLM's `KVEventsConfig`, endpoints unprefixed.

    Endpoints with a `*` are bound, at one port for each rank. All others, `ipc` included, are
    connected to, so that all ranks can send to one receiver.
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
        self._attach(self._socket, endpoint)
        if replay_endpoint is not None:
            threading.Thread(
                target=self._replay, args=[replay_endpoint], name="replays", daemon=True
            ).start()

    def publish(self, events: Any) -> None:
        """Send the events of a step; takes about 20 µs."""
        events.data_parallel_rank = self._data_parallel_rank
        number, payload = self._number.to_bytes(8, "big"), self._encode(events)
        self._number += 1
        self._past.append((number, payload))
        self._socket.send_multipart((self._topic, number, payload), zmq.NOBLOCK)

    def shutdown(self) -> None:
        self._socket.close(linger=0)

    def _attach(self, socket: Any, endpoint: str) -> None:
        if "*" in endpoint:
            rank = self._data_parallel_rank
            socket.bind(ZmqEventPublisher.offset_endpoint_port(endpoint, rank))
        else:
            socket.connect(endpoint)

    def _replay(self, endpoint: str) -> None:
        """Answer replay requests, one at a time, in a thread that is otherwise idle."""
        socket: Any = zmq.Context.instance().socket(zmq.ROUTER)
        self._attach(socket, endpoint)
        while True:
            frames = socket.recv_multipart()
            if len(frames) != 3:
                log.warning("a replay request has %d frames instead of 3", len(frames))
                continue
            reader, _, first = frames
            for number, payload in self._past.copy():
                if number >= first:  # big endian: bytes compare as the numbers do
                    socket.send_multipart((reader, b"", self._topic, number, payload))
            socket.send_multipart((reader, b"", b"", END_OF_REPLAY, b""))
