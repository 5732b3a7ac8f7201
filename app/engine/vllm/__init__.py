"""vLLM, in this process or as a server: `engine.py` is the engine, `plugin.py` what vLLM loads."""
