"""The log in this process: `memory_broker.py` is what connections share, `client.py` is one of
them.
"""
