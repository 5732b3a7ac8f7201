"""Publish a prompt to Kafka and follow its answer.

kvlane up --port 9092                      # in another shell
python examples/publish_and_follow.py      # or: publish_and_follow.py SERVERS TOPIC_PREFIX
"""

from __future__ import annotations

import asyncio
import sys

from kvlane import Chunk, Client, KafkaConnection, KafkaLog, Prompt, SystemClock


async def main(servers: str = "127.0.0.1:9092", prefix: str = "kvlane.") -> None:
    """Ask once, and print the answer as it arrives."""
    log = KafkaLog(KafkaConnection(servers, "example"), prefix)
    await log.start()
    try:
        async with Client(log, SystemClock()) as client:
            body = {"messages": [{"role": "user", "content": "What is a log?"}], "max_tokens": 40}
            # The id is an idempotency key: publishing it again is harmless. It is also all that
            # another program needs to follow the answer, from its beginning, for an hour.
            request_id = await client.publish(Prompt(id=client.new_request_id(), body=body))
            async for piece in client.stream(request_id, timeout_s=60):
                if isinstance(piece, Chunk):
                    print(piece.text, end="", flush=True)
                    if piece.finish_reason is not None:
                        print(f"\n{piece.index + len(piece.token_ids)} tokens")
                else:  # a router ended the request: no worker, its deadline, ...
                    print(f"\nended: {piece.code} {piece.message}")
    finally:
        await log.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
