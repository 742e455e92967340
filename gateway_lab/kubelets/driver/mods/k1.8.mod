module kubelet

go 1.21

require k8s.io/kubernetes v1.8.15

require (
	github.com/PuerkitoBio/purell v1.1.1 // indirect
	github.com/PuerkitoBio/urlesc v0.0.0-20170810143723-de5bf2ad4578 // indirect
	github.com/beorn7/perks v0.0.0-20180321164747-3a771d992973 // indirect
	github.com/emicklei/go-restful v0.0.0-20170410110728-ff4f55a20633 // indirect
	github.com/go-openapi/jsonpointer v0.19.2 // indirect
	github.com/go-openapi/jsonreference v0.19.2 // indirect
	github.com/go-openapi/swag v0.19.2 // indirect
	github.com/mailru/easyjson v0.0.0-20190614124828-94de47d64c63 // indirect
	github.com/matttproud/golang_protobuf_extensions v1.0.1 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/modern-go/reflect2 v0.0.0-20180701023420-4b7aa43c6742 // indirect
	github.com/prometheus/client_model v0.0.0-20180712105110-5c3871d89910 // indirect
	github.com/prometheus/common v0.0.0-20181126121408-4724e9255275 // indirect
	github.com/prometheus/procfs v0.0.0-20181204211112-1dc9a6cbc91a // indirect
	golang.org/x/text v0.3.2 // indirect
	gopkg.in/yaml.v2 v2.2.2 // indirect
)

require (
	github.com/coreos/etcd v3.3.15+incompatible
	github.com/coreos/go-semver v0.3.0
	github.com/coreos/go-systemd v0.0.0-20181012123002-c6f51f82210d
	github.com/davecgh/go-spew v1.1.1
	github.com/dgrijalva/jwt-go v3.2.0+incompatible
	github.com/docker/distribution v0.0.0-20170726174610-edc3ab29cdff
	github.com/docker/go-units v0.3.3
	github.com/docker/spdystream v0.0.0-20160310174837-449fdfce4d96
	github.com/emicklei/go-restful-swagger12 v0.0.0-20170208215640-dcef7f557305
	github.com/ghodss/yaml v0.0.0-20180820084758-c7ce16629ff4
	github.com/go-openapi/spec v0.19.2
	github.com/godbus/dbus v4.1.0+incompatible
	github.com/gogo/protobuf v0.0.0-20170330071051-c0656edd0d9e
	github.com/golang/glog v0.0.0-20160126235308-23def4e6c14b
	github.com/golang/groupcache v0.0.0-20160516000752-02826c3e7903
	github.com/golang/protobuf v1.2.0
	github.com/google/btree v0.0.0-20180813153112-4030bb1f1f0c
	github.com/google/cadvisor v0.27.1
	github.com/google/gofuzz v1.0.0
	github.com/googleapis/gnostic v0.0.0-20170729233727-0c5108395e2d
	github.com/gregjones/httpcache v0.0.0-20180305231024-9cad4c3443a7
	github.com/hashicorp/golang-lru v0.5.1
	github.com/json-iterator/go v1.1.7
	github.com/juju/ratelimit v0.0.0-20170523012141-5b9ff8664717
	github.com/kr/pty v1.1.5
	github.com/opencontainers/go-digest v1.0.0-rc1
	github.com/opencontainers/runc v1.0.0-rc5
	github.com/opencontainers/runtime-spec v1.0.0
	github.com/peterbourgon/diskv v2.0.1+incompatible
	github.com/prometheus/client_golang v0.9.2
	github.com/sirupsen/logrus v1.4.2
	github.com/spf13/pflag v1.0.5
	golang.org/x/net v0.0.0-20191004110552-13f9640d40b9
	golang.org/x/sys v0.30.0
	google.golang.org/genproto v0.0.0-20170731182057-09f6ed296fc6
	google.golang.org/grpc v0.0.0-00010101000000-000000000000 // indirect
	gopkg.in/inf.v0 v0.9.0
	k8s.io/api v0.0.0-20180510182548-a315a049e7a9
	k8s.io/apiextensions-apiserver v0.0.0-20180103181712-d0becfa6529e
	k8s.io/apimachinery v0.0.0-20180628120320-b593b18191da
	k8s.io/apiserver v0.0.0-20180201051917-40b00dd493d8
	k8s.io/client-go v0.0.0-20180510183819-c7d1a4cb7528
	k8s.io/kube-openapi v0.0.0-20200410163147-594e756bea31
	k8s.io/utils v0.0.0-20190801114015-581e00157fb1
)

replace golang.org/x/exp => ./standin/exp

replace google.golang.org/grpc => google.golang.org/grpc v1.3.0

replace golang.org/x/net => golang.org/x/net v0.0.0-20170809000501-1c05540f6879

replace github.com/golang/protobuf => github.com/golang/protobuf v0.0.0-20171021043952-1643683e1b54

replace github.com/prometheus/client_model => github.com/prometheus/client_model v0.0.0-20150212101744-fa8ad6fec335
