#!/usr/bin/env bash
# Starts one node. The part of the official image's contract that kvlane and its examples use:
#   KAFKA_SOME_NAME=value          some.name=value in server.properties (___ is "-", __ is "_")
#   no such variable               one node, broker and controller, that advertises localhost:9092
#   CLUSTER_ID                     identity for the first start of an empty data directory
#   KAFKA_HEAP_OPTS, KAFKA_OPTS, KAFKA_JVM_PERFORMANCE_OPTS      options of the JVM
# Not here: TLS and SASL helpers, mounted configuration, log levels, the shell tools.
set -euo pipefail

HOME_DIR=/opt/kafka
CONFIG=$HOME_DIR/config/server.properties
ARCHIVE=$HOME_DIR/classes.jsa

write_config() {
  local name value property
  : > "$CONFIG"
  while IFS='=' read -r -d '' name value; do
    case $name in
      KAFKA_VERSION | KAFKA_HEAP_OPTS | KAFKA_OPTS | KAFKA_JVM_PERFORMANCE_OPTS) continue ;;
      KAFKA_LOG4J_* | KAFKA_TOOLS_* | KAFKA_JMX_* | KAFKA_GC_LOG_OPTS) continue ;;
      KAFKA_*) ;;
      *) continue ;;
    esac
    property=${name#KAFKA_}
    property=${property,,}
    property=${property//___/-}
    property=${property//__/@}
    property=${property//_/.}
    property=${property//@/_}
    printf '%s=%s\n' "$property" "$value" >> "$CONFIG"
  done < <(env -0)
  [ -s "$CONFIG" ] || cp "$HOME_DIR/config/single-node.properties" "$CONFIG"
  grep -q '^log\.dirs\?=' "$CONFIG" || echo 'log.dirs=/var/lib/kafka/data' >> "$CONFIG"
}

data_directory() {
  sed -n 's/^log\.dirs\?=\([^,]*\).*/\1/p' "$CONFIG" | tail -n 1
}

write_config

class_path=$(printf '%s:' "$HOME_DIR"/jars/*.jar)
class_path=${class_path%:}  # an empty entry would make the archive of classes useless
# shellcheck disable=SC2206  # options are separated by blanks
jvm=(
  ${KAFKA_HEAP_OPTS:--Xms64m -Xmx256m}
  ${KAFKA_JVM_PERFORMANCE_OPTS:--XX:+UseSerialGC}
  ${KAFKA_OPTS:-}
  -Xshare:auto -Xlog:cds=off -Xlog:cds+dynamic=off
  -Djava.awt.headless=true -Djava.net.preferIPv4Stack=true
  "-Dlog4j2.configurationFile=$HOME_DIR/config/log4j2.properties"
)
if [ -f "$ARCHIVE" ]; then
  jvm+=("-XX:SharedArchiveFile=$ARCHIVE")
fi

if [ ! -f "$(data_directory)/meta.properties" ]; then
  java "${jvm[@]}" -cp "$class_path" kafka.tools.StorageTool \
    format --cluster-id="${CLUSTER_ID:-5L6g3nShT-eMCtK--X86sw}" --config "$CONFIG"
fi

if [ -n "${ARCHIVE_CLASSES-}" ]; then
  jvm+=("-XX:ArchiveClassesAtExit=$ARCHIVE")
fi
exec java "${jvm[@]}" -cp "$class_path" kafka.Kafka "$CONFIG"
