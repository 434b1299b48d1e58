"""What a person sees of a run: progress and profiles. Plain lines say the same as bars."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from kernelbake import terminal

if TYPE_CHECKING:
    from dflash.profiling import Profile
    from dflash.trainer import StepReport

_PLAIN_INTERVAL_S = 2.0


@contextlib.contextmanager
def doing(what: str) -> Iterator[None]:
    """Says what is being done, and how long it took."""
    begin = time.monotonic()
    if terminal.draws():
        with terminal.console().status(what):
            yield
    else:
        terminal.note(f"{what} …")
        yield
    terminal.note(f"{what}: {time.monotonic() - begin:.1f} s")


@contextlib.contextmanager
def _bar(description: str) -> Iterator[Any]:
    """A rich progress bar on a terminal, None elsewhere."""
    if not terminal.draws():
        yield None
        return
    with terminal.bars(description, bar_width=24) as bar:
        bar.add_task(description, total=None, message="")
        yield bar


@contextlib.contextmanager
def evaluating() -> Iterator[Callable[[int, int], None]]:
    """A callback ``(prompts answered, prompts in all)`` for an evaluation."""
    last = [0.0]
    with _bar("prompts") as bar:

        def show(done: int, total: int) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total)
            elif time.monotonic() - last[0] > _PLAIN_INTERVAL_S:
                last[0] = time.monotonic()
                terminal.note(f"prompts {done}/{total}")

        yield show


@contextlib.contextmanager
def planning() -> Iterator[Callable[[int, int, str], None]]:
    """A callback ``(cases done, cases in all, message)`` for the preflight."""
    last = [0.0]
    with _bar("preflight") as bar:

        def show(done: int, total: int, message: str) -> None:
            if bar is not None:
                bar.update(bar.task_ids[0], completed=done, total=total or None, message=message)
            elif time.monotonic() - last[0] > _PLAIN_INTERVAL_S:
                last[0] = time.monotonic()
                terminal.note(f"preflight {done}/{total}: {message}" if total else f"preflight: {message}")

        yield show


@contextlib.contextmanager
def training(steps: int, log: str) -> Iterator[Callable[[StepReport], None]]:
    """A callback for the reports of steps.

    Without a bar, lines keep a distance in time; the first step and the last one that was made always have one.

    Args:
        steps: of the whole run.
        log: where all steps are, for people.
    """
    last, told = 0.0, False
    skipped: StepReport | None = None

    def tell(report: StepReport) -> None:
        terminal.note(f"step {report.step}/{steps}  {_step(report)}")

    def show(report: StepReport) -> None:
        nonlocal last, skipped, told
        if bar is not None:
            bar.update(bar.task_ids[0], completed=report.step, total=steps, message=_step(report))
        elif not last or report.step == steps or time.monotonic() - last > _PLAIN_INTERVAL_S:
            last, skipped = time.monotonic(), None
            tell(report)
        else:
            skipped = report
            if not told:
                terminal.note(
                    f"steps are shown here every {_PLAIN_INTERVAL_S:g} s, and the last one; all are in `{log}`"
                )
                told = True

    with _bar("train") as bar:
        try:
            yield show
        finally:
            if skipped is not None:
                tell(skipped)


def profile(found: Profile) -> None:
    """A table of each pair: where the time of a step goes."""
    from rich.table import Table

    for pair in found.pairs:
        title = f"pair {pair.pair}: a step takes {found.step_ms:.1f} ms (mean of {pair.steps} after the first)"
        table = Table("part", title=title, title_justify="left")
        for name in ("device ms", "of the step", "host ms"):
            table.add_column(name, justify="right")
        rows: list[tuple[str, float | None, float | None]] = [
            *((part, device, host) for part, (device, host) in pair.parts.items()),
            ("device without work", pair.idle_ms, None),
            ("wait for batches", None, found.data_ms),
            ("everything else", None, found.rest_ms),
        ]
        for part, device, host in rows:
            share = f"{device / max(found.step_ms, 1e-9):.1%}" if device is not None else ""
            table.add_row(part, _ms(device), share, _ms(host))
        terminal.console().print(table)


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _step(report: StepReport) -> str:
    scores = report.scores
    parts = [
        f"loss {report.loss:.4f}",
        f"accuracy {scores.accuracy:.3f}",
        f"acceptance {scores.acceptance_length:.2f}",
        f"lr {report.lr:.2e}",
        f"{report.num_tokens / max(report.seconds, 1e-9):,.0f} tokens/s",
    ]
    if report.peak_bytes is not None:
        parts.append(f"peak {report.peak_bytes / 2**30:.1f} GiB")
    return "  ".join(parts)
