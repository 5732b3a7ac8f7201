"""What a worker does with its runs: `runs.py` admits them, `execution.py` executes one."""
