"""How a person watches the demo: a live picture in a terminal, plain lines anywhere else.

The live picture needs rich, which is in no daemon's environment; whoever hasn't got it reads lines. Both show the same
scenes and sentences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Final

from devices.model import Health

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from gateway_lab.demo.run import Scene, Show
    from gateway_lab.demo.story import Look, Verdict

_SENTENCES: Final = 6
_PROBLEMS: Final = 8
_COLOURS: Final = ("cyan", "magenta", "yellow", "blue", "green", "bright_red")
_WIDE: Final = 90
"""Columns from which device IDs and NUMA nodes fit beside the rest."""


LIVE_PACE: Final = 0.8
"""Seconds between two steps that let a person see what changed."""


def choose() -> tuple[AbstractContextManager[Show], float]:
    """Give how to show the demo on standard output, and the pace (seconds a step) that fits it.

    Live where it is a terminal that can draw and rich is there; lines otherwise.
    """
    try:
        from rich.console import Console  # noqa: PLC0415  rich is in an extra of its own
    except ImportError:
        return lines(), 0
    console = Console()
    return (live(console), LIVE_PACE) if console.is_terminal and not console.is_dumb_terminal else (lines(), 0)


@contextmanager
def silent() -> Iterator[Show]:
    """Show nothing."""
    yield lambda _scene, _sentence: None


@contextmanager
def lines() -> Iterator[Show]:
    """Show each sentence as a line, and the verdict at the end."""

    def show(scene: Scene, sentence: str) -> None:
        if sentence:
            print(f"  {sentence}" if sentence.startswith("pod ") else sentence, flush=True)
        if scene.verdict is not None:
            print(*_ending(scene), sep="\n", flush=True)

    yield show


@contextmanager
def live(console: Console) -> Iterator[Show]:
    """Show one picture of the node that changes in place."""
    from rich.live import Live  # noqa: PLC0415  see choose()

    said: deque[str] = deque(maxlen=_SENTENCES)
    with Live(console=console, auto_refresh=False) as picture:

        def show(scene: Scene, sentence: str) -> None:
            if sentence:
                said.append(sentence)
            picture.update(render(scene, tuple(said), console.width), refresh=True)

        yield show


def _ending(scene: Scene) -> Iterator[str]:
    assert scene.verdict is not None
    hops = [(look, look.gap.gap_ms) for look in scene.looks if look.gap is not None]
    if hops:
        yield ""
        yield f"{'kubelet':<18} {'API':<9} GPUs are back after"
        for look, gap_ms in hops:
            yield f"{look.kubelet:<6} {look.kind:<11} {look.api:<9} {gap_ms:.1f} ms"
    yield ""
    yield scene.verdict.sentence
    yield from (f"  {problem}" for problem in _problems(scene.verdict))


def _problems(verdict: Verdict) -> list[str]:
    """As many problems as a person wants to read."""
    more = len(verdict.problems) - _PROBLEMS
    return [*verdict.problems[:_PROBLEMS], *([f"and {more} more: --json has them all"] if more > 0 else [])]


def render(scene: Scene, said: tuple[str, ...], width: int) -> RenderableType:
    """Draw one scene for a terminal of ``width`` columns."""
    from rich.console import Group  # noqa: PLC0415  see choose()
    from rich.panel import Panel  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    parts: list[RenderableType] = [_heading(scene), _timeline(scene), Text(), _table(scene, width), Text()]
    if scene.verdict is None:
        parts += [Text(f"{'▸' if one is said[-1] else ' '} {one}", "" if one is said[-1] else "dim") for one in said]
    else:
        colour = "green" if scene.verdict.passed else "red"
        text = "\n".join([scene.verdict.sentence, *(f"• {problem}" for problem in _problems(scene.verdict))])
        parts.append(Panel(Text(text), border_style=colour, style=f"bold {colour}"))
    return Group(*parts)


def _heading(scene: Scene) -> RenderableType:
    from rich.text import Text  # noqa: PLC0415  see choose()

    if not scene.kubelet:
        return Text("waiting for the first kubelet", "dim")
    speaks = Text.assemble(
        ("kubelet ", "bold"),
        (scene.kubelet, "bold cyan"),
        (f" ({scene.kind})", "dim"),
        "  speaks ",
        (scene.api or "…", "bold green" if scene.api else "dim"),
    )
    full = scene.allocatable == len(scene.gpus)
    count = Text.assemble(
        "  allocatable ",
        ("■" * scene.allocatable, "green" if full else "yellow"),
        ("□" * (len(scene.gpus) - scene.allocatable), "dim"),
        f" {scene.allocatable} of {scene.capacity}",
    )
    return speaks + count


def _timeline(scene: Scene) -> RenderableType:
    """Draw the kubelets so far with API and gap, and dimly those to come."""
    from rich.text import Text  # noqa: PLC0415  see choose()

    def mark(look: Look) -> Text:
        gap = "never back" if look.gap is None else f"{look.gap.gap_ms:.0f} ms"
        style = "red" if look.trouble else "green"
        return Text.assemble((look.kubelet, f"bold {style}"), (f" {look.api} {gap}".replace("  ", " "), style))

    past = [mark(look) for look in scene.looks if look.hop]
    future = [Text(version, "dim") for version in scene.upcoming]
    return Text(" → ").join([*past, *future])


def _table(scene: Scene, width: int) -> RenderableType:
    from rich import box  # noqa: PLC0415  see choose()
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    wide = width >= _WIDE
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("GPU", justify="right")
    if wide:
        table.add_column("NUMA", justify="right")
        table.add_column("device ID", style="dim", no_wrap=True)
    table.add_column("health")
    table.add_column("pod", min_width=14)
    # A pod keeps its colour when it is created anew under the next number.
    families = sorted({pod.rpartition("-")[0] for look in scene.looks for one in look.held for pod in [one.pod]})
    for gpu in scene.gpus:
        pod = scene.holders.get(gpu.uuid, "")
        family = pod.rpartition("-")[0]
        colour = _COLOURS[families.index(family) % len(_COLOURS)] if family in families else "bold"
        well = gpu.health is Health.HEALTHY
        health = (
            Text("healthy", "green") if well else Text((gpu.trouble.reason if gpu.trouble else "") or "ill", "bold red")
        )
        numa = "" if gpu.numa_node is None else str(gpu.numa_node)
        middle = [numa, gpu.uuid] if wide else []
        table.add_row(str(gpu.index), *middle, health, Text(f"■ {pod}", colour) if pod else Text("·", "dim"))
    return table
