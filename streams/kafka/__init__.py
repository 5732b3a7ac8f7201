"""The log over a real broker, by aiokafka: `log.py` is the `Log` of `streams/ports.py`."""
