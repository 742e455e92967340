"""Print docs/dialects.md out of what the dialects declare: ``python -m tools.dialects [--check] [FILE]``.

With FILE it is written there, with --check compared with what is there (exit status 1 where they differ).
"""

from __future__ import annotations

from adapters.dialect import Dialect, Rule, span
from adapters.levels import OPTIONS_FIRST_MINOR
from adapters.registry import DIALECTS
from devices.model import Field
from tools.pages import main, table

INTRODUCTION = """\
<!-- Generated from the adapters' declarations by `make docs`. Do not edit. -->
# What each version of the device plugin API can say

Kubelets have had three versions of the device plugin API. The table shows what the gateway does with each part of a message:

- **lossless**: the kubelet gets it unchanged.
- **degraded**: the gateway leaves it out, because the pod works without it. The gateway counts this, and logs it once.
- **impossible**: the pod would start without its device, so the gateway refuses the request with the reason.
"""

LEVELS = f"""\
## How the kubelet's version is known

A kubelet silently drops fields of `v1beta1` that it doesn't know. So the gateway detects the kubelet's version from its calls:

- During Register, only kubelet 1.{OPTIONS_FIRST_MINOR} and later call GetDevicePluginOptions before ListAndWatch.
- The `user-agent` of a call names the version of grpc-go. `adapters/levels.py` lists which kubelets use which version.

If the two disagree, the gateway uses the older version. If the version stays unknown, the gateway sends a part that this kubelet may drop only together with
another form of it. If a vendor built the kubelet with another grpc-go, set `--kubelet-version`.
"""


def page() -> str:
    """Write the whole page, in Markdown."""
    oldest_first = DIALECTS[::-1]
    parts = [
        INTRODUCTION + "\n",
        *table(
            ("", *(f"`{dialect.name}`" for dialect in oldest_first)),
            [
                ("spoken by kubelet", *(span(dialect.kubelets) for dialect in oldest_first)),
                ("service of the kubelet", *(f"`{dialect.registration_service}`" for dialect in oldest_first)),
                ("service of the plugin", *(f"`{dialect.plugin_service}`" for dialect in oldest_first)),
                ("between two lists or answers to it", *(_spacing(dialect) for dialect in oldest_first)),
                *((field.value, *(_verdict(dialect.rules[field]) for dialect in oldest_first)) for field in Field),
            ],
        ),
        "\n" + LEVELS + "\n",
    ]
    return "".join(parts)


def _spacing(dialect: Dialect) -> str:
    return f"{dialect.spacing * 1000:g} ms" if dialect.spacing else "any time"


def _verdict(rule: Rule) -> str:
    if rule.since is None:
        return rule.verdict.value
    return f"{rule.verdict.value} from 1.{rule.since}; before, {rule.before.value}"


if __name__ == "__main__":
    main(page, __doc__, "the adapters declare")
