"""The runs of a worker: `run_queue.py` admits them, `run_executor.py` executes one."""
