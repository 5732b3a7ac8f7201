{{- define "kvlane.name" -}}
{{- if contains .Chart.Name .Release.Name -}}{{ .Release.Name }}{{- else -}}{{ .Release.Name }}-{{ .Chart.Name }}{{- end -}}
{{- end -}}

{{- define "kvlane.labels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{- define "kvlane.commonLabels" -}}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{/* In: root, image. */}}
{{- define "kvlane.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.image | default dict) -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "kvlane.kafkaUser" -}}
{{- .root.Values.kafka.userPrefix | default (printf "%s-" (include "kvlane.name" .root)) }}{{ .role }}
{{- end -}}

{{/* The kinds of processes. `public`: has a Service, reads the API keys. `drains`: ends open streams first. */}}
{{- define "kvlane.roles" -}}
gateway: {port: 8000, portSetting: http_port, public: true, drains: true, secrets: [stream-secret]}
preprocessor: {port: 8080, portSetting: status_port, secrets: []}
router: {port: 8080, portSetting: status_port, secrets: [hash-secret]}
collector: {port: 8080, portSetting: status_port, secrets: []}
indexer: {port: 8090, portSetting: indexer_port, public: true, secrets: [hash-secret, stream-secret]}
worker: {port: 8080, portSetting: status_port, secrets: [hash-secret]}
operator: {secrets: []}
{{- end -}}

{{/* What the chart runs, by component, as JSON: the values of a process, a worker group or the topics Job, those of its
role, and role, component, name, all settings (`derived`), kind, scheme, hasPeers. */}}
{{- define "kvlane.parts" -}}
{{- $roles := include "kvlane.roles" . | fromYaml -}}
{{- $found := dict -}}
{{- range $role, $process := .Values.processes -}}
{{- if $process -}}{{- $_ := set $found $role (merge (dict "role" $role) (deepCopy $process)) -}}{{- end -}}
{{- end -}}
{{- range $group, $worker := .Values.workers -}}
{{- if $worker -}}{{- $_ := set $found (printf "worker-%s" $group) (merge (dict "role" "worker") (deepCopy $worker)) -}}{{- end -}}
{{- end -}}
{{- if and .Values.topicsJob.enabled (not .Values.strimzi.enabled) -}}
{{- $_ := set $found "topics" (merge (dict "role" "operator") (deepCopy .Values.topicsJob)) -}}
{{- end -}}
{{- $parts := dict -}}
{{- range $component, $part := $found -}}
{{- $part = merge $part (index $roles $part.role) (dict "component" $component "name" (printf "%s-%s" (include "kvlane.name" $) $component)) -}}
{{- $settings := include "kvlane.derivedSettings" (dict "root" $ "part" $part) | fromJson -}}
{{- $_ := set $part "derived" $settings -}}
{{- $_ := set $part "scheme" (ternary "HTTPS" "HTTP" (hasKey $settings "http_tls_cert")) -}}
{{- $isWorker := eq $part.role "worker" -}}
{{- $_ := set $part "kind" (ternary (ternary "LeaderWorkerSet" "StatefulSet" (hasKey $part "nodes")) (ternary "StatefulSet" "Deployment" ($part.indexed | default false)) $isWorker) -}}
{{- $transfers := or (has $settings.worker_role (list "prefill" "decode")) (contains "kv_transfer_config" (toJson $settings.engine_args)) -}}
{{- $_ := set $part "hasPeers" (and $isWorker (or $transfers (hasKey $part "nodes"))) -}}
{{- $_ := set $parts $component $part -}}
{{- end -}}
{{- toJson $parts -}}
{{- end -}}

{{/* Settings that follow from values, below those of the user. In: root, part. Out: JSON. */}}
{{- define "kvlane.derivedSettings" -}}
{{- $values := .root.Values -}}
{{- $kafka := $values.kafka -}}
{{- $tls := ne $kafka.tlsSecret "" -}}
{{- $set := dict "bootstrap_servers" $kafka.bootstrapServers "http_host" "0.0.0.0" "metrics_allow_anonymous" true -}}
{{- if $tls -}}
{{- $_ := set $set "ssl_cafile" "/etc/kvlane/kafka-ca/ca.crt" -}}
{{- $_ := set $set "security_protocol" "SSL" -}}
{{- end -}}
{{- if eq $kafka.authentication "scram-sha-512" -}}
{{- $_ := set $set "security_protocol" (ternary "SASL_SSL" "SASL_PLAINTEXT" $tls) -}}
{{- $_ := set $set "sasl_mechanism" "SCRAM-SHA-512" -}}
{{- $_ := set $set "sasl_username" (include "kvlane.kafkaUser" (dict "root" .root "role" .part.role)) -}}
{{- $_ := set $set "sasl_password_file" "/etc/kvlane/kafka-user/password" -}}
{{- else if eq $kafka.authentication "tls" -}}
{{- if not $tls -}}{{- fail "kafka.authentication: tls needs kafka.tlsSecret" -}}{{- end -}}
{{- $_ := set $set "ssl_certfile" "/etc/kvlane/kafka-user/user.crt" -}}
{{- $_ := set $set "ssl_keyfile" "/etc/kvlane/kafka-user/user.key" -}}
{{- end -}}
{{- range .part.secrets -}}
{{- $_ := set $set (printf "%s_file" (replace "-" "_" .)) (printf "/etc/kvlane/secrets/%s" .) -}}
{{- end -}}
{{- if and .part.public (not $values.http.allowAnonymous) -}}
{{- $_ := set $set "api_keys_file" "/etc/kvlane/secrets/keys.json" -}}
{{- else -}}
{{- $_ := set $set "http_allow_anonymous" true -}}
{{- end -}}
{{- if and .part.public $values.http.tlsSecret -}}
{{- $_ := set $set "http_tls_cert" "/etc/kvlane/http-tls/tls.crt" -}}
{{- $_ := set $set "http_tls_key" "/etc/kvlane/http-tls/tls.key" -}}
{{- end -}}
{{- with .part.portSetting -}}{{- $_ := set $set . $.part.port -}}{{- end -}}
{{- if .part.indexed -}}
{{- if .part.autoscaling -}}{{- fail "processes.gateway: indexed gateways have a fixed number, so leave out autoscaling" -}}{{- end -}}
{{- $_ := set $set "gateway_count" .part.replicas -}}
{{- end -}}
{{- range $name, $value := $values.settings -}}{{- $_ := set $set $name $value -}}{{- end -}}
{{- range $name, $value := .part.settings -}}{{- $_ := set $set $name $value -}}{{- end -}}
{{- if eq (toString $set.engine) "attached" -}}
{{- /* The worker ends with its own message before its probe ends it. */ -}}
{{- $longest := sub (.part.startupSeconds | default 120) 20 -}}
{{- $_ := set $set "attach_start_timeout_s" ($set.attach_start_timeout_s | default $longest) -}}
{{- if gt (int $set.attach_start_timeout_s) (int $longest) -}}
{{- fail (printf "%s: startupSeconds must exceed attach_start_timeout_s by 20" .part.name) -}}
{{- end -}}
{{- end -}}
{{- toJson $set -}}
{{- end -}}

{{/* The environment of a process. In: root, part. */}}
{{- define "kvlane.env" -}}
{{- if eq .part.role "worker" }}
# Stable: a worker that returns under its id takes its place in the fleet again.
- name: KVLANE_WORKER_ID
  valueFrom: {fieldRef: {fieldPath: metadata.name}}
{{- if .part.hasPeers }}
# The address at which other workers fetch KV caches.
- name: VLLM_NIXL_SIDE_CHANNEL_HOST
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
{{- end }}
{{- end }}
{{- if .part.indexed }}
- name: KVLANE_GATEWAY_INDEX
  valueFrom: {fieldRef: {fieldPath: "metadata.labels['apps.kubernetes.io/pod-index']"}}
{{- end }}
{{- range $name, $value := .part.derived }}
{{- if not (kindIs "invalid" $value) }}
- name: KVLANE_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}
{{- with .part.env }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Mounts and volumes of a process. In: root, part. */}}
{{- define "kvlane.mounts" -}}
{{- $values := .root.Values -}}
{{- $keys := .part.secrets -}}
{{- if and .part.public (not $values.http.allowAnonymous) -}}{{- $keys = append $keys "keys.json" -}}{{- end -}}
{{- $mounts := list (dict "name" "tmp" "mountPath" "/tmp") -}}
{{- $volumes := list (dict "name" "tmp" "emptyDir" dict) -}}
{{- if $keys -}}
{{- $items := list -}}
{{- range $keys -}}{{- $items = append $items (dict "key" . "path" .) -}}{{- end -}}
{{- $mounts = append $mounts (dict "name" "secrets" "mountPath" "/etc/kvlane/secrets" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "secrets" "secret" (dict "secretName" $values.secretName "defaultMode" 0440 "items" $items)) -}}
{{- end -}}
{{- if $values.kafka.tlsSecret -}}
{{- $mounts = append $mounts (dict "name" "kafka-ca" "mountPath" "/etc/kvlane/kafka-ca" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "kafka-ca" "secret" (dict "secretName" $values.kafka.tlsSecret "items" (list (dict "key" "ca.crt" "path" "ca.crt")))) -}}
{{- end -}}
{{- if $values.kafka.authentication -}}
{{- $mounts = append $mounts (dict "name" "kafka-user" "mountPath" "/etc/kvlane/kafka-user" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "kafka-user" "secret" (dict "secretName" (include "kvlane.kafkaUser" (dict "root" .root "role" .part.role)) "defaultMode" 0440)) -}}
{{- end -}}
{{- if and .part.public $values.http.tlsSecret -}}
{{- $mounts = append $mounts (dict "name" "http-tls" "mountPath" "/etc/kvlane/http-tls" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "http-tls" "secret" (dict "secretName" $values.http.tlsSecret "defaultMode" 0440)) -}}
{{- end -}}
{{- with .part.modelClaim -}}
{{- $mounts = append $mounts (dict "name" "models" "mountPath" "/models" "readOnly" true) -}}
{{- $volumes = append $volumes (dict "name" "models" "persistentVolumeClaim" (dict "claimName" . "readOnly" true)) -}}
{{- end -}}
{{- with .part.sharedMemory -}}
{{- $mounts = append $mounts (dict "name" "shared-memory" "mountPath" "/dev/shm") -}}
{{- $volumes = append $volumes (dict "name" "shared-memory" "emptyDir" (dict "medium" "Memory" "sizeLimit" .)) -}}
{{- end -}}
{{- toJson (dict "mounts" (concat $mounts (.part.volumeMounts | default list)) "volumes" (concat $volumes (.part.volumes | default list))) -}}
{{- end -}}

{{- define "kvlane.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "kvlane.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{/* The seconds that a pod has to stop. In: part. */}}
{{- define "kvlane.graceSeconds" -}}
{{- $drain := ceil .part.derived.drain_grace_s -}}
{{- if .part.drains -}}
{{ add $drain 15 }}
{{- else if eq .part.role "worker" -}}
{{- /* Notice to routers, running requests, the engine's own drain, and 5 s for each further step. */ -}}
{{ add (ceil (mulf 2 (.part.derived.heartbeat_interval_s | default 1))) (mul 2 $drain) 20 }}
{{- else -}}
30
{{- end -}}
{{- end -}}

{{/* The fields of a pod that a part has of its own, else those of all. In: root, part. */}}
{{- define "kvlane.podOptions" -}}
{{- range $field := list "imagePullSecrets" "serviceAccountName" "priorityClassName" "runtimeClassName" "nodeSelector" "tolerations" "affinity" }}
{{- with index $.part $field | default (index $.root.Values $field) }}
{{ toYaml (dict $field .) }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Metadata and spec of the pods of a part. In: root, part. */}}
{{- define "kvlane.pod" -}}
{{- $here := . -}}
{{- $values := .root.Values -}}
{{- $mounts := include "kvlane.mounts" . | fromJson -}}
{{- with .part -}}
{{- $isJob := eq .role "operator" -}}
{{- $labels := include "kvlane.labels" (dict "root" $here.root "component" .component) -}}
metadata:
  labels:
    {{- $labels | nindent 4 }}
    {{- if eq .role "worker" }}
    kvlane/role: worker
    {{- end }}
  {{- if not $isJob }}
  annotations:
    {{- $scraped := dict "prometheus.io/port" (toString .port) "prometheus.io/scheme" (lower .scheme) }}
    {{- toYaml (merge dict (.podAnnotations | default dict) $values.podAnnotations $scraped) | nindent 4 }}
  {{- end }}
spec:
  automountServiceAccountToken: false
  {{- if $isJob }}
  restartPolicy: Never
  {{- else }}
  terminationGracePeriodSeconds: {{ include "kvlane.graceSeconds" $here }}
  {{- end }}
  securityContext:
    {{- include "kvlane.podSecurity" $ | nindent 4 }}
  {{- include "kvlane.podOptions" $here | nindent 2 }}
  {{- if and $values.topologySpread (not $isJob) }}
  topologySpreadConstraints:
    {{- range $values.topologySpread }}
    - maxSkew: 1
      topologyKey: {{ . }}
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- $labels | nindent 10 }}
    {{- end }}
  {{- end }}
  {{- $init := .initContainers | default list }}
  {{- range .sidecars }}{{- $init = append $init (merge (dict "restartPolicy" "Always") .) }}{{- end }}
  {{- with $init }}
  # Those with restartPolicy Always start before the worker and stop after it.
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ ternary "topics" .role $isJob }}
      image: {{ include "kvlane.image" (dict "root" $here.root "image" .image) }}
      imagePullPolicy: {{ $values.image.pullPolicy }}
      args: {{ ternary (list "kvlane" "topics" "create") (list "kvlane" "run" .role) $isJob | toJson }}
      env:
        {{- include "kvlane.env" $here | trim | nindent 8 }}
      {{- if not $isJob }}
      ports:
        - {name: http, containerPort: {{ .port }}}
      {{- include "kvlane.probes" . | nindent 6 }}
      {{- end }}
      {{- if .drains }}
      # New connections go elsewhere before the process refuses them.
      lifecycle:
        preStop: {exec: {command: [sleep, "5"]}}
      {{- end }}
      resources:
        {{- toYaml .resources | nindent 8 }}
      securityContext:
        {{- include "kvlane.containerSecurity" $ | nindent 8 }}
      volumeMounts:
        {{- toYaml $mounts.mounts | nindent 8 }}
  volumes:
    {{- toYaml $mounts.volumes | nindent 4 }}
{{- end }}
{{- end -}}

{{/* A worker is started when it serves; the others may have to wait for it. In: a part. */}}
{{- define "kvlane.probes" -}}
startupProbe:
  httpGet: {path: {{ ternary "/readyz" "/livez" (eq .role "worker") }}, port: http, scheme: {{ .scheme }}}
  periodSeconds: 2
  failureThreshold: {{ div (.startupSeconds | default 120) 2 }}
livenessProbe:
  httpGet: {path: /livez, port: http, scheme: {{ .scheme }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 6
readinessProbe:
  httpGet: {path: /readyz, port: http, scheme: {{ .scheme }}}
  periodSeconds: 2
  timeoutSeconds: 3
{{- end -}}
