#!/usr/bin/env bash
# A client without a line of kvlane: Kafka's console tools (Java) publish a prompt and read its answer.
#
#   kvlane up --port 9092                                  # in another shell
#   KAFKA_BIN=/opt/kafka/bin examples/console_clients.sh   # or: console_clients.sh SERVERS TOPIC_PREFIX
#
# kcat does the same; its partitioner has to be that of Java:
#   kcat -b SERVERS -P -t kvlane.prompts -K '|' -X partitioner=murmur2_random
#   kcat -b SERVERS -C -t kvlane.responses -K '|' -o beginning -e
set -euo pipefail
servers=${1:-127.0.0.1:9092}
prefix=${2:-kvlane.}
bin=${KAFKA_BIN:+$KAFKA_BIN/}
id="console-$RANDOM-$$"

echo "$id|{\"id\":\"$id\",\"body\":{\"max_tokens\":3,\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]}}" |
  "${bin}kafka-console-producer.sh" --bootstrap-server "$servers" --topic "${prefix}prompts" \
    --reader-property parse.key=true --reader-property 'key.separator=|'

# All partitions, until nothing comes for five seconds; the key tells which records are ours. Without
# failures the text is the field "text" in order; the full rule is in streams/vectors/README.md.
"${bin}kafka-console-consumer.sh" --bootstrap-server "$servers" --topic "${prefix}responses" \
  --from-beginning --timeout-ms 5000 \
  --formatter-property print.key=true --formatter-property 'key.separator=|' 2> /dev/null |
  grep "^$id|"
