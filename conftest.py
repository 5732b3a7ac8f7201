"""Plugins of the test suite; pytest takes them from the root of the tree only."""

pytest_plugins = ["tests.brokers"]
