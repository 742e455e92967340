"""A node whose GPUs are offered by DRA: the gateway as a host service with no more rights than it needs, and pods with claims.

The rights are those of the components api-server, dra and dra-on in deploy/kustomize/components. The service has a token that is bound to the Node, as a host's has.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, Self

import yaml

from gateway.kubelet.records import look
from gateway.wires import control
from gateway.wires.unix import listens
from gateway_lab.gatewayproc import GatewayProcess, gateway_command, leader_socket
from gateway_lab.node import Node, pods
from gateway_lab.node.api import Api, ApiError, Object
from gateway_lab.node.installed import DEVICES, GPUS, NAMESPACE, STATE, write_profile
from gateway_lab.trials.scenarios import RESOURCE
from gateway_lab.waiting import until

DRIVER: Final = "gpu.nvidia.com"
RESOURCES: Final = "/apis/resource.k8s.io/v1"
SLICES: Final = f"{RESOURCES}/resourceslices"
POD: Final = f"/api/v1/namespaces/{pods.NAMESPACE}/pods"
_COMPONENTS: Final = Path(__file__).parents[2] / "deploy" / "kustomize" / "components"
_RIGHTS: Final = (
    "api-server/account.yaml",
    *(f"{one}/{name}.yaml" for one in ("dra", "dra-on") for name in ("rights", "policy")),
)
PATIENCE: Final = 60.0
SHORT: Final = 2
"""How often a short pod looks at its GPU, twice a second."""
EVERY: Final = 0.05
"""Seconds between two questions to the API server."""
_DRIVER_SERVES: Final = "DRA driver registered"
ACCOUNT: Final = "device-plugin-gateway"
_PLACES: Final[Mapping[str, str]] = {
    "ServiceAccount": f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
    "ValidatingAdmissionPolicy": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings",
}


class DraNode:
    """The node, its claims, and the gateways on it; ``gateways`` are those that run, the newest last, in ``mode``."""

    def __init__(self, node: Node) -> None:
        self.node, self.api = node, Api.of(node)
        self.gateways: list[GatewayProcess] = []
        self._pods = 0
        """How many were started, each as if in a pod of its own."""
        self.token = self.mode = ""
        self._options: tuple[str, ...] = ()
        self._uids: dict[str, str] = {}
        """Of the pods that were started, by name: the kubelet keeps an ended pod's log for a while."""

    @classmethod
    @contextlib.asynccontextmanager
    async def here(cls) -> AsyncIterator[Self]:
        """Make the node of this machine such a one; the gateways end with it."""
        one = cls(Node.here())
        for path in DEVICES.values():
            one.node.make_device(path)
        await one.prepare()
        try:
            yield one
        finally:
            await one.close()

    async def prepare(self) -> None:
        """Give the gateway its rights, and pods what they claim by."""
        await self.api.apply(f"/api/v1/namespaces/{NAMESPACE}", _object("v1", "Namespace", NAMESPACE))
        for file in _RIGHTS:
            for wanted in yaml.safe_load_all((_COMPONENTS / file).read_text()):
                await self.api.apply(f"{_PLACES[wanted['kind']]}/{wanted['metadata']['name']}", wanted)
        about = await self.api.get(f"/api/v1/nodes/{self.node.name}")
        bound = {"kind": "Node", "apiVersion": "v1", "name": self.node.name, "uid": about["metadata"]["uid"]}
        asked = {"spec": {"boundObjectRef": bound, "expirationSeconds": 3600}}
        self.token = (await self.api.create(f"{_PLACES['ServiceAccount']}/{ACCOUNT}/token", asked))["status"]["token"]
        await self.claimable()

    async def claimable(self) -> None:
        """Give pods a class and a template of claims."""
        expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
        spec = {"selectors": [{"cel": {"expression": expression}}]}
        version = RESOURCES.removeprefix("/apis/")
        await self.api.apply(
            f"{RESOURCES}/deviceclasses/{DRIVER}", {**_object(version, "DeviceClass", DRIVER), "spec": spec}
        )
        request = {"name": "gpu", "exactly": {"deviceClassName": DRIVER}}
        await self.api.apply(
            f"{RESOURCES}/namespaces/{pods.NAMESPACE}/resourceclaimtemplates/one-gpu",
            {
                **_object(version, "ResourceClaimTemplate", "one-gpu"),
                "spec": {"spec": {"devices": {"requests": [request]}}},
            },
        )

    # The gateway.

    async def start(self, dra: str = "only", *options: str) -> GatewayProcess:
        """Start one more gateway, with DRA ``only``, ``off`` or ``on``; return when the kubelet has taken its registrations."""
        self.mode, self._options = dra, options
        self._pods += 1
        one = await self._launch()
        self.gateways.append(one)
        for event in {"off": ("registered",), "only": (_DRIVER_SERVES,), "on": ("registered", _DRIVER_SERVES)}[dra]:
            await one.wait_for(event, seconds=PATIENCE)
        return one

    async def _launch(self) -> GatewayProcess:
        root, state = self.node.root, self.node.root / STATE
        state.mkdir(parents=True, exist_ok=True)
        (root / "run/cdi").mkdir(parents=True, exist_ok=True)
        kubeconfig = self.node.folder / "run" / "gateway.kubeconfig"
        kubeconfig.write_text(json.dumps(self._kubeconfig()))
        own = ["--dra", self.mode, "--node-name", self.node.name, "--kubeconfig", str(kubeconfig)]
        command = self.command([*own, *self._options])
        # The runtime's folder of specifications is the node's: the gateway sees it where a pod or a host service does.
        enter = f'mkdir -p /run/cdi && mount --bind "{root}/run/cdi" /run/cdi && exec "$@"'
        pod = f"POD_UID={self._pods}"
        return await GatewayProcess.launch(
            ["env", pod, "unshare", "--mount", "sh", "-c", enter, "sh", *command], self.node.logs / "gateway.log"
        )

    def command(self, options: Sequence[str]) -> list[str]:
        """Return the command line of a gateway with these options."""
        return gateway_command(self.node.plugins, self.node.root / STATE, write_profile(self.node), options=options)

    async def end(self, one: GatewayProcess) -> None:
        """End a gateway in an orderly way."""
        self.gateways.remove(one)
        await one.terminate()

    async def kill(self, one: GatewayProcess) -> None:
        """Kill a gateway."""
        self.gateways.remove(one)
        await one.kill()

    async def close(self) -> None:
        """End all of them."""
        for one in list(self.gateways):
            await self.end(one)

    def _kubeconfig(self) -> Object:
        cluster = {"server": self.node.server, "certificate-authority": str(self.node.ca)}
        return {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "node", "cluster": cluster}],
            "users": [{"name": "gateway", "user": {"token": self.token}}],
            "contexts": [{"name": "node", "context": {"cluster": "node", "user": "gateway"}}],
            "current-context": "node",
        }

    async def cross(self, to: str, *ids: str, dry_run: bool = False) -> dict[str, str]:
        """Order GPUs to an API; give where each is by its UUID."""
        places = self.node.plugins, self.node.root / STATE
        await until(lambda: listens(leader_socket(*places)), PATIENCE)
        asked = {"op": "move", "to": to, "ids": list(ids), "dry_run": dry_run}
        answer = await control.ask(leader_socket(*places), asked, PATIENCE)
        return {row["id"]: row["side"] for row in answer["boards"]}

    async def stand(self, sides: Mapping[str, str], seconds: float = PATIENCE) -> None:
        """Wait until GPUs are where they are to be."""

        async def all_are() -> bool:
            # In this direction nothing is asked of the API server.
            return sides.items() <= (await self.cross("plugin", dry_run=True)).items()

        await until(all_are, seconds, every=EVERY)

    # What is there.

    async def devices(self) -> dict[str, str]:
        """Give the UUIDs of the devices that are published, by name."""
        found = await self.api.get(SLICES)
        return {
            device["name"]: device["attributes"]["uuid"]["string"]
            for one in found["items"]
            if one["spec"]["driver"] == DRIVER
            for device in one["spec"].get("devices", ())
        }

    async def tainted(self) -> set[str]:
        """Give the names of the devices that are published with a taint."""
        found = await self.api.get(SLICES)
        devices = (device for one in found["items"] for device in one["spec"].get("devices", ()))
        return {device["name"] for device in devices if device.get("taints")}

    async def published(self, count: int = GPUS) -> None:
        """Wait until so many devices are published."""

        async def all_are() -> bool:
            return len(await self.devices()) == count

        await until(all_are, PATIENCE, every=EVERY)

    async def allocatable(self, count: int = GPUS) -> None:
        """Wait until so many GPUs may be given by name, by the kubelet's own records and at the API server.

        The API server alone may show what was there before: the kubelet tells it every 10 s, and refuses a pod that comes for
        GPUs which it doesn't know yet.
        """
        folder = self.node.plugins
        places = folder.parent / "pod-resources" / "kubelet.sock", folder / "kubelet_internal_checkpoint"

        async def everywhere() -> bool:
            known = (await look(*places)).allocatable or {}
            told = (await self.api.get(f"/api/v1/nodes/{self.node.name}"))["status"]["allocatable"]
            return (len(known.get(RESOURCE, ())), told.get(RESOURCE)) == (count, str(count))

        await until(everywhere, PATIENCE, every=EVERY)

    async def unprepared(self) -> None:
        """Wait until the gateway has no claim to remember."""
        await until(lambda: not self.prepared(), PATIENCE)

    def prepared(self) -> Mapping[str, Any]:
        """Give the claims that the gateway remembers."""
        path = self.node.root / STATE / "ledger.json"
        found: Mapping[str, Any] = json.loads(path.read_text()).get("claims", {}) if path.exists() else {}
        return found

    async def write(self, path: str, body: Object, *, apply: bool = False) -> int:
        """Write something with the gateway's rights; return the status of the answer."""
        from gateway.kubernetes import access, client  # noqa: PLC0415 - the daemon's own client, with its token

        api = client.Client(access.find(self.node.folder / "run" / "gateway.kubeconfig"), manager="e2e")
        try:
            if apply:
                await api.apply(path, body, dict[str, Any])
            else:
                await api.patch(path, body, client.Patch.MERGE)
        except client.KubernetesError as error:
            return error.status
        finally:
            api.close()
        return 200

    async def write_elsewhere(self) -> int:
        """Write a slice of another node with the gateway's rights; return the status of the answer."""
        return await self.write(f"{SLICES}/elsewhere", slice_of("elsewhere"), apply=True)

    @contextlib.asynccontextmanager
    async def ready_too(self) -> AsyncIterator[None]:
        """Have the policy of the component node-readiness meanwhile."""
        policy = yaml.safe_load_all((_COMPONENTS / "node-readiness" / "policy.yaml").read_text())
        wanted = {f"{_PLACES[one['kind']]}/{one['metadata']['name']}": one for one in policy}
        for path, one in wanted.items():
            await self.api.apply(path, one)
        try:
            yield
        finally:
            for path in wanted:
                await self.api.delete(path)

    @contextlib.asynccontextmanager
    async def by_name(self) -> AsyncIterator[None]:
        """Have a class meanwhile of which pods get a claim that ask for the resource by its name."""
        path = f"{RESOURCES}/deviceclasses/by-name"
        expression = f"device.driver == '{DRIVER}' && device.attributes['{DRIVER}'].type == 'gpu'"
        spec = {"extendedResourceName": RESOURCE, "selectors": [{"cel": {"expression": expression}}]}
        await self.api.apply(
            path, {**_object(RESOURCES.removeprefix("/apis/"), "DeviceClass", "by-name"), "spec": spec}
        )
        try:
            yield
        finally:
            await self.api.delete(path)

    # Pods.

    @staticmethod
    def named(name: str, looks: int = pods.FOR_EVER) -> Object:
        """A pod that asks for one GPU by its resource's name."""
        return pods.gpu_pod(name, 1, looks=looks)

    @staticmethod
    def claiming(name: str, looks: int = pods.FOR_EVER) -> Object:
        """A pod with a claim for one GPU."""
        pod: Any = json.loads(json.dumps(pods.gpu_pod(name, 0, looks=looks)))
        pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}]
        pod["spec"]["containers"][0]["resources"] = {"claims": [{"name": "gpu"}]}
        return dict(pod)

    async def create(self, name: str, pod: Object) -> None:
        """Have a pod; it need not run when this returns."""
        self._uids[name] = (await self.api.create(POD, pod))["metadata"]["uid"]

    async def named_pod(self, name: str) -> str:
        """Start a pod that asks for one GPU by its resource's name; return its device node when its container runs."""
        await self._run(name, self.named(name))
        [node] = self.account(name).nodes
        return node

    async def claim_pod(self, name: str) -> str:
        """Start a pod with a claim for one GPU; return the UUID of what was allocated when its container runs.

        A kubelet that starts removes the slices of its drivers, which publish them anew: for a moment the device may be missing.
        """
        await self._run(name, self.claiming(name))
        given = await self.allocated(name)
        uuids: dict[str, str] = {}

        async def is_there() -> bool:
            uuids.update(await self.devices())
            return given in uuids

        await until(is_there, PATIENCE, every=EVERY)
        return uuids[given]

    async def _run(self, name: str, pod: Object) -> None:
        await self.create(name, pod)
        try:
            await until(lambda: bool(self.account(name).nodes), PATIENCE)
        except TimeoutError:
            found = await self.api.get("/api/v1/namespaces/default/events")
            said = [one["message"] for one in found["items"] if one["involvedObject"]["name"] == name]
            raise AssertionError(f"expected pod {name} to run, got {said}") from None

    async def allocated(self, name: str) -> str:
        """Give the device that a pod's claim was allocated. The claim of an ended pod of that name may still be there."""
        found = await self.api.get(f"{RESOURCES}/namespaces/{pods.NAMESPACE}/resourceclaims")
        for claim in found["items"]:
            if any(one["uid"] == self._uids[name] for one in claim["metadata"].get("ownerReferences", ())):
                [result] = claim["status"]["allocation"]["devices"]["results"]
                return str(result["device"])
        raise AssertionError(f"expected a claim of pod {name}, found none")

    def account(self, name: str) -> pods.Account:
        """Give what a pod's container says of itself."""
        logs, uid = self.node.root / "var/log/pods", self._uids[name]
        made = (logs / f"{pods.NAMESPACE}_{name}_{uid}").exists()
        return pods.account(pods.words(logs, name, uid) if made else ())

    async def delete_all(self) -> None:
        """Delete what a scenario left that failed."""
        found = await self.api.get(POD)
        await self.delete(*(one["metadata"]["name"] for one in found["items"]))

    async def delete(self, *names: str) -> None:
        """Delete pods; return when they are gone, and their claims are unprepared."""
        for name in names:
            await self.api.delete(f"{POD}/{name}")
        async with asyncio.timeout(PATIENCE):
            for name in names:
                await until(partial(self._is_gone, name), every=EVERY)

    async def unschedulable(self, name: str) -> None:
        """Wait until the scheduler has said that it finds no node for a pod."""

        async def has_said() -> bool:
            said = (await self.api.get(f"{POD}/{name}"))["status"].get("conditions", ())
            return any((one["type"], one.get("reason")) == ("PodScheduled", "Unschedulable") for one in said)

        await until(has_said, PATIENCE, every=EVERY)

    async def short_pod(self, name: str) -> None:
        """Have a pod that asks for one GPU by its resource's name run to its end.

        Raises:
            AssertionError: it failed.
        """
        await self.create(name, self.named(name, SHORT))
        phases: list[str] = []

        async def is_over() -> bool:
            phases.append((await self.api.get(f"{POD}/{name}"))["status"].get("phase", ""))
            return phases[-1] in {"Succeeded", "Failed"}

        await until(is_over, PATIENCE, every=EVERY)
        assert (phases[-1], len(self.account(name).nodes)) == ("Succeeded", 1), name
        await self.delete(name)

    async def _is_gone(self, name: str) -> bool:
        try:
            await self.api.get(f"{POD}/{name}")
        except ApiError as error:
            if error.status == 404:
                return True
            raise
        return False


def slice_of(node: str) -> Object:
    """A slice of a node, without a device, of its name."""
    pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
    return {
        **_object(RESOURCES.removeprefix("/apis/"), "ResourceSlice", node),
        "spec": {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": []},
    }


def _object(version: str, kind: str, name: str) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name}}
