"""The log in this process: `memory_broker.py` and `memory_log.py`, one connection to it."""
