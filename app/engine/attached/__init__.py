"""Engines over a running OpenAI-compatible server, to which a worker is attached."""
