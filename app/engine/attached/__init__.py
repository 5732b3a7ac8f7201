"""A server that runs already, as an engine: `engine.py` puts together what the others know."""
