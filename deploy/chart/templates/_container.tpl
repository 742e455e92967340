{{- /* A container with a gateway. Two of a pod differ in their names and ports only. */ -}}
{{- define "gateway.container" -}}
{{- $root := .root -}}
- name: {{ .name }}
  image: {{ include "gateway.image" $root | quote }}
  imagePullPolicy: {{ default "IfNotPresent" $root.Values.image.pullPolicy }}
  args: [run]
  env:
    {{- include "gateway.env" . | nindent 4 }}
  ports:
  - name: {{ .ports }}probes
    containerPort: {{ .probes }}
  - name: {{ .ports }}metrics
    containerPort: {{ .metrics }}
  livenessProbe:
    httpGet:
      path: /healthz
      port: {{ .ports }}probes
    periodSeconds: 10
    timeoutSeconds: 5
    failureThreshold: 6
  # The older one goes when the newer one has been ready for 10 s.
  readinessProbe:
    httpGet:
      path: /readyz
      port: {{ .ports }}probes
    periodSeconds: 2
    timeoutSeconds: 5
    successThreshold: 6
    failureThreshold: 2
  resources:
    {{- if or $root.Values.devicePlugin.resources $root.Values.resources }}
    {{- toYaml (default $root.Values.resources $root.Values.devicePlugin.resources) | nindent 4 }}
    {{- else }}
    requests:
      cpu: 200m
      memory: 96Mi
    limits:
      memory: 256Mi
    {{- end }}
  securityContext:
    {{- include "gateway.securityContext" $root | nindent 4 }}
  terminationMessagePolicy: FallbackToLogsOnError
  volumeMounts:
  - name: device-plugins
    mountPath: /var/lib/kubelet/device-plugins
  - name: pod-resources
    mountPath: /var/lib/kubelet/pod-resources
    readOnly: true
  - name: state
    mountPath: /var/lib/device-plugin-gateway
  {{- if eq $root.Values.gateway.backend "amd" }}
  - name: sys
    mountPath: /sys
    readOnly: true
  - name: exporter
    mountPath: /var/lib/amd-metrics-exporter
    readOnly: true
  {{- else if eq $root.Values.gateway.backend "simulated" }}
  - name: profile
    mountPath: /etc/device-plugin-gateway
    readOnly: true
  {{- else if include "gateway.driverRoot" $root }}
  - name: driver-root
    mountPath: /driver-root
    readOnly: true
  {{- end }}
  {{- if include "gateway.cdi" $root }}
  - name: cdi
    mountPath: /var/run/cdi
  {{- end }}
  {{- if $root.Values.gateway.nodeFeatures }}
  - name: features
    mountPath: /etc/kubernetes/node-feature-discovery/features.d
  {{- end }}
  {{- if include "gateway.dra" $root }}
  - name: plugins-registry
    mountPath: /var/lib/kubelet/plugins_registry
  {{- end }}
  {{- with $root.Values.gateway.bridge }}
  - name: bridge
    mountPath: {{ . }}
  {{- end }}
  {{- if include "gateway.configMap" $root }}
  - name: configs
    mountPath: /available-configs
    readOnly: true
  {{- end }}
{{- end -}}
