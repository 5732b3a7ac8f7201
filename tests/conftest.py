"""Settings of all tests. Broker fixtures are in `tests.brokers`."""

from hypothesis import settings

# An example may be slow because the machine is busy; the time limit of the whole test is enough.
settings.register_profile("kvlane", deadline=None)
settings.load_profile("kvlane")
