"""All code that uses Kafka, and an in-memory twin of it.

Start with topics.py, the topic table. The modules, from the records to their readers:

    records    topics.py            all topics: writers, readers, keys, retention
               records.py           every record; field by field: record_types/, request.py
               prompt.py            a prompt as clients publish it, as a pydantic model
               codecs.py            records to bytes and back
               ids.py               request ids
               asyncapi.py          the client topics as an AsyncAPI document
    the log    ports.py             Log, Reader, Member: the interface that kvlane uses
               kafka/               over a real broker (aiokafka); topics and their settings
               memory/              in this process, with groups, retention and broker time
               errors.py            the errors, and their corrections
               clock.py             local time, and broker time
    writing    record_publisher.py  publish once, or until acknowledged
               retry.py             retries during an outage
    reading    reading/             consumer group with commits of completed records, dead letters,
                                    ranges of offsets, a FastStream broker over the log
               views/               materialized views, the follower that keeps them current, and
                                    their snapshots
               responses/           replies of many requests, and the stream reconstruction rule
               client.py            publish, stream, cancel: for programs
               vectors/             test vectors of that rule, for other languages
    brokers    brokers/             obtain one: given, in Docker, in a JVM, or in memory
"""
