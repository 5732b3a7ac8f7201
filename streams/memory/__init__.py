"""The log in this process: `broker.py` is what connections share, `client.py` is one of them."""
