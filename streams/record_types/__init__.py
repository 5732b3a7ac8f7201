"""The records by topic. They are imported from `streams/records.py`, which has all of them."""
