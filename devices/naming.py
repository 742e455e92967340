"""Which names a resource may have.

A kubelet's refusal of a name doesn't say which rule it breaks, and later versions are stricter. So names are checked here by
the strictest rule (kubelet 1.11 and later): such a name registers on every kubelet.
"""

from __future__ import annotations

import re
from typing import Final

# The kubelet checks "requests." + name as a qualified name, whose domain has at most 253 characters.
_DOMAIN_CHARS: Final = 253 - len("requests.")
_NAME_CHARS: Final = 63
_LABEL: Final = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_DOMAIN: Final = rf"{_LABEL}(\.{_LABEL})*"
_NAME: Final = r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"


def resource_name_error(name: str) -> str | None:
    """Return why a kubelet since 1.11 would not register ``name``, or None if all would.

    Kubernetes requires of an extended resource a domain, a slash and a name; no ``kubernetes.io/`` domain (reserved), no
    ``requests.`` at the start (used for quotas). The domain is a lower-case DNS name of at most 244 characters. The rest has at
    most 63 letters, digits, ``-``, ``_`` and ``.``, and begins and ends with a letter or digit.
    """
    shown = repr(name) if len(name) <= 2 * _DOMAIN_CHARS else f"{name[:_NAME_CHARS]!r}… ({len(name)} characters)"
    domain, slash, rest = name.partition("/")
    if not slash:
        return f"the resource name {shown} has no domain. Write one before it, such as nvidia.com/gpu"
    if "kubernetes.io/" in name:
        return f"the resource name {shown} has the domain kubernetes.io, which belongs to Kubernetes. Use a domain of your own"
    if name.startswith("requests."):
        return f"the resource name {shown} starts with 'requests.', which quotas use. Use another domain"
    if len(domain) > _DOMAIN_CHARS or not re.fullmatch(_DOMAIN, domain):
        return (
            f"the resource name {shown} has a domain that Kubernetes doesn't allow. Write at most {_DOMAIN_CHARS} lower-case letters, "
            "digits, '-' and '.' before the slash, such as nvidia.com"
        )
    if len(rest) > _NAME_CHARS or not re.fullmatch(_NAME, rest):
        return (
            f"the resource name {shown} is not allowed. After the slash write 1 to {_NAME_CHARS} letters, digits, '-', '_' and '.', "
            "beginning and ending with a letter or digit, such as gpu"
        )
    return None
