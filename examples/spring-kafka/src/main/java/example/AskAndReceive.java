package example;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import java.time.Duration;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.TimeUnit;
import org.apache.kafka.clients.consumer.ConsumerConfig;
import org.apache.kafka.clients.producer.ProducerConfig;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.StringDeserializer;
import org.apache.kafka.common.serialization.StringSerializer;
import org.springframework.kafka.core.DefaultKafkaConsumerFactory;
import org.springframework.kafka.core.DefaultKafkaProducerFactory;
import org.springframework.kafka.listener.ContainerProperties;
import org.springframework.kafka.listener.KafkaMessageListenerContainer;
import org.springframework.kafka.requestreply.ReplyingKafkaTemplate;
import org.springframework.kafka.requestreply.RequestReplyFuture;

/**
 * Publishes prompts, and receives each whole answer as a reply.
 *
 * <pre>
 * mvn -q -f examples/spring-kafka compile exec:java \
 *     -Dexec.args="127.0.0.1:9092 kvlane. replies.spring 3"   # servers, prefix, topic, prompts
 * </pre>
 *
 * The topic for replies exists (kafka-topics.sh --create --topic replies.spring --bootstrap-server
 * 127.0.0.1:9092), and the operator allows its prefix: KVLANE_REPLY_TOPIC_PREFIXES=replies
 */
public final class AskAndReceive {
  private static final Duration TIMEOUT = Duration.ofSeconds(30);

  private AskAndReceive() {}

  public static void main(String[] args) throws Exception {
    String servers = args[0];
    String prompts = args[1] + "prompts";
    String replies = args[2];
    int count = Integer.parseInt(args[3]);

    // Replies are written in transactions; a shared topic has replies to other programs, too.
    var consumers = new DefaultKafkaConsumerFactory<>(
        Map.<String, Object>of(
            ConsumerConfig.BOOTSTRAP_SERVERS_CONFIG, servers,
            ConsumerConfig.GROUP_ID_CONFIG, "ask-and-receive-" + UUID.randomUUID(),
            ConsumerConfig.ISOLATION_LEVEL_CONFIG, "read_committed"),
        new StringDeserializer(), new StringDeserializer());
    var producers = new DefaultKafkaProducerFactory<>(
        Map.<String, Object>of(ProducerConfig.BOOTSTRAP_SERVERS_CONFIG, servers),
        new StringSerializer(), new StringSerializer());
    var container =
        new KafkaMessageListenerContainer<>(consumers, new ContainerProperties(replies));
    var template = new ReplyingKafkaTemplate<String, String, String>(producers, container);
    template.setSharedReplyTopic(true);
    template.setDefaultReplyTimeout(TIMEOUT);
    template.start();
    try {
      if (!template.waitForAssignment(TIMEOUT)) {
        throw new IllegalStateException("no partition of " + replies + " was assigned");
      }
      var json = new ObjectMapper();
      var answers = new LinkedHashMap<String, RequestReplyFuture<String, String, String>>();
      for (int number = 1; number <= count; number++) {
        String id = UUID.randomUUID().toString(); // the idempotency key of the prompt
        String question = "What is a log, for the " + number + "th time?";
        String prompt = json.writeValueAsString(Map.of(
            "id", id,
            "custom_id", "question-" + number,
            "body", Map.of(
                "max_tokens", 20,
                "messages", List.of(Map.of("role", "user", "content", question)))));
        answers.put(id, template.sendAndReceive(new ProducerRecord<>(prompts, id, prompt)));
      }
      for (var answer : answers.values()) {
        String reply = answer.get(TIMEOUT.toSeconds(), TimeUnit.SECONDS).value();
        JsonNode result = json.readTree(reply);
        System.out.println(result.get("custom_id").asText() + " " + result.get("status").asText()
            + ": " + result.at("/body/choices/0/message/content").asText().strip());
      }
    } finally {
      template.stop();
      template.destroy(); // its scheduler would keep the program running
      producers.destroy();
    }
  }
}
