"""The log over a real broker, by aiokafka: `kafka_log.py` is the `Log` of `streams/ports.py`."""
