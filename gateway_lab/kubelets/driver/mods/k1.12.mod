module kubelet

go 1.21

require (
	github.com/prometheus/client_model v0.0.0-20180712105110-5c3871d89910
	k8s.io/kubernetes v1.12.10
)

require (
	github.com/beorn7/perks v0.0.0-20180321164747-3a771d992973 // indirect
	github.com/matttproud/golang_protobuf_extensions v1.0.1 // indirect
	github.com/modern-go/concurrent v0.0.0-20180306012644-bacd9c7ef1dd // indirect
	github.com/prometheus/common v0.0.0-20181126121408-4724e9255275 // indirect
	github.com/prometheus/procfs v0.0.0-20181204211112-1dc9a6cbc91a // indirect
	golang.org/x/crypto v0.0.0-20190308221718-c2843e01d9a2 // indirect
	golang.org/x/text v0.3.0 // indirect
	gopkg.in/yaml.v2 v2.2.1 // indirect
)

require (
	github.com/davecgh/go-spew v1.1.1
	github.com/docker/distribution v0.0.0-20170726174610-edc3ab29cdff
	github.com/docker/spdystream v0.0.0-20160310174837-449fdfce4d96
	github.com/fsnotify/fsnotify v1.4.7
	github.com/ghodss/yaml v0.0.0-20180820084758-c7ce16629ff4
	github.com/gogo/protobuf v0.0.0-20170330071051-c0656edd0d9e
	github.com/golang/glog v0.0.0-20160126235308-23def4e6c14b
	github.com/golang/groupcache v0.0.0-20160516000752-02826c3e7903
	github.com/golang/protobuf v1.2.0
	github.com/google/btree v0.0.0-20180813153112-4030bb1f1f0c
	github.com/google/gofuzz v1.0.0
	github.com/googleapis/gnostic v0.0.0-20170729233727-0c5108395e2d
	github.com/gregjones/httpcache v0.0.0-20180305231024-9cad4c3443a7
	github.com/hashicorp/golang-lru v0.5.1
	github.com/json-iterator/go v1.1.7
	github.com/modern-go/reflect2 v1.0.1
	github.com/opencontainers/go-digest v1.0.0-rc1
	github.com/peterbourgon/diskv v2.0.1+incompatible
	github.com/pkg/errors v0.8.0
	github.com/prometheus/client_golang v0.9.2
	github.com/spf13/afero v1.2.2
	github.com/spf13/pflag v1.0.1
	golang.org/x/exp v0.0.0-00010101000000-000000000000 // indirect
	golang.org/x/net v0.0.0-20191004110552-13f9640d40b9
	golang.org/x/oauth2 v0.0.0-20190604053449-0f29369cfe45
	golang.org/x/sys v0.30.0
	golang.org/x/time v0.0.0-20190308202827-9d24e82272b4
	google.golang.org/genproto v0.0.0-20170731182057-09f6ed296fc6
	google.golang.org/grpc v0.0.0-00010101000000-000000000000 // indirect
	gopkg.in/inf.v0 v0.9.0
	gopkg.in/square/go-jose.v2 v2.2.2
	k8s.io/api v0.0.0-20190708094356-59223ed9f6ce
	k8s.io/apiextensions-apiserver v0.0.0-20190708094842-2e94e9ac9840
	k8s.io/apimachinery v0.0.0-20190221084156-01f179d85dbc
	k8s.io/apiserver v0.0.0-20190528110248-2d60c3dee270
	k8s.io/client-go v0.0.0-20190708094436-77c08c6b86df
	k8s.io/csi-api v0.0.0-20190325194237-b07135bbe9d0
	k8s.io/kube-openapi v0.0.0-20200410163147-594e756bea31
	k8s.io/utils v0.0.0-20190801114015-581e00157fb1
)

replace golang.org/x/exp => ./standin/exp

replace google.golang.org/grpc => google.golang.org/grpc v1.7.5
