"""Getting a broker for tests and demos (`choice.py`): given, Docker, JVM; none is left behind."""
