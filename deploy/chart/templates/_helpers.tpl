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

{{- define "kvlane.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (.image | default dict) -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}

{{- define "kvlane.kafkaUser" -}}
{{- .root.Values.kafka.userPrefix | default (printf "%s-" (include "kvlane.name" .root)) }}{{ .role }}
{{- end -}}

{{/* Settings that follow from values, below those of the user. In: root, role. Out: JSON. */}}
{{- define "kvlane.derivedSettings" -}}
{{- $kafka := .root.Values.kafka -}}
{{- $tls := ne $kafka.tlsSecret "" -}}
{{- $set := dict "bootstrap_servers" $kafka.bootstrapServers "http_host" "0.0.0.0" "metrics_allow_anonymous" true -}}
{{- if $tls -}}
{{- $_ := set $set "ssl_cafile" "/etc/kvlane/kafka-ca/ca.crt" -}}
{{- $_ := set $set "security_protocol" "SSL" -}}
{{- end -}}
{{- if eq $kafka.authentication "scram-sha-512" -}}
{{- $_ := set $set "security_protocol" (ternary "SASL_SSL" "SASL_PLAINTEXT" $tls) -}}
{{- $_ := set $set "sasl_mechanism" "SCRAM-SHA-512" -}}
{{- $_ := set $set "sasl_username" (include "kvlane.kafkaUser" .) -}}
{{- $_ := set $set "sasl_password_file" "/etc/kvlane/kafka-user/password" -}}
{{- else if eq $kafka.authentication "tls" -}}
{{- if not $tls -}}{{- fail "kafka.authentication: tls needs kafka.tlsSecret" -}}{{- end -}}
{{- $_ := set $set "ssl_certfile" "/etc/kvlane/kafka-user/user.crt" -}}
{{- $_ := set $set "ssl_keyfile" "/etc/kvlane/kafka-user/user.key" -}}
{{- end -}}
{{- range .secrets -}}
{{- $_ := set $set (printf "%s_file" (replace "-" "_" .)) (printf "/etc/kvlane/secrets/%s" .) -}}
{{- end -}}
{{- if and .public (not .root.Values.http.allowAnonymous) -}}
{{- $_ := set $set "api_keys_file" "/etc/kvlane/secrets/keys.json" -}}
{{- else -}}
{{- $_ := set $set "http_allow_anonymous" true -}}
{{- end -}}
{{- if and .public .root.Values.http.tlsSecret -}}
{{- $_ := set $set "http_tls_cert" "/etc/kvlane/http-tls/tls.crt" -}}
{{- $_ := set $set "http_tls_key" "/etc/kvlane/http-tls/tls.key" -}}
{{- end -}}
{{- toJson (mergeOverwrite $set (.ports | default dict) (deepCopy .root.Values.settings) (.settings | default dict)) -}}
{{- end -}}

{{/* The environment of a process. In: as derivedSettings. */}}
{{- define "kvlane.env" -}}
{{- range $name, $value := include "kvlane.derivedSettings" . | fromJson }}
{{- if not (kindIs "invalid" $value) }}
- name: KVLANE_{{ upper $name }}
  value: {{ ternary $value (toJson $value) (kindIs "string" $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "kvlane.secretKeys" -}}
{{- $keys := .secrets -}}
{{- if and .public (not .root.Values.http.allowAnonymous) -}}{{- $keys = append $keys "keys.json" -}}{{- end -}}
{{- toJson (dict "keys" $keys) -}}
{{- end -}}

{{/* Mounts and volumes of a process. In: as derivedSettings. */}}
{{- define "kvlane.volumeMounts" -}}
- {name: tmp, mountPath: /tmp}
{{- if (include "kvlane.secretKeys" . | fromJson).keys }}
- {name: secrets, mountPath: /etc/kvlane/secrets, readOnly: true}
{{- end }}
{{- if .root.Values.kafka.tlsSecret }}
- {name: kafka-ca, mountPath: /etc/kvlane/kafka-ca, readOnly: true}
{{- end }}
{{- if .root.Values.kafka.authentication }}
- {name: kafka-user, mountPath: /etc/kvlane/kafka-user, readOnly: true}
{{- end }}
{{- if and .public .root.Values.http.tlsSecret }}
- {name: http-tls, mountPath: /etc/kvlane/http-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "kvlane.volumes" -}}
- name: tmp
  emptyDir: {}
{{- with (include "kvlane.secretKeys" . | fromJson).keys }}
- name: secrets
  secret:
    secretName: {{ $.root.Values.secretName }}
    defaultMode: 0440
    items:
      {{- range . }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
{{- end }}
{{- with .root.Values.kafka.tlsSecret }}
- name: kafka-ca
  secret:
    secretName: {{ . }}
    items:
      - {key: ca.crt, path: ca.crt}
{{- end }}
{{- if .root.Values.kafka.authentication }}
- name: kafka-user
  secret:
    secretName: {{ include "kvlane.kafkaUser" . }}
    defaultMode: 0440
{{- end }}
{{- if and .public .root.Values.http.tlsSecret }}
- name: http-tls
  secret:
    secretName: {{ .root.Values.http.tlsSecret }}
    defaultMode: 0440
{{- end }}
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

{{/* In: root, component. */}}
{{- define "kvlane.spread" -}}
{{- $here := . -}}
{{- range .root.Values.topologySpread }}
- maxSkew: 1
  topologyKey: {{ . }}
  whenUnsatisfiable: ScheduleAnyway
  labelSelector:
    matchLabels:
      {{- include "kvlane.labels" $here | nindent 6 }}
{{- end }}
{{- end -}}

{{/* In: port, scheme, startupSeconds. */}}
{{- define "kvlane.probes" -}}
startupProbe:
  httpGet: {path: /livez, port: http, scheme: {{ .scheme }}}
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
