"""Make one snapshot of a node: everything that ``gateway doctor`` collects."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct
from msgspec.structs import asdict

from gateway.doctor import collect, containers
from gateway.doctor.snapshot import Cluster, GatewayFacts, NodeFacts, NvmlSeen, Release
from gateway.kubelet.identity import CHECKPOINT
from gateway.leader import instance
from gateway.wires.unix import listens


class Places(Struct, frozen=True, kw_only=True):
    """The paths to look at: ``root`` is the host's file system, the others are below it."""

    root: Path
    socket_dir: Path
    state_dir: Path
    pod_resources: Path


def look(
    places: Places,
    told: GatewayFacts,
    cluster: Cluster,
    release: Callable[[str], Release | None],
    nvml: Callable[[], NvmlSeen | None] | None = None,
) -> NodeFacts:
    """Collect everything once. ``release`` returns the facts about a kubelet's version, ``nvml`` the state of NVIDIA's library."""
    root = places.root
    gpus = collect.gpus(root)
    of_nvidia = sum(one.vendor == "0x10de" for one in gpus or ())
    seen = collect.socket_dir(places.socket_dir)
    there = seen.state == "there"
    return NodeFacts(
        now=time.time(),
        socket_dir=seen,
        checkpoint=collect.kubelet_checkpoint(places.socket_dir / CHECKPOINT) if there else None,
        has_pod_resources=listens(places.pod_resources) if there else None,
        kubelets=collect.kubelets(root),
        release=release(cluster.node.kubelet) if cluster.node and cluster.node.kubelet else None,
        live_tokens=instance.alive(places.socket_dir) if there else frozenset(),
        state_dir=collect.state_dir(places.state_dir),
        max_inotify_instances=collect.inotify_most(root),
        processes=tuple(found for status in told.statuses if (found := collect.process(root, status.pid)) is not None),
        gpus=gpus,
        kernel_modules=collect.modules(root),
        nvml=nvml() if nvml and of_nvidia else None,
        device_nodes=collect.nodes(root, of_nvidia, tried=root == Path("/")) if of_nvidia else None,
        kfd_gpus=collect.kfd_gpus(root),
        runtime=containers.runtime(root, cluster.node.runtime if cluster.node else ""),
        cdi_files=collect.cdi_files(root),
        selinux_enforcing=collect.enforcing(root),
        dra_drivers=collect.dra_drivers(places.socket_dir.parent),
        boot=collect.boot(root),
        numa_nodes=collect.numa_nodes(root),
        wsl=collect.sign(root, collect.WSL),
        jetson=collect.sign(root, collect.JETSON),
        nvswitches=collect.switches(root),
        fabric_manager=collect.fabric_manager(root),
        has_registry=collect.has_registry(places.socket_dir.parent),
        **asdict(told),
        **asdict(cluster),
    )
