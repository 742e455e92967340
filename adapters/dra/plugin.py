"""The DRAPlugin API, by which a kubelet prepares claims: v1 (1.34 and later) and v1beta1 (1.32 and later).

They differ in one field: only v1 can carry the share of a device. Every kubelet from 1.32 on accepts a list of both services,
and uses the newest that it knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from adapters.dialect import MalformedError
from adapters.pb.dra import v1_pb2, v1beta1_pb2
from adapters.spelling import parse, serialize
from devices.claims import Answers, ClaimName, Prepared, Refused

MAX_BYTES: Final = 64 * 1024
"""Most bytes of a request. A pod has at most 64 claims, of 400 bytes each at most, and the kubelet asks pod by pod."""
MAX_CLAIMS: Final = 1024
"""Most claims in one request."""
PREPARE: Final = "NodePrepareResources"
UNPREPARE: Final = "NodeUnprepareResources"
_NAME: Final = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?", re.ASCII)
"""The name and the namespace of a claim. They become part of a path of the API server."""
_UID: Final = re.compile(r"[A-Za-z0-9-]{1,63}", re.ASCII)
"""It becomes part of a file's name."""


class UnsayableShareError(ValueError):
    """This kubelet's API can't carry a share of a device. Without it, the claim would get the whole device."""


class PluginApi(Struct, frozen=True):
    """One version of the API. ``pb`` has its messages; ``carries_share``: it carries the share of a device."""

    version: str
    pb: Any
    carries_share: bool

    @property
    def service(self) -> str:
        """The gRPC service on the driver's socket."""
        return f"k8s.io.kubelet.pkg.apis.dra.{self.version}.DRAPlugin"

    @property
    def registered_as(self) -> str:
        """Its name in the registration."""
        return f"{self.version}.DRAPlugin"

    def decode_prepare_request(self, data: bytes) -> tuple[ClaimName, ...]:
        """Decode the claims to prepare.

        Raises:
            MalformedError: it is no such request.
        """
        return self._claims(self.pb.NodePrepareResourcesRequest, data)

    def decode_unprepare_request(self, data: bytes) -> tuple[ClaimName, ...]:
        """Decode the claims to unprepare.

        Raises:
            MalformedError: it is no such request.
        """
        return self._claims(self.pb.NodeUnprepareResourcesRequest, data)

    def encode_prepare_answer(self, answers: Answers) -> bytes:
        """Encode the result for each claim.

        Raises:
            UnsayableShareError: a device is a share, and this version can't carry it.
        """
        message = self.pb.NodePrepareResourcesResponse()
        for uid, answer in answers.items():
            one = message.claims[uid]
            one.SetInParent()
            if isinstance(answer, Refused):
                one.error = answer.reason
                continue
            for prepared in answer:
                self._fill(one.devices.add(), prepared)
        return serialize(message)

    def encode_unprepare_answer(self, answers: Mapping[str, Refused | None]) -> bytes:
        """Encode the result for each claim (None: it is unprepared)."""
        message = self.pb.NodeUnprepareResourcesResponse()
        for uid, refused in answers.items():
            message.claims[uid].SetInParent()
            if refused is not None:
                message.claims[uid].error = refused.reason
        return serialize(message)

    def _claims(self, kind: Any, data: bytes) -> tuple[ClaimName, ...]:
        if len(data) > MAX_BYTES:
            raise MalformedError(f"the {kind.DESCRIPTOR.name} is too long ({len(data)} bytes). Allowed: {MAX_BYTES}")
        message = parse(kind, data, self.registered_as)
        if len(message.claims) > MAX_CLAIMS:
            raise MalformedError(f"too many claims in a request. Allowed: {MAX_CLAIMS}")
        return tuple(_named(ClaimName(claim.namespace, claim.name, claim.uid)) for claim in message.claims)

    def _fill(self, device: Any, prepared: Prepared) -> None:
        device.request_names.extend(prepared.requests)
        device.pool_name, device.device_name = prepared.pool, prepared.device
        device.cdi_device_ids.extend(prepared.cdi_names)
        if prepared.share:
            if not self.carries_share:
                raise UnsayableShareError(
                    f"this kubelet speaks {self.version}, which cannot name the share of {prepared.device}. "
                    "Ask for the whole device in the claim, or use kubelet 1.34 or later"
                )
            device.share_id = prepared.share


def _named(claim: ClaimName) -> ClaimName:
    if not (_NAME.fullmatch(claim.namespace) and _NAME.fullmatch(claim.name) and _UID.fullmatch(claim.uid)):
        shown = f"{claim!s:.80} with the UID {claim.uid:.80}"
        raise MalformedError(f"not a claim's namespace, name and UID: {shown!a}. No API server makes such ones")
    return claim


V1: Final = PluginApi("v1", v1_pb2, carries_share=True)
V1BETA1: Final = PluginApi("v1beta1", v1beta1_pb2, carries_share=False)
APIS: Final = (V1, V1BETA1)
"""The versions, newest first."""
