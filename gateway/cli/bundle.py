"""``gateway support-bundle``: collect what a node knows of its gateways in one archive, without secrets."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import click
import msgspec

from devices.files import NotPlainError, read_plain
from gateway.cli import advice, common, run
from gateway.cli.doctor import below, seen
from gateway.configuration.settings import ConfigError
from gateway.doctor import checks
from gateway.doctor.snapshot import NodeFacts
from gateway.kubelet.identity import CHECKPOINT
from gateway.telling import status

_EXAMPLES = """
\b
Examples:
  gateway support-bundle
  gateway support-bundle --output - | ssh desk 'cat > bundle.tar.gz'
  gateway support-bundle --with-names             names of pods as they are

In a pod, add its log: kubectl logs POD.
"""

_MOST: Final = 16 * 1024 * 1024
"""Bytes of a member."""
_MOST_LOG: Final = 2 * 1024 * 1024
"""Bytes of the end of a log."""
_MOST_LOGS: Final = 8
_UNIT: Final = "device-plugin-gateway@*"
_SECRET: Final = re.compile(r"token|secret|password|passwd|credential|api_?key|kubeconfig", re.IGNORECASE)
_OURS: Final = re.compile(r"GATEWAY_|NVIDIA_|CUDA_|DP_|[A-Z_]*CONFIG[A-Z_]*$|[A-Z_]*STRATEGY$|NODE_NAME$")
_JWT: Final = re.compile(r"eyJ[0-9A-Za-z_-]{8,}\.[0-9A-Za-z_-]+\.[0-9A-Za-z_-]+")
_BEARER: Final = re.compile(r"(?i)(bearer )[^\s\"']+")


@click.command("support-bundle", cls=run.Settled, epilog=_EXAMPLES)
@common.state_dir
@common.host_root
@click.option(
    "--output", metavar="FILE", help="Where to write it; -: to standard output.  [default: a name with the time]"
)
@click.option("--with-names", is_flag=True, help="Leave the names of the node, of namespaces and of pods as they are.")
@click.pass_context
def bundle(
    ctx: click.Context, /, *, state_dir: Path, host_root: Path, output: str | None, with_names: bool, **_: Any
) -> None:
    """Collect what is known of this node's gateways in one archive: status, doctor, settings, records, logs, versions.

    Tokens and whatever looks like a secret are left out. Names of the node, of namespaces, pods and containers are replaced, each
    by the same word throughout.
    """
    found = seen(ctx, state_dir, host_root)
    names = {} if with_names else _names(found, _file(below(host_root, state_dir) / "ledger.json"))
    name = output or f"gateway-support-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}.tar.gz"
    folder = "gateway-support" if name == "-" else Path(name).name.partition(".")[0]
    try:
        with click.open_file(name, "wb") as file, tarfile.open(fileobj=file, mode="w:gz") as tar:
            for member, content in _members(ctx, found, below(host_root, state_dir), host_root):
                info = tarfile.TarInfo(f"{folder}/{member}")
                clean = redacted(content, names)
                info.size, info.mode, info.mtime = len(clean), 0o600, int(time.time())
                tar.addfile(info, io.BytesIO(clean))
            packed = sorted(member.rpartition("/")[2] for member in tar.getnames())
    except OSError as error:
        raise click.ClickException(
            f"the archive can't be written to {name} ({error.strerror}): name another file with --output; - is standard output"
        ) from error
    click.echo(f"{name}: {', '.join(packed)}", err=True)


def redacted(content: bytes, names: Mapping[str, str]) -> bytes:
    """Return the text without secrets, and with each name replaced by a word."""
    text = content.decode(errors="replace")
    text = _BEARER.sub(r"\1REDACTED", _JWT.sub("REDACTED", text))
    if names:
        wanted = sorted(names, key=len, reverse=True)
        pattern = "|".join(rf"(?<![\w.-]){re.escape(name)}(?![\w.-])" for name in wanted)
        text = re.sub(pattern, lambda match: names[match[0]], text)
    return text.encode()


def _members(ctx: click.Context, found: NodeFacts, state_dir: Path, host_root: Path) -> Iterator[tuple[str, bytes]]:
    yield "status.json", _json({"gateways": found.statuses, "silent": found.unreachable})
    yield "doctor.json", _json(list(checks.judged(found)))
    yield "snapshot.json", _json(found)
    yield "settings.json", _json(_settings(ctx))
    yield "versions.json", _json([one.build for one in found.statuses] or [status.build()])
    yield "environment.json", _json(_environment())
    if found.release is not None:
        facts = advice.load()
        kubelets = [bug for bug in facts.bugs if found.release.minor and bug.hits(advice.Kubelet(found.release.minor))]
        yield "kubelet-bugs.json", _json({"release": found.release, "newest patch release": kubelets})
    for name, path in (
        ("state.json", state_dir / "ledger.json"),
        ("kubelet-checkpoint.json", Path(found.socket_dir.path) / CHECKPOINT),
    ):
        if content := _file(path):
            yield name, _without_answers(content)
    yield from _logs(host_root)


def _settings(ctx: click.Context) -> Any:
    try:
        return [
            setting if not _SECRET.search(setting.name) else {"name": setting.name, "value": "REDACTED"}
            for setting in run.effective_settings(ctx)
        ]
    except ConfigError as error:
        return {"error": str(error)}


def _environment() -> dict[str, str]:
    return {
        name: "REDACTED" if _SECRET.search(name) else value
        for name, value in sorted(os.environ.items())
        if _OURS.match(name)
    }


def _without_answers(content: bytes) -> bytes:
    """Leave the responses to containers out of a checkpoint: they are long, and a plugin may put secrets into them."""
    try:
        found = json.loads(content)
    except (ValueError, RecursionError):
        return content
    entries = found.get("Data", found).get("PodDeviceEntries") if isinstance(found, dict) else None
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict):
            entry.pop("AllocResp", None)
    return _json(found)


def _logs(host_root: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the ends of the gateways' logs that the host has."""
    pods = host_root / "var/log/pods"
    files = sorted(pods.glob("*device-plugin-gateway*/gateway/*.log")) if pods.is_dir() else []
    for path in files[-_MOST_LOGS:]:
        if content := _end(path):
            yield f"log-{path.parent.parent.name}-{path.name}", content
    if host_root == Path("/"):
        try:
            done = subprocess.run(
                ["journalctl", "--no-pager", "--output=cat", "--lines=5000", f"--unit={_UNIT}"],
                check=False,
                capture_output=True,
                timeout=10,
            )
        except (OSError, subprocess.TimeoutExpired):
            return
        if done.returncode == 0 and done.stdout.strip():
            yield "log-service.log", done.stdout[-_MOST_LOG:]


def _end(path: Path) -> bytes:
    if not path.is_file():  # A pipe would be waited for.
        return b""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _MOST_LOG))
            return file.read(_MOST_LOG)
    except OSError:
        return b""


def _file(path: Path) -> bytes:
    try:
        return read_plain(path, _MOST)[:_MOST]
    except (OSError, NotPlainError):
        return b""


def _names(found: NodeFacts, state: bytes) -> dict[str, str]:
    """Return a word for each name of the node, of namespaces, pods and containers in the gateways' status and state."""
    text = _json(found.statuses).decode() + state.decode(errors="replace")
    name = r"[a-z0-9][a-z0-9.-]*"
    names = {os.uname().nodename: "node", os.environ.get("NODE_NAME", ""): "node"}
    for holder in set(re.findall(rf"[\"']({name}/{name}/{name})[\"']", text)):
        namespace, pod, container = holder.split("/")
        names[holder] = f"{_word('ns', namespace)}/{_word('pod', pod)}/{_word('c', container)}"
        names[f"{namespace}/{pod}"] = f"{_word('ns', namespace)}/{_word('pod', pod)}"
        names[pod] = _word("pod", pod)
    names.pop("", None)
    return names


def _word(kind: str, name: str) -> str:
    from hashlib import sha256

    return f"{kind}-{sha256(name.encode()).hexdigest()[:8]}"


def _json(content: Any) -> bytes:
    return msgspec.json.format(msgspec.json.encode(content, enc_hook=_plain), indent=1) + b"\n"


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
