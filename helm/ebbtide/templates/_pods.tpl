{{- /* Fields shared by all pods. Arguments: root, component. Pods carry the labels of their selector and podLabels: a version
       label would restart all pods at each chart upgrade. */}}
{{- define "ebbtide.pod" -}}
{{- $values := index .root.Values .component | default dict -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
affinity:
  nodeAffinity:
    requiredDuringSchedulingIgnoredDuringExecution:
      nodeSelectorTerms:
        # A lent node can be recalled at any time.
        - matchExpressions:
            - {key: ebbtide.dev/loan, operator: DoesNotExist}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "ebbtide.selector" . | nindent 8 }}
{{- with .root.Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- /* Labels of pods. Arguments: root, component. */}}
{{- define "ebbtide.podLabels" -}}
{{ include "ebbtide.selector" . }}
{{- with .root.Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "ebbtide.extraEnv" -}}
{{- with .Values.extraEnv }}
{{- toYaml . }}
{{- end }}
{{- end }}

{{- define "ebbtide.container" -}}
image: {{ include "ebbtide.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  runAsNonRoot: true
  capabilities: {drop: [ALL]}
  seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- /* A changed annotation restarts the pods, so that they read the new configuration. */}}
{{- define "ebbtide.checksums" -}}
checksum/settings: {{ include (print .Template.BasePath "/settings.yaml") . | sha256sum }}
{{- end }}

{{- define "ebbtide.database" -}}
- name: EBBTIDE_DATABASE_URL
{{- if eq .Values.database.kind "sqlite" }}
  value: sqlite:////var/lib/ebbtide/ebbtide.sqlite
{{- else }}
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.postgresql.existingSecret }}
      key: {{ .Values.database.postgresql.key }}
{{- end }}
{{- end }}

{{- define "ebbtide.environment" -}}
envFrom:
  - configMapRef: {name: {{ include "ebbtide.fullname" . }}}
env:
  {{- include "ebbtide.database" . | nindent 2 }}
  - {name: PROMETHEUS_MULTIPROC_DIR, value: /run/metrics}
  {{- include "ebbtide.extraEnv" . | nindent 2 }}
{{- end }}

{{- define "ebbtide.mounts" -}}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: metrics, mountPath: /run/metrics}
  - {name: token, mountPath: /run/token, readOnly: true}
  {{- if eq .Values.database.kind "sqlite" }}
  - {name: database, mountPath: /var/lib/ebbtide}
  {{- end }}
{{- end }}

{{- /* Standard OpenTelemetry variables, as items of env. Arguments: root, component. */}}
{{- define "ebbtide.tracing" -}}
{{- with .root.Values.tracing }}
{{- if .endpoint }}
- {name: OTEL_EXPORTER_OTLP_ENDPOINT, value: {{ .endpoint | quote }}}
- {name: OTEL_SERVICE_NAME, value: {{ include "ebbtide.fullname" $.root }}-{{ $.component }}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
{{- $attributes := printf "k8s.namespace.name=%s,k8s.pod.name=$(POD_NAME)" $.root.Release.Namespace }}
{{- range $name, $value := .resourceAttributes }}
{{- $attributes = printf "%s,%s=%s" $attributes $name $value }}
{{- end }}
- {name: OTEL_RESOURCE_ATTRIBUTES, value: {{ $attributes | quote }}}
{{- with .sampler }}
- {name: OTEL_TRACES_SAMPLER, value: {{ . }}}
{{- end }}
{{- with .samplerArg }}
- {name: OTEL_TRACES_SAMPLER_ARG, value: {{ . | quote }}}
{{- end }}
{{- if .headers.existingSecret }}
- name: OTEL_EXPORTER_OTLP_HEADERS
  valueFrom:
    secretKeyRef: {name: {{ .headers.existingSecret }}, key: {{ .headers.key }}}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- /* The token secret must be owned by the process that reads it. Files of a mounted Secret belong to root. */}}
{{- define "ebbtide.tokenCopy" -}}
- name: token
  {{- include "ebbtide.container" . | nindent 2 }}
  command:
    - sh
    - -ec
    - |
      install -m 0600 "/run/given/$0" /run/token/token.secret
      if [ -e /run/given/secrets.key ]; then install -m 0600 /run/given/secrets.key /run/token/secrets.key; fi
    - {{ .Values.tokenSecret.key }}
  resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
  volumeMounts:
    - {name: given-token, mountPath: /run/given, readOnly: true}
    - {name: token, mountPath: /run/token}
{{- end }}

{{- define "ebbtide.volumes" -}}
- {name: tmp, emptyDir: {}}
- {name: metrics, emptyDir: {}}
- {name: token, emptyDir: {medium: Memory, sizeLimit: 1Mi}}
- name: given-token
  secret: {secretName: {{ include "ebbtide.tokenSecret" . }}, defaultMode: 288}
{{- if eq .Values.database.kind "sqlite" }}
- name: database
  persistentVolumeClaim: {claimName: {{ include "ebbtide.claim" . }}}
{{- end }}
{{- end }}

{{- define "ebbtide.authoritiesVolume" -}}
{{- with .Values.webhookAuthorities.existingConfigMap }}
- name: webhook-authorities
  configMap: {name: {{ . }}, items: [{key: {{ $.Values.webhookAuthorities.key }}, path: authorities.pem}]}
{{- end }}
{{- end }}

{{- /* The service account token, mounted into the operator's container only. Automounting would mount it into every container. */}}
{{- define "ebbtide.accountVolume" -}}
- name: account
  projected:
    defaultMode: 288
    sources:
      - serviceAccountToken: {path: token, expirationSeconds: 3607}
      - configMap: {name: kube-root-ca.crt, items: [{key: ca.crt, path: ca.crt}]}
      - downwardAPI: {items: [{path: namespace, fieldRef: {fieldPath: metadata.namespace}}]}
{{- end }}

{{- define "ebbtide.apiContainer" -}}
- name: api
  {{- include "ebbtide.container" . | nindent 2 }}
  command: [ebbtide, api]
  {{- include "ebbtide.environment" . | nindent 2 }}
    {{- include "ebbtide.tracing" (dict "root" . "component" "api") | nindent 4 }}
    {{- if .Values.webhookAuthorities.existingConfigMap }}
    - {name: EBBTIDE_WEBHOOK_CA_FILE, value: /run/webhooks/authorities.pem}
    {{- end }}
  {{- include "ebbtide.mounts" . | nindent 2 }}
    {{- if .Values.webhookAuthorities.existingConfigMap }}
    - {name: webhook-authorities, mountPath: /run/webhooks, readOnly: true}
    {{- end }}
  ports:
    - {name: http, containerPort: 8787}
  startupProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 2
    failureThreshold: 60
  # Not /readyz: without a leader the API still accepts commands and serves node agents.
  readinessProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 5
  livenessProbe:
    httpGet: {path: /healthz, port: http}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  resources:
    {{- toYaml .Values.api.resources | nindent 4 }}
{{- end }}

{{- define "ebbtide.operatorContainer" -}}
- name: operator
  {{- include "ebbtide.container" . | nindent 2 }}
  command: [ebbtide, operator]
  {{- include "ebbtide.environment" . | nindent 2 }}
    {{- with .Values.prometheus }}
    {{- if .existingSecret }}
    - name: EBBTIDE_PROMETHEUS_URL
      valueFrom:
        secretKeyRef: {name: {{ .existingSecret }}, key: {{ .key }}}
    {{- end }}
    {{- end }}
    {{- include "ebbtide.tracing" (dict "root" . "component" "operator") | nindent 4 }}
  {{- include "ebbtide.mounts" . | nindent 2 }}
    - {name: account, mountPath: /var/run/secrets/kubernetes.io/serviceaccount, readOnly: true}
  ports:
    - {name: probes, containerPort: 8788}
  startupProbe:
    httpGet: {path: /healthz, port: probes}
    periodSeconds: 2
    failureThreshold: 60
  # Fails when the reconcile loop hangs. Leadership, the API server and the database do not matter here.
  livenessProbe:
    httpGet: {path: /healthz, port: probes}
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 3
  {{- /* With SQLite the API runs in the same pod and must be reachable before the operator has synced. */}}
  {{- if eq .Values.database.kind "postgresql" }}
  readinessProbe:
    httpGet: {path: /readyz, port: probes}
    periodSeconds: 5
    timeoutSeconds: 5
  {{- end }}
  resources:
    {{- toYaml .Values.operator.resources | nindent 4 }}
{{- end }}

{{- /* Labels and annotations of the account and the roles that exist during `helm uninstall` only. */}}
{{- define "ebbtide.uninstallMetadata" -}}
labels:
  {{- include "ebbtide.labels" (dict "root" . "component" "uninstall") | nindent 2 }}
annotations:
  helm.sh/hook: pre-delete
  helm.sh/hook-weight: "-1"
  helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}
