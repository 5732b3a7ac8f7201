"""vLLM: `async_llm.py` runs it in this process, `plugin.py` is loaded by vLLM itself."""
