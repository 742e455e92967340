{{- /* The value at a dotted path, as JSON; empty where it is left out, null or an empty text. */ -}}
{{- define "gateway.at" -}}
{{- $found := .values -}}
{{- range splitList "." .key -}}
{{- if kindIs "map" $found -}}{{- $found = get $found . -}}{{- else -}}{{- $found = "" -}}{{- end -}}
{{- end -}}
{{- if not (or (kindIs "invalid" $found) (eq (toString $found) "") (eq (toString $found) "map[]") (eq (toString $found) "[]")) -}}{{- toJson $found -}}{{- end -}}
{{- end -}}

{{- /* A line for each value that keys.yaml says is ignored, or refused, and that somebody gave. */ -}}
{{- define "gateway.told" -}}
{{- $root := .root -}}
{{- $what := .what -}}
{{- range (.root.Files.Get "keys.yaml" | fromYaml).nvidia -}}
{{- $given := include "gateway.at" (dict "values" $root.Values "key" (trimSuffix ".*" .key)) -}}
{{- if $given -}}
{{- if eq .does $what }}
{{ .key }}: {{ .text }}
{{- else if and (eq $what "refused") (eq .does "partly") (has ($given | trimAll "\"") .not) }}
{{ .key }}: {{ .text }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if eq $what "refused" -}}
{{- range (.root.Files.Get "keys.yaml" | fromYaml).rocm -}}
{{- if and (has (first (splitList "." .key)) (list "dp" "lbl" "labeller" "node_selector" "node_selector_enabled")) (include "gateway.at" (dict "values" $root.Values "key" .key)) }}
{{ .key }}: a value of ROCm's chart. Say here: {{ .here }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* A line for each value that keys.yaml doesn't have: a wrong word, or that of another chart. */ -}}
{{- define "gateway.unknown" -}}
{{- $table := .Files.Get "keys.yaml" | fromYaml -}}
{{- $known := list -}}
{{- range concat $table.nvidia $table.ours -}}{{- $known = append $known .key -}}{{- end -}}
{{- range $first, $value := .Values -}}
{{- $below := list -}}
{{- $whole := or (eq $first "global") (has $first $known) (has (printf "%s.*" $first) $known) -}}
{{- range $known -}}
{{- if hasPrefix (printf "%s." $first) . -}}{{- $below = append $below (index (splitList "." .) 1) -}}{{- end -}}
{{- end -}}
{{- if not (or $whole $below) }}
{{ $first }}: no value of this chart or of NVIDIA's
{{- else if and (not $whole) (kindIs "map" $value) -}}
{{- range $second, $_ := $value -}}
{{- if not (has $second $below) }}
{{ $first }}.{{ $second }}: no value of this chart or of NVIDIA's
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
