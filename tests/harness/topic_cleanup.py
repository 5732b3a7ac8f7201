"""Removal of test topics: with the topics of all tests a broker becomes slow."""

from __future__ import annotations

from aiokafka.admin import AIOKafkaAdminClient


async def delete_topics(bootstrap_servers: str, prefix: str) -> None:
    """Delete every topic whose name starts with the prefix."""
    admin = AIOKafkaAdminClient(bootstrap_servers=bootstrap_servers)
    await admin.start()
    try:
        made = [topic for topic in await admin.list_topics() if topic.startswith(prefix)]
        if made:
            await admin.delete_topics(made)
    finally:
        await admin.close()
