"""Render deploy/kustomize into deploy/manifests, and judge each by the API schemas of the Kubernetes versions it is for.

What is rendered is committed, so that `kubectl apply -f` is enough to install, with a kubectl of any age, and so that a review
sees what a cluster gets. The schemas are those that Kubernetes publishes with its sources (api/openapi-spec/swagger.json); they
are taken by the letter: a field that a version doesn't know is an error, where its API server would drop it in silence.
`.ci/manifests` brings kustomize and the schemas.
"""

from __future__ import annotations

import argparse
import difflib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import fastjsonschema
import yaml

ROOT: Final = Path(__file__).resolve().parents[1]
OVERLAYS: Final = ROOT / "deploy" / "kustomize" / "overlays"
RENDERED: Final = ROOT / "deploy" / "manifests"

CURRENT: Final = ("1.25", "1.32", "1.37")
"""With 1.25 maxSurge stopped being a beta."""
LEGACY: Final = ("1.9", "1.10", "1.18", "1.24")
"""apps/v1 came with 1.9. Between these versions nothing changed that the manifests say."""
FIRST: Final = "1.8"
"""Has all that the legacy ones say, under the name apps/v1beta2."""

_HEAD: Final = "# Rendered from deploy/kustomize/overlays/{overlay} by `make manifests`. Do not edit it.\n"
_INT_OR_STRING: Final = {"type": ["integer", "string"]}


@dataclass(frozen=True, slots=True)
class Manifest:
    """A file of deploy/manifests: where it comes from, and which control planes it is for."""

    overlay: str
    versions: tuple[str, ...]

    @property
    def path(self) -> Path:
        """Where it lies."""
        return RENDERED / f"{self.overlay.replace('/', '-')}.yaml"


MANIFESTS: Final = (
    Manifest("nvidia", CURRENT),
    Manifest("nvidia-cdi", CURRENT),
    Manifest("amd", CURRENT),
    Manifest("simulated", CURRENT),
    Manifest("legacy/nvidia", LEGACY),
    Manifest("legacy/amd", LEGACY),
    Manifest("legacy/simulated", LEGACY),
)


def strict(swagger: Mapping[str, Any], document: Mapping[str, Any]) -> Callable[[Any], object]:
    """Make a judge of documents of this one's kind, which raises fastjsonschema.JsonSchemaException for a bad one.

    Raises:
        LookupError: this version of Kubernetes has no such kind.
    """
    group, _, version = str(document["apiVersion"]).rpartition("/")
    wanted = {"group": group, "version": version, "kind": document["kind"]}
    for name, definition in swagger["definitions"].items():
        if wanted in definition.get("x-kubernetes-group-version-kind", ()):
            definitions = {key: _closed(value) for key, value in swagger["definitions"].items()}
            schema = {"$ref": f"#/definitions/{name}", "definitions": definitions}
            judge: Callable[[Any], object] = fastjsonschema.compile(schema, use_default=False)
            return judge
    raise LookupError(f"expected the kind {document['kind']} in {document['apiVersion']}, and there is none")


def problems(text: str, swagger: Mapping[str, Any]) -> Iterator[str]:
    """Say what is wrong with each document of a manifest."""
    for document in yaml.safe_load_all(text):
        name = f"{document['kind']} {document['metadata']['name']}"
        try:
            strict(swagger, document)(document)
        except (LookupError, fastjsonschema.JsonSchemaException) as error:
            yield f"{name}: {error}"


def _closed(definition: Mapping[str, Any]) -> Any:
    """Take a definition by the letter: its properties are all there are, and nothing beside its shape is read."""
    if definition.get("format") == "int-or-string":
        return _INT_OR_STRING
    closed: dict[str, Any] = {}
    for key, value in definition.items():
        if key == "properties":
            closed[key] = {name: _closed(inner) for name, inner in value.items()}
            closed.setdefault("additionalProperties", False)
        elif key in {"items", "additionalProperties"} and isinstance(value, dict):
            closed[key] = _closed(value)
        elif key in {"$ref", "type", "required", "enum", "items", "additionalProperties"}:
            closed[key] = value
    return closed


def _render(kustomize: Path, overlay: str) -> str:
    done = subprocess.run(
        [kustomize, "build", OVERLAYS / overlay], check=False, capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        sys.exit(f"expected kustomize to build the overlay {overlay}, but: {done.stderr.strip()}")
    return _HEAD.format(overlay=overlay) + done.stdout


def main() -> None:
    """Render, then compare or write, then judge; SystemExit 1 where something isn't as it should be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--versions", action="store_true", help="only print the Kubernetes versions that are looked at")
    parser.add_argument("--write", action="store_true", help="write deploy/manifests instead of comparing")
    parser.add_argument("--kustomize", type=Path, metavar="PROGRAM")
    parser.add_argument("--schemas", type=Path, metavar="FOLDER", help="where 1.25.json and its like are")
    options = parser.parse_args()
    if options.versions:
        print(FIRST, *LEGACY, *CURRENT)
        return
    wrong = []
    swaggers = {
        version: json.loads((options.schemas / f"{version}.json").read_text()) for version in (FIRST, *LEGACY, *CURRENT)
    }
    for manifest in MANIFESTS:
        text = _render(options.kustomize, manifest.overlay)
        wrong += _kept(manifest.path, text, write=options.write)
        tried = dict.fromkeys(manifest.versions, text)
        if manifest.versions is LEGACY:
            tried[FIRST] = text.replace("apiVersion: apps/v1\n", "apiVersion: apps/v1beta2\n")
        for version, said in tried.items():
            wrong += [
                f"{manifest.overlay}, Kubernetes {version}: {problem}" for problem in problems(said, swaggers[version])
            ]
        print(f"manifests: {manifest.overlay}: judged by {', '.join(tried)}", flush=True)
    if wrong:
        sys.exit("\n".join(wrong))
    print("manifests: ok")


def _kept(path: Path, text: str, *, write: bool) -> list[str]:
    """Write a file, or say how it differs from what it should be."""
    there = path.read_text(encoding="utf-8") if path.exists() else ""
    if there == text:
        return []
    if write:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return []
    name = path.relative_to(ROOT).as_posix()
    difference = difflib.unified_diff(there.splitlines(), text.splitlines(), name, "as rendered", lineterm="", n=1)
    return [f"{name} is not what its overlay says: run `make manifests` and commit it", *difference]


if __name__ == "__main__":
    main()
