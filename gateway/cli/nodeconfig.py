"""Start with the configuration file that the node's label chooses, even if the API server can't be reached."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

import structlog
from msgspec.structs import replace

from gateway.configuration import choice as choosing
from gateway.configuration import file as config
from gateway.configuration.settings import Choice, ConfigError, Settings

if TYPE_CHECKING:
    from gateway.configuration.file import File

PATIENCE: Final = 10.0
"""Seconds for which the API server is asked for the label at the first start, when there is nothing else to go by."""
IMPATIENCE: Final = 1.0
"""The same, where the label of before is known: another one is adopted when the server is there again."""

_log = structlog.get_logger()


def start(settings: Settings, choice: Choice, *, ask: bool = True) -> tuple[Settings, File]:
    """Return the settings with the file that the present label chooses, or else with the last good one.

    Without ``ask`` the API server is asked only if no gateway followed a label here before.

    Raises:
        ConfigError: there is no file to start with, or nobody to ask for the label.
    """
    if not settings.node_name:
        raise ConfigError("CONFIG_FILE_SRCDIR: needs the node's name. Set --node-name, or NODE_NAME from spec.nodeName")
    before = choosing.remembered(choice, settings.state_dir)
    now = _asked(settings, choice, PATIENCE if before is None else IMPATIENCE) if ask or before is None else None
    candidates = [one for one in (now, before) if one is not None] or [""]
    problem: ConfigError | None = None
    for label in dict.fromkeys(candidates):
        try:
            return _settled(settings, choice, label)
        except ConfigError as error:
            problem = problem or error
            _log.error("configuration rejected", label=label, reason=str(error))
    raise choosing.ChoiceError(str(problem))


def _asked(settings: Settings, choice: Choice, seconds: float) -> str | None:
    """Return the label; None if the API server doesn't answer in time."""
    from gateway.kubernetes import access, node

    try:
        return asyncio.run(node.label(settings, choice.label, seconds))
    except access.AccessError as error:
        raise ConfigError(f"CONFIG_FILE_SRCDIR: needs the API server: {error}") from error
    except node.KubernetesError as error:
        advice = "the configuration of before counts, else that of a node without the label, until the server answers"
        _log.warning("the node's label isn't known", reason=str(error), advice=advice)
        return None


def _settled(settings: Settings, choice: Choice, label: str) -> tuple[Settings, File]:
    path = choosing.locate(choice, label)
    content = b"" if path is None else config.read(path)
    read = config.parse(content, str(path), strict=settings.strict_config)
    policy = config.policy(read, settings.given, settings.backend)
    for warning in read.warnings:
        _log.warning("configuration", note=warning)
    _log.info("configuration chosen", label=f"{choice.label}={label}", file=str(path or "none: the empty one"))
    found = replace(settings, policy=policy, config_file=path or choice.folder, choice=choice, node_label=label)
    return found, read
