{{- define "ebbtide.fullname" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "ebbtide" $name) }}{{ $name = printf "%s-ebbtide" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "ebbtide.selector" -}}
app.kubernetes.io/name: ebbtide
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- /* Not managed-by ebbtide: that label marks objects that the operator creates. */}}
{{- define "ebbtide.labels" -}}
{{ include "ebbtide.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "ebbtide.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "ebbtide.workerImage" -}}
{{ .Values.workerImage.repository }}:{{ .Values.workerImage.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "ebbtide.agentImage" -}}
{{ .Values.agentImage.repository }}:{{ .Values.agentImage.tag | default .Chart.AppVersion }}
{{- end }}

{{- define "ebbtide.apiHost" -}}
{{ include "ebbtide.fullname" . }}-api.{{ .Release.Namespace }}.svc
{{- end }}

{{- define "ebbtide.tokenSecret" -}}
{{ .Values.tokenSecret.existingSecret | default (printf "%s-token" (include "ebbtide.fullname" .)) }}
{{- end }}

{{- define "ebbtide.claim" -}}
{{ .Values.database.sqlite.existingClaim | default (printf "%s-database" (include "ebbtide.fullname" .)) }}
{{- end }}

{{- /* The schema checks these too. Repeated here for installs with --skip-schema-validation. */}}
{{- define "ebbtide.check" -}}
{{- $replicas := max (int .Values.api.replicas) (int .Values.operator.replicas) -}}
{{- if and (eq .Values.database.kind "sqlite") (gt $replicas 1) -}}
{{- fail "database.kind is sqlite, which supports one replica. Set api.replicas and operator.replicas to 1, or set database.kind to postgresql." -}}
{{- end -}}
{{- if and (eq .Values.database.kind "postgresql") (not .Values.database.postgresql.existingSecret) -}}
{{- fail "database.postgresql.existingSecret is empty. Set it to the Secret with the database URL, or set database.kind to sqlite." -}}
{{- end -}}
{{- end }}
