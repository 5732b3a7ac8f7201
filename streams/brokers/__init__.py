"""Brokers for tests and demos (`broker_factory.py`): given, Docker, JVM; none is left behind."""
