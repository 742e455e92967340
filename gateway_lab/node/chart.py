"""The gateway on the node by the Helm chart in deploy/chart: installed, upgraded and uninstalled by the genuine Helm."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from gateway_lab.kubelets.build import cache
from gateway_lab.node import Node
from gateway_lab.node.api import Api
from gateway_lab.node.installed import NAMESPACE, DaemonSet, InstallError, write_profile
from gateway_lab.node.watch import Recorder

CHART: Final = Path(__file__).parents[2] / "deploy" / "chart"
RELEASE: Final = "gpu"
"""The release's name, which is the DaemonSet's and its account's, too."""
ACCOUNT: Final = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{RELEASE}"
PROFILE: Final = f"/api/v1/namespaces/{NAMESPACE}/configmaps/{RELEASE}-profile"
_SECONDS: Final = 120


def helm() -> Path:
    """Find Helm: $HELM names it, else it is the one that `.ci/chart` has built.

    Raises:
        InstallError: there is none.
    """
    if "HELM" in os.environ:
        return Path(os.environ["HELM"])
    found = max((cache() / "helm").glob("*/helm"), default=None)
    if found is None:
        raise InstallError(
            "expected Helm, but there is none: run `.ci/chart`, which builds it, or set HELM to its path"
        )
    return found


class Chart(DaemonSet):
    """The release, with simulated GPUs that have the node's devices."""

    def __init__(self, node: Node, api: Api, seen: Recorder, image: str) -> None:
        super().__init__(node, api, seen, image)
        self._values: Mapping[str, Any] = {}

    async def start(self) -> None:
        """Install it."""
        label = {"metadata": {"labels": {"device-plugin-gateway.io/simulated": "true"}}}
        await self._api.merge(f"/api/v1/nodes/{self._node.name}", label)
        await self._helm("install", "--create-namespace", *self._given())

    async def stop(self) -> None:
        """Uninstall it, and wait until its pods are gone."""
        await self._helm("uninstall")
        await self._seen.until(lambda seen: not self._pods(seen), "the gateway's pods to be gone")

    async def roll(self, image: str) -> None:
        """Upgrade it to another image, and wait until the last pod of the old one is gone."""
        self._image = image
        await self._upgrade(f"one gateway, of image {image}")

    async def reconfigure(self, values: Mapping[str, Any]) -> None:
        """Upgrade it to these values, beside its own, and wait until the last pod of before is gone."""
        self._values = values
        await self._upgrade("one gateway, with the new values")

    async def repair(self) -> None:
        """Upgrade it to what it is: Helm brings back what was deleted."""
        await self._helm("upgrade", *self._given())

    async def _upgrade(self, what: str) -> None:
        old = {pod.uid for pod in self._pods(self._seen)}
        await self.repair()
        await self._seen.until(
            lambda seen: (
                bool(self._pods(seen))
                and all(pod.uid not in old and pod.ready and not pod.ending for pod in self._pods(seen))
            ),
            what,
            _SECONDS,
        )

    def _given(self) -> tuple[str, ...]:
        own = {
            "backend": "simulated",
            "image": self._image,
            "profile": write_profile(self._node, cdi=True).read_text(),
            **self._values.get("gateway", {}),
        }
        path = self._node.folder / "run" / "values.yaml"
        path.write_text(yaml.safe_dump({"fullnameOverride": RELEASE, **self._values, "gateway": own}))
        return (str(CHART), f"--values={path}")

    async def _helm(self, verb: str, *more: str) -> None:
        command = [str(helm()), verb, RELEASE, f"--namespace={NAMESPACE}", *more]
        environment = os.environ | {"KUBECONFIG": str(self._node.kubeconfig), "HOME": str(self._node.folder)}
        done = await asyncio.to_thread(
            subprocess.run, command, env=environment, check=False, capture_output=True, text=True, timeout=_SECONDS
        )
        if done.returncode:
            raise InstallError(f"expected `helm {verb}` to work, but: {done.stderr.strip()}")
