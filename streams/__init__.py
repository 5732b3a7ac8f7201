"""Everything that knows Kafka exists, and its twin in memory.

Start with topics.py: what goes where, and who may write it. Where things are, from what is written
to who reads it:

    what is on the log   topics.py    the table: who writes and reads which topic, keys, retention
                         records.py   every record, field by field
                         prompt.py    what a client publishes, as a pydantic model
                         codecs.py    records to bytes and back
                         ids.py       request ids
                         asyncapi.py  what clients are told of all this
    the log itself       ports.py     Log, Reader, Member: all that the rest of kvlane sees of it
                         kafka/       over a real broker (aiokafka)
                         memory/      in this process, with groups, retention and broker time
                         errors.py    what goes wrong, and what to do then
                         clock.py     our clock, and the broker's
                         connection.py  addresses, TLS, SASL
                         provision.py   make the topics of a deployment, tell what differs
    writing              outbox.py    send once, or until it is acknowledged
                         patience.py  wait out an outage
                         deadletters.py  put aside what nobody can read
    reading              intake.py    a group shares `requests`; committed is what is done
                         follow.py    keep a fold up to date, with barriers.py
                         snapshots.py  begin without the whole log; parts.py, of what they are made
                         duty.py      who writes the snapshots, and when
                         stretch.py   read what partitions hold now, once
                         transcript.py   the rule by which a stream is read, once and right
                         replies.py, reply.py   follow the answers of many requests at a time
                         client.py    publish, stream, cancel: what a program needs
                         vectors/     the reader's rule as test vectors for other languages
    getting a broker     brokers/     given, in Docker, in a JVM, or none
"""
