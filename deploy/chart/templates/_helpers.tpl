{{- define "gateway.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "gateway.fullname" -}}
{{- $name := include "gateway.name" . -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains $name .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "gateway.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride -}}
{{- end -}}

{{- define "gateway.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride -}}
{{ toYaml .Values.selectorLabelsOverride }}
{{- else -}}
{{ include "gateway.ownLabels" . }}
{{- end -}}
{{- end -}}

{{- define "gateway.ownLabels" -}}
app.kubernetes.io/name: {{ include "gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: {{ .Values.gateway.backend }}
{{- end -}}

{{- /* NVIDIA's driver manager waits for pods with this label before it unloads the driver (docs/beside.md). */ -}}
{{- define "gateway.draLabels" -}}
{{- if and (include "gateway.dra" .) (ne .Values.gateway.backend "amd") -}}
app: nvidia-dra-driver-kubelet-plugin
{{- else -}}
{}
{{- end -}}
{{- end -}}

{{- define "gateway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
app.kubernetes.io/name: {{ include "gateway.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "gateway.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "gateway.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- /* Does image.* name NVIDIA's plugin? A mirror keeps the last part of its name. */ -}}
{{- define "gateway.imageIsNvidias" -}}
{{- if hasSuffix "k8s-device-plugin" (default "" .Values.image.repository) -}}true{{- end -}}
{{- end -}}

{{- define "gateway.image" -}}
{{- if .Values.gateway.image -}}
{{- .Values.gateway.image -}}
{{- else if or (not .Values.image.repository) (include "gateway.imageIsNvidias" .) -}}
{{- printf "%s:%s" .Chart.Name .Chart.AppVersion -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag | toString) -}}
{{- end -}}
{{- end -}}

{{- define "gateway.gfdImage" -}}
{{- if include "gateway.imageIsNvidias" . -}}
{{- printf "%s:%s" .Values.image.repository (default (last (splitList ":" .Values.gateway.gfdImage)) .Values.image.tag | toString) -}}
{{- else -}}
{{- .Values.gateway.gfdImage -}}
{{- end -}}
{{- end -}}

{{- define "gateway.legacy" -}}
{{- if kindIs "bool" .Values.gateway.legacy -}}
{{- if .Values.gateway.legacy -}}true{{- end -}}
{{- else if semverCompare "<1.25.0-0" .Capabilities.KubeVersion.Version -}}true
{{- end -}}
{{- end -}}

{{- /* Empty where there are no configurations. */ -}}
{{- define "gateway.configMap" -}}
{{- if .Values.config.name -}}
{{- .Values.config.name -}}
{{- else if .Values.config.map -}}
{{- include "gateway.fullname" . }}-configs
{{- end -}}
{{- end -}}

{{- /* The configurations by name, each as text: people write them as objects, too. */ -}}
{{- define "gateway.configs" -}}
{{- $texts := dict -}}
{{- range $name, $one := .Values.config.map -}}
{{- $_ := set $texts $name (kindIs "string" $one | ternary $one (toYaml $one)) -}}
{{- end -}}
{{- toYaml $texts -}}
{{- end -}}

{{- define "gateway.strategies" -}}
{{- if kindIs "slice" .Values.deviceListStrategy -}}
{{- join "," .Values.deviceListStrategy -}}
{{- else -}}
{{- default "" .Values.deviceListStrategy -}}
{{- end -}}
{{- end -}}

{{- /* Does any configuration that may count say this word? An existing ConfigMap may say anything. */ -}}
{{- define "gateway.mayHave" -}}
{{- if or .root.Values.config.name (contains .word (include "gateway.strategies" .root)) -}}true
{{- else -}}
{{- range $text := fromYaml (include "gateway.configs" .root) -}}{{- if contains $.word $text -}}true{{- end -}}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "gateway.mig" -}}
{{- if .Values.migStrategy -}}
{{- if ne .Values.migStrategy "none" -}}true{{- end -}}
{{- else if .Values.config.name -}}true
{{- else -}}
{{- range $text := fromYaml (include "gateway.configs" .) -}}
{{- $flags := default dict (get (fromYaml $text) "flags") -}}
{{- if not (has (default "none" (get $flags "migStrategy")) (list "none" "")) -}}true{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- /* Node terms that hold for any of these labels, none of which is a node of the host's own gateway. */ -}}
{{- define "gateway.defaultTerms" -}}
{{- $host := dict "key" "device-plugin-gateway.io/host-service" "operator" "NotIn" "values" (list "true") -}}
{{- $pci := "feature.node.kubernetes.io/pci" -}}
{{- $nvidia := list (printf "%s-10de.present" $pci) (printf "%s-0300_10de.present" $pci) (printf "%s-0302_10de.present" $pci) "nvidia.com/gpu.present" -}}
{{- $amd := list "feature.node.kubernetes.io/amd-gpu" (printf "%s-1002.present" $pci) (printf "%s-0300_1002.present" $pci) (printf "%s-0302_1002.present" $pci) (printf "%s-0380_1002.present" $pci) (printf "%s-1200_1002.present" $pci) -}}
{{- $keys := get (dict "nvidia" $nvidia "amd" $amd "simulated" (list "device-plugin-gateway.io/simulated") "none" list) .Values.gateway.backend -}}
{{- $not := list $host -}}
{{- if eq .Values.gateway.backend "amd" -}}
{{- range $nvidia -}}
{{- $not = append $not (dict "key" . "operator" "NotIn" "values" (list "true")) -}}
{{- end -}}
{{- end -}}
{{- $terms := list -}}
{{- if eq .Values.gateway.backend "none" -}}{{- $terms = list (dict "matchExpressions" $not) -}}{{- end -}}
{{- range $keys -}}
{{- $terms = append $terms (dict "matchExpressions" (prepend $not (dict "key" . "operator" "In" "values" (list "true")))) -}}
{{- end -}}
{{- toJson $terms -}}
{{- end -}}

{{- define "gateway.affinity" -}}
{{- $required := "requiredDuringSchedulingIgnoredDuringExecution" -}}
{{- if .Values.affinity -}}
{{- $host := dict "key" "device-plugin-gateway.io/host-service" "operator" "NotIn" "values" (list "true") -}}
{{- $affinity := deepCopy .Values.affinity -}}
{{- $node := default dict $affinity.nodeAffinity -}}
{{- $terms := list -}}
{{- range (default (list dict) (get (default dict (get $node $required)) "nodeSelectorTerms")) -}}
{{- $terms = append $terms (set . "matchExpressions" (append (default list .matchExpressions) $host)) -}}
{{- end -}}
{{- $_ := set $affinity "nodeAffinity" (set $node $required (dict "nodeSelectorTerms" $terms)) -}}
{{- toYaml $affinity -}}
{{- else -}}
nodeAffinity:
  {{ $required }}:
    nodeSelectorTerms:
    {{- include "gateway.defaultTerms" . | fromJsonArray | toYaml | nindent 4 }}
{{- end -}}
{{- end -}}

{{- define "gateway.tolerations" -}}
{{- $rows := .Values.tolerations -}}
{{- if not (kindIs "slice" $rows) -}}
{{- $rows = list (dict "key" "CriticalAddonsOnly" "operator" "Exists") -}}
{{- if has .Values.gateway.backend (list "nvidia" "amd") -}}
{{- $rows = append $rows (dict "key" (printf "%s.com/gpu" .Values.gateway.backend) "operator" "Exists" "effect" "NoSchedule") -}}
{{- end -}}
{{- end -}}
{{- /* Who is to take the taint away must not be kept off by it. */ -}}
{{- with .Values.nodeReadiness.startupTaint -}}
{{- $rows = append $rows (dict "key" . "operator" "Exists") -}}
{{- end -}}
{{- toYaml $rows -}}
{{- end -}}

{{- define "gateway.updateStrategy" -}}
{{- $given := default dict .Values.updateStrategy -}}
{{- if and (eq (default "RollingUpdate" $given.type) "RollingUpdate") (not $given.rollingUpdate) -}}
type: RollingUpdate
rollingUpdate:
{{- if or .Values.devicePlugin.enableHostNetwork (include "gateway.legacy" .) }}
  maxUnavailable: 1
{{- else }}
  maxSurge: 10%
  maxUnavailable: 0
{{- end -}}
{{- else -}}
{{- toYaml $given -}}
{{- end -}}
{{- end -}}

{{- define "gateway.podSecurityContext" -}}
{{- $own := dict "runAsUser" 0 "seLinuxOptions" (dict "type" "spc_t" "level" "s0") -}}
{{- if not (include "gateway.legacy" .) -}}
{{- $_ := set $own "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- end -}}
{{- toYaml (mergeOverwrite $own (deepCopy (default dict .Values.podSecurityContext))) -}}
{{- end -}}

{{- define "gateway.securityContext" -}}
{{- if .Values.securityContext -}}
{{- toYaml .Values.securityContext -}}
{{- else if eq .Values.gateway.backend "amd" -}}
privileged: true
readOnlyRootFilesystem: true
{{- else -}}
allowPrivilegeEscalation: false
capabilities:
  {{- /* NVIDIA's runtime takes it for the right to all GPUs, and to watch MIG. */}}
  {{- if and (eq .Values.gateway.backend "nvidia") (or (include "gateway.mig" .) (include "gateway.mayHave" (dict "root" . "word" "volume-mounts"))) }}
  add: [SYS_ADMIN]
  {{- end }}
  drop: [ALL]
readOnlyRootFilesystem: true
{{- end -}}
{{- end -}}

{{- /* NVIDIA's variables, by the values that its chart makes them of. */ -}}
{{- define "gateway.nvidiaEnv" -}}
{{- $env := list -}}
{{- $texts := dict "MIG_STRATEGY" .Values.migStrategy "DEVICE_LIST_STRATEGY" (include "gateway.strategies" .) "DEVICE_ID_STRATEGY" .Values.deviceIDStrategy "NVIDIA_DEV_ROOT" .Values.nvidiaDevRoot "NVIDIA_CDI_HOOK_PATH" .Values.cdi.nvidiaHookPath "DEVICE_DISCOVERY_STRATEGY" .Values.deviceDiscoveryStrategy -}}
{{- range $name, $value := $texts -}}
{{- if $value -}}{{- $env = append $env (dict "name" $name "value" $value) -}}{{- end -}}
{{- end -}}
{{- $switches := dict "FAIL_ON_INIT_ERROR" .Values.failOnInitError "PASS_DEVICE_SPECS" .Values.compatWithCPUManager "GDRCOPY_ENABLED" .Values.gdrcopyEnabled "GDS_ENABLED" .Values.gdsEnabled "MOFED_ENABLED" .Values.mofedEnabled -}}
{{- range $name, $value := $switches -}}
{{- if kindIs "bool" $value -}}{{- $env = append $env (dict "name" $name "value" (toString $value)) -}}{{- end -}}
{{- end -}}
{{- if include "gateway.driverRoot" . -}}{{- $env = append $env (dict "name" "NVIDIA_DRIVER_ROOT" "value" (include "gateway.driverRoot" .)) -}}{{- end -}}
{{- if include "gateway.mig" . -}}{{- $env = append $env (dict "name" "NVIDIA_MIG_MONITOR_DEVICES" "value" "all") -}}{{- end -}}
{{- $env = append $env (dict "name" "NVIDIA_VISIBLE_DEVICES" "value" "all") -}}
{{- $env = append $env (dict "name" "NVIDIA_DRIVER_CAPABILITIES" "value" (default "utility" .Values.nvidiaDriverCapabilities)) -}}
{{- toJson $env -}}
{{- end -}}

{{- /* `on` or `only`, else empty. YAML reads a bare `on` as true, and `off` as false. */ -}}
{{- define "gateway.dra" -}}
{{- get (dict "true" "on" "on" "on" "only" "only") (toString .Values.gateway.dra) -}}
{{- end -}}

{{- define "gateway.cdi" -}}
{{- if include "gateway.dra" . -}}true
{{- else if eq .Values.gateway.backend "nvidia" -}}{{- include "gateway.mayHave" (dict "root" . "word" "cdi-") -}}{{- end -}}
{{- end -}}

{{- /* Where the driver is on the node, if the pod is to see it: for CDI specifications it must. */ -}}
{{- define "gateway.driverRoot" -}}
{{- if .Values.nvidiaDriverRoot -}}{{- .Values.nvidiaDriverRoot -}}
{{- else if and (eq .Values.gateway.backend "nvidia") (include "gateway.cdi" .) -}}/
{{- end -}}
{{- end -}}

{{- define "gateway.env" -}}
{{- $root := .root -}}
{{- $env := list (dict "name" "GATEWAY_PROBE_ADDRESS" "value" (printf ":%d" .probes)) (dict "name" "GATEWAY_METRICS_ADDRESS" "value" (printf ":%d" .metrics)) (dict "name" "GATEWAY_BACKEND" "value" $root.Values.gateway.backend) (dict "name" "POD_UID" "valueFrom" (dict "fieldRef" (dict "fieldPath" "metadata.uid"))) -}}
{{- if $root.Values.gateway.logLevel -}}{{- $env = append $env (dict "name" "GATEWAY_LOG_LEVEL" "value" $root.Values.gateway.logLevel) -}}{{- end -}}
{{- with $root.Values.gateway.excludeDevices -}}{{- $env = append $env (dict "name" "GATEWAY_EXCLUDE_DEVICES" "value" (join "," .)) -}}{{- end -}}
{{- with include "gateway.dra" $root -}}{{- $env = append $env (dict "name" "GATEWAY_DRA" "value" .) -}}{{- end -}}
{{- if $root.Values.gateway.nodeFeatures -}}{{- $env = append $env (dict "name" "GATEWAY_NODE_FEATURES" "value" "true") -}}{{- end -}}
{{- if eq (toString $root.Values.gateway.draShares) "capacity" -}}{{- $env = append $env (dict "name" "GATEWAY_DRA_SHARES" "value" "capacity") -}}{{- end -}}
{{- with $root.Values.gateway.bridge -}}{{- $env = append $env (dict "name" "GATEWAY_BRIDGE" "value" .) -}}{{- end -}}
{{- if $root.Values.gateway.gpuMetrics -}}{{- $env = append $env (dict "name" "GATEWAY_GPU_METRICS" "value" "true") -}}{{- end -}}
{{- if eq $root.Values.gateway.backend "nvidia" -}}{{- $env = concat $env (include "gateway.nvidiaEnv" $root | fromJsonArray) -}}{{- end -}}
{{- if eq $root.Values.gateway.backend "simulated" -}}{{- $env = append $env (dict "name" "GATEWAY_SIMULATE" "value" "/etc/device-plugin-gateway/profile.yaml") -}}{{- end -}}
{{- if include "gateway.configMap" $root -}}{{- $env = concat $env (include "gateway.configEnv" $root | fromJsonArray) -}}{{- end -}}
{{- if $root.Values.nodeReadiness.condition -}}{{- $env = append $env (dict "name" "GATEWAY_NODE_CONDITION" "value" "true") -}}{{- end -}}
{{- if $root.Values.nodeReadiness.events -}}{{- $env = append $env (dict "name" "GATEWAY_NODE_EVENTS" "value" "true") -}}{{- end -}}
{{- with $root.Values.nodeReadiness.startupTaint -}}{{- $env = append $env (dict "name" "GATEWAY_STARTUP_TAINT" "value" .) -}}{{- end -}}
{{- if or $root.Values.gateway.gpuMetrics (include "gateway.asksApi" $root) -}}{{- $env = append $env (dict "name" "NODE_NAME" "valueFrom" (dict "fieldRef" (dict "fieldPath" "spec.nodeName"))) -}}{{- end -}}
{{- $more := default list (dig "containers" "main" "env" list $root.Values.devicePlugin) -}}
{{- $names := list -}}
{{- range $more -}}{{- $names = append $names .name -}}{{- end -}}
{{- $kept := list -}}
{{- range $env -}}{{- if not (has .name $names) -}}{{- $kept = append $kept . -}}{{- end -}}{{- end -}}
{{- toYaml (concat $kept $more) -}}
{{- end -}}

{{- /* The default by the fallback strategies: "" where none is found, "-" where none is wanted. */ -}}
{{- define "gateway.defaultConfig" -}}
{{- $map := default dict .Values.config.map -}}
{{- $found := default "" .Values.config.default -}}
{{- range (default list .Values.config.fallbackStrategies) -}}
{{- if not $found -}}
{{- if and (eq . "named") (hasKey $map "default") -}}{{- $found = "default" -}}{{- end -}}
{{- if and (eq . "single") (eq (len $map) 1) -}}{{- $found = first (keys $map) -}}{{- end -}}
{{- if eq . "empty" -}}{{- $found = "-" -}}{{- end -}}
{{- end -}}
{{- end -}}
{{- $found -}}
{{- end -}}

{{- /* Which of the configurations counts, the gateway asks the label of its node. */ -}}
{{- define "gateway.configEnv" -}}
{{- $env := list (dict "name" "CONFIG_FILE_SRCDIR" "value" "/available-configs") -}}
{{- if .Values.config.default -}}{{- $env = append $env (dict "name" "DEFAULT_CONFIG" "value" .Values.config.default) -}}{{- end -}}
{{- if .Values.config.fallbackStrategies -}}{{- $env = append $env (dict "name" "FALLBACK_STRATEGIES" "value" (join "," .Values.config.fallbackStrategies)) -}}{{- end -}}
{{- toJson $env -}}
{{- end -}}

{{- /* Is there a feature on that asks the API server? */ -}}
{{- define "gateway.asksApi" -}}
{{- if or (include "gateway.configMap" .) (include "gateway.tellsNode" .) (include "gateway.dra" .) -}}true{{- end -}}
{{- end -}}

{{- define "gateway.tellsNode" -}}
{{- if or .Values.nodeReadiness.condition .Values.nodeReadiness.startupTaint .Values.nodeReadiness.events -}}true{{- end -}}
{{- end -}}

{{- /* The rights and the policy of a component of kustomize, for this release's account. */ -}}
{{- define "gateway.rights" -}}
{{- $root := .root -}}
{{- $whole := printf "%s-%s" (include "gateway.namespace" $root) (include "gateway.fullname" $root) -}}
{{- $account := printf "name: %s\n  namespace: %s" (include "gateway.serviceAccountName" $root) (include "gateway.namespace" $root) -}}
{{- $user := printf "system:serviceaccount:%s:%s" (include "gateway.namespace" $root) (include "gateway.serviceAccountName" $root) }}
{{ $root.Files.Get (printf "files/%s.yaml" .name)
  | replace "system:serviceaccount:device-plugin-gateway:device-plugin-gateway" $user
  | replace "name: device-plugin-gateway\n  namespace: device-plugin-gateway" $account
  | replace (printf "device-plugin-gateway-%s" .name) (printf "%s-%s" $whole .name)
  | replace "device-plugin-gateway-events" (printf "%s-events" $whole) }}
{{- end -}}
