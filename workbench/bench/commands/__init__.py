"""The commands of `kvlane bench`, by subject; `benchmark_command.py` has their common form."""
