"""All code that uses Kafka, and an in-memory twin of it.

records    topics.py            all topics: writers, readers, keys, retention; start here
           records.py           every record; its fields: record_types/, request.py
           prompt.py            a prompt as clients publish it, as a pydantic model
           codecs.py, ids.py    records to bytes and back; request ids
           asyncapi.py          the client topics as an AsyncAPI document
the log    ports.py             Log, Reader, Member: the interface that kvlane uses
           kafka/, memory/      over a real broker (aiokafka), and in this process
           errors.py, clock.py  the errors and their corrections; time, retries in an outage
writing    record_publisher.py  publish once, or until acknowledged
reading    reading/             consumer groups, dead letters, ranges of offsets
           views/               materialized views, their followers and snapshots
           responses/           replies, and the stream reconstruction rule
           client.py            publish, stream, cancel: for programs
           vectors/             test vectors of that rule, for other languages
brokers    brokers/             obtain one: given, in Docker, in a JVM, or in memory
"""
