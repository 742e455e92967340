"""The records of a kubelet's device manager: which devices there are, who holds them, and who may have which next.

Pure: no plugin is called and no file is touched here. ``DeviceManager`` does that, by what the records say.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from devices.model import ContainerAnswer, Device, DeviceNode, Health, Mount
from gateway_lab.kubelets.behaviour import Behaviour
from gateway_lab.kubelets.checkpoint import Allotment, Key, Memory
from gateway_lab.kubelets.kubelet import Admission, Demand, KubeletError, Running, Totals


@dataclass(frozen=True, slots=True)
class Container:
    """What a container of an active pod asks for, by resource name."""

    limits: Mapping[str, int]
    init: bool


@dataclass(slots=True)
class Claim:
    """Devices set aside for a container that is being admitted: ``taken`` so far, ``available`` to take more from."""

    required: int
    taken: set[str] = field(default_factory=set)
    available: frozenset[str] = frozenset()

    @property
    def missing(self) -> int:
        """How many are still to be taken."""
        return self.required - len(self.taken)

    def take(self, devices: Iterable[str]) -> None:
        """Take as many of ``devices`` as are missing. Which ones is left to chance, as in a kubelet."""
        for device in devices:
            if self.missing == 0:
                return
            self.taken.add(device)


class DeviceRecords:
    """The records of one device manager."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._devices: dict[str, Mapping[str, Device]] = {}
        self._healthy: dict[str, set[str]] = {}
        self._unhealthy: dict[str, set[str]] = {}
        self._allocated: dict[str, set[str]] = {}
        self._held: dict[Key, Allotment] = {}
        self._active: dict[str, dict[str, Container]] = {}
        self._reusable: tuple[str, dict[str, set[str]]] = ("", {})
        self._running: frozenset[tuple[str, str]] = frozenset()
        self.ready = True
        """Whether the kubelet has heard of all its pods."""

    # -- devices ------------------------------------------------------------------------------------------------------

    def enter_list(self, resource: str, before: Mapping[str, Device], devices: Sequence[Device]) -> dict[str, Device]:
        """Enter a plugin's list; ``before`` is what that plugin listed last. Return what it is to be next time."""
        if not self._behaviour.topology:
            devices = [replace(device, numa_nodes=()) for device in devices]
        new = {device.id: device for device in devices}
        if self._behaviour.list_is_delta:
            changed = [
                device for name, device in new.items() if name not in before or before[name].health is not device.health
            ]
            gone = before.keys() - new.keys()
        else:
            changed = list(new.values())
            gone = self._devices.get(resource, {}).keys() - new.keys()
        healthy = self._healthy.setdefault(resource, set())
        unhealthy = self._unhealthy.setdefault(resource, set())
        healthy -= gone
        unhealthy -= gone
        for device in changed:
            well, ill = (healthy, unhealthy) if device.health is Health.HEALTHY else (unhealthy, healthy)
            well.add(device.id)
            ill.discard(device.id)
        self._devices[resource] = new
        return new

    def mark_unhealthy(self, resource: str) -> None:
        """Count all devices of a resource as unhealthy, because its plugin is gone."""
        self._unhealthy.setdefault(resource, set()).update(self._healthy.get(resource, ()))
        self._healthy[resource] = set()

    def drop(self, resource: str, devices: Collection[str]) -> None:
        """Take devices out of a resource, which stays known (1.8)."""
        self._healthy[resource] -= set(devices)

    def forget(self, resource: str) -> None:
        """Forget that there ever was such a resource."""
        self._healthy.pop(resource, None)
        self._unhealthy.pop(resource, None)

    @property
    def resources(self) -> tuple[str, ...]:
        """The resources that are known, with devices or without."""
        return tuple(self._healthy)

    def totals(self) -> Totals:
        """Say what the API server would be told."""
        allocatable = {resource: len(devices) for resource, devices in self._healthy.items()}
        if not self._behaviour.counts_unhealthy:
            return Totals(dict(allocatable), allocatable)
        capacity = {name: count + len(self._unhealthy.get(name, ())) for name, count in allocatable.items()}
        return Totals(capacity, allocatable)

    def allocatable(self) -> dict[str, list[Device]]:
        """Say what the pod-resources API calls allocatable: the devices of the last lists that are healthy."""
        return {
            resource: [device for name, device in self._devices[resource].items() if name in healthy]
            for resource, healthy in self._healthy.items()
            if resource in self._devices
        }

    # -- the checkpoint -----------------------------------------------------------------------------------------------

    def memory(self) -> Memory:
        """Give what is to be remembered over a restart."""
        return Memory(dict(self._held), {resource: sorted(devices) for resource, devices in self._healthy.items()})

    def recall(self, memory: Memory) -> None:
        """Start with what was remembered: resources are known, but have no devices yet."""
        self._held = dict(memory.held)
        self._recount()
        for resource in memory.registered:
            self._healthy[resource] = set()
            self._unhealthy[resource] = set()

    # -- pods ---------------------------------------------------------------------------------------------------------

    def expect(self, pods: Sequence[Demand], running: Sequence[Running]) -> None:
        """Take note of the pods that are active, and of the containers that run, when the kubelet starts."""
        self._running = frozenset((one.pod, one.container) for one in running)
        for pod in pods:
            self.activate(pod.pod, pod.container, {pod.resource: pod.count}, init=pod.init)

    def activate(self, pod: str, name: str, limits: Mapping[str, int], *, init: bool) -> None:
        """Take note of a container of an active pod; without ``limits`` it keeps those that it is known with."""
        containers = self._active.setdefault(pod, {})
        before = containers.get(name)
        if before is None:
            containers[name] = Container(dict(limits), init)
        elif limits:
            containers[name] = Container({**before.limits, **limits}, before.init)

    def deactivate(self, pod: str) -> None:
        """Take note that a pod has ended or failed; its devices are freed by ``free_inactive``."""
        self._active.pop(pod, None)

    def container(self, pod: str, name: str) -> Container | None:
        """Find a container of an active pod."""
        return self._active.get(pod, {}).get(name)

    def free_inactive(self) -> None:
        """Free the devices of pods that aren't active; since 1.9 only once all pods are known."""
        if not self.ready and not self._behaviour.allocates_at_start:
            return
        kept = {key: allotment for key, allotment in self._held.items() if key[0] in self._active}
        if len(kept) < len(self._held):
            self._held = kept
            self._recount()

    def pods(self) -> dict[str, dict[str, dict[str, tuple[str, ...]]]]:
        """Look up which devices each container holds: by pod, container and resource name."""
        found: dict[str, dict[str, dict[str, tuple[str, ...]]]] = {}
        for (pod, container, resource), allotment in self._held.items():
            found.setdefault(pod, {}).setdefault(container, {})[resource] = tuple(sorted(allotment.ids))
        return found

    def app_containers(self) -> dict[str, dict[str, dict[str, Allotment]]]:
        """Look up what the containers of active pods hold that aren't init containers: by pod, container and resource."""
        return {
            pod: {
                name: {key[2]: allotment for key, allotment in self._held.items() if key[:2] == (pod, name)}
                for name, container in containers.items()
                if not container.init
            }
            for pod, containers in self._active.items()
        }

    def ids(self, pod: str, name: str, resource: str) -> frozenset[str]:
        """Look up what one container holds of one resource."""
        allotment = self._held.get((pod, name, resource))
        return allotment.ids if allotment is not None else frozenset()

    # -- admission ----------------------------------------------------------------------------------------------------

    def manages(self, resource: str) -> bool:
        """Tell whether a resource is a device plugin's; others are none of the device manager's business."""
        return resource in self._healthy or resource in self._allocated

    def claim(self, pod: str, name: str, resource: str, required: int) -> Claim | None:
        """Decide what a container is to get, without asking anyone; None where there is nothing to do.

        Raises:
            KubeletError: it can't be admitted.
        """
        has = self.ids(pod, name, resource)
        if has and len(has) != required:
            raise _rejected(self._behaviour.changed_request.format(pod, name, resource, len(has), required))
        if self._behaviour.checks_health:
            if not self.ready and (pod, name) in self._running:
                return None
            if resource not in self._healthy:
                raise _rejected(f"cannot allocate unregistered device {resource}")
            if not self._healthy[resource]:
                raise _rejected(f"no healthy devices present; cannot allocate unhealthy devices {resource}")
            if not self._healthy[resource] >= has:
                raise _rejected(
                    f"previously allocated devices are no longer healthy; cannot allocate unhealthy devices {resource}"
                )
        if len(has) == required:
            return None
        if resource not in self._healthy:
            raise _rejected(f"can't allocate unregistered device {resource}")
        claim = Claim(required)
        claim.take(self._reusables(pod).get(resource, ()))
        if claim.missing:
            claim.available = self._free(resource, claim.missing)
        return claim

    def claim_at_start(self, pod: str, name: str, resource: str, required: int) -> tuple[str, ...]:
        """Choose a container's devices, those it has included, and give them to it at once (1.8).

        Raises:
            KubeletError: there are too few.
        """
        has = self.ids(pod, name, resource)
        more = max(0, required - len(has))
        ids = (*has, *sorted(self._free(resource, more))[:more])
        self.reserve(resource, ids)
        self.allot(pod, name, resource, ids, ContainerAnswer())
        return ids

    def reserve(self, resource: str, devices: Collection[str]) -> None:
        """Keep devices from being given to others while the plugin is asked."""
        self._allocated.setdefault(resource, set()).update(devices)

    def release(self) -> None:
        """Give back what was reserved and then not given."""
        self._recount()

    def allot(self, pod: str, name: str, resource: str, ids: Sequence[str], answer: ContainerAnswer) -> None:
        """Enter what a container got: what is in use isn't counted anew by that, so what was reserved and then forgotten stays so."""
        nodes: dict[str, tuple[str, ...]] = {}
        for device in sorted(ids):
            found = self._devices.get(resource, {}).get(device)
            for node in map(str, found.numa_nodes) if found and found.numa_nodes else (self._behaviour.numa_key,):
                nodes[node] = (*nodes.get(node, ()), device)
        self._held[pod, name, resource] = Allotment(nodes, answer)

    def pass_on(self, pod: str, name: str) -> None:
        """Let later containers of the pod have what its init container got; no two app containers the same."""
        reusable = self._reusables(pod)
        container = self._active[pod][name]
        for resource in container.limits:
            ids = self.ids(pod, name, resource)
            if container.init:
                reusable.setdefault(resource, set()).update(ids)
            else:
                reusable.get(resource, set()).difference_update(ids)

    def admission(
        self, pod: str, name: str, answers: Sequence[ContainerAnswer] | None = None, *, tells_cdi: bool
    ) -> Admission:
        """Merge the answers of all resources (those in its records, or these): of two for the same thing the first counts."""
        held = {resource: allotment for (p, c, resource), allotment in self._held.items() if (p, c) == (pod, name)}
        envs: dict[str, str] = {}
        annotations: dict[str, str] = {}
        mounts: dict[str, Mount] = {}
        nodes: dict[str, DeviceNode] = {}
        cdi: set[str] = set()
        for answer in [allotment.answer for allotment in held.values()] if answers is None else answers:
            envs = {**answer.envs, **envs}
            annotations = {**answer.annotations, **annotations}
            for mount in answer.mounts:
                mounts.setdefault(mount.container_path, mount)
            for node in answer.device_nodes:
                nodes.setdefault(node.container_path, node)
            cdi.update(answer.cdi_devices if tells_cdi else ())
        if cdi and self._behaviour.cdi_annotation:
            annotations.setdefault(f"cdi.k8s.io/devicemanager_{pod}-{name}", ",".join(sorted(cdi)))
        return Admission(
            {resource: tuple(sorted(allotment.ids)) for resource, allotment in held.items()},
            ContainerAnswer(
                envs,
                tuple(mounts[path] for path in sorted(mounts)),
                tuple(nodes[path] for path in sorted(nodes)),
                annotations,
                tuple(sorted(cdi)),
            ),
        )

    def _reusables(self, pod: str) -> dict[str, set[str]]:
        """Find what the pod that is being admitted may use again; only ever that of the last one is kept."""
        if self._reusable[0] != pod:
            self._reusable = (pod, {})
        return self._reusable[1]

    def _free(self, resource: str, needed: int) -> frozenset[str]:
        free = self._healthy[resource] - self._allocated.get(resource, set())
        if len(free) < needed:
            raise _rejected(
                f"requested number of devices unavailable for {resource}. Requested: {needed}, Available: {len(free)}"
            )
        return frozenset(free)

    def _recount(self) -> None:
        self._allocated = {}
        for (_, _, resource), allotment in self._held.items():
            self._allocated.setdefault(resource, set()).update(allotment.ids)


def _rejected(message: str) -> KubeletError:
    return KubeletError("admit", message, "allocate")
