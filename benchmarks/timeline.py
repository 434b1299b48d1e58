"""Who worked when: spans of pairs on their devices, how much of them is at the same time, and a picture of it (SVG)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from xml.sax.saxutils import escape

TARGET = "target"
WAITING = "exchange of gradients"
FIRST, LAST = "drafter", "optimizer"
"""The drafter's parts between which a step's work on its device lies."""

COLOURS = {
    TARGET: "#4878a8",
    "drafter": "#e49444",
    "head and loss": "#d1615d",
    "backward pass": "#85b6b2",
    WAITING: "#bbbbbb",
    "optimizer": "#6a9f58",
}
_WIDTH, _LEFT, _TOP, _ROW, _BAR = 1400, 190, 70, 30, 22

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Span:
    """A part of a step at work on a device.

    Args:
        pair: its number.
        device: its name.
        part: as the trainer names it.
        begin, end: in ms since a moment that is the same on all devices.
    """

    pair: int
    device: str
    part: str
    begin: float
    end: float


def merged(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as intervals that do not touch, ascending."""
    found: list[Interval] = []
    for begin, end in sorted(intervals):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        elif end > begin:
            found.append((begin, end))
    return found


def length(intervals: Iterable[Interval]) -> float:
    """Of all of them together, what lies in several counted once."""
    return sum(end - begin for begin, end in merged(intervals))


def both(one: Iterable[Interval], other: Iterable[Interval]) -> list[Interval]:
    """The moments that lie in both."""
    return merged((max(a, c), min(b, d)) for a, b in merged(one) for c, d in merged(other) if max(a, c) < min(b, d))


def overlap_share(spans: Sequence[Span]) -> float:
    """How much of the shorter of target and drafter work is hidden behind the longer, over all pairs: 0 to 1.

    The first step has no pass before it and the last none behind it: what counts is from the end of the first to the
    beginning of the last. Waiting for the exchange is no work.
    """
    hidden = shorter = 0.0
    for pair in {span.pair for span in spans}:
        own = [span for span in spans if span.pair == pair]
        ends = [span.end for span in own if span.part == LAST]
        begins = [span.begin for span in own if span.part == FIRST]
        if len(ends) < 3:
            raise ValueError(f"timeline: pair {pair} has {len(ends)} steps; wanted at least 3")
        window = [(min(ends), max(begins))]
        target = both(((span.begin, span.end) for span in own if span.part == TARGET), window)
        work = both(((span.begin, span.end) for span in own if span.part not in (TARGET, WAITING)), window)
        hidden += length(both(target, work))
        shorter += min(length(target), length(work))
    return hidden / shorter if shorter else 0.0


def svg(spans: Sequence[Span], title: str) -> str:
    """The picture: a row for each pair's device and kind of work, time from left to right."""
    rows = sorted({_row(span) for span in spans})
    begin, end = min(span.begin for span in spans), max(span.end for span in spans)
    scale = (_WIDTH - _LEFT - 20) / (end - begin)
    bottom = _TOP + _ROW * len(rows)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{bottom + 40}" font-size="12">',
        "<style>text { font-family: sans-serif }</style>",
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(title)}</text>',
    ]
    for place, (part, colour) in enumerate(COLOURS.items()):
        left = _LEFT + 170 * place
        lines.append(f'<rect x="{left}" y="36" width="12" height="12" fill="{colour}"/>')
        lines.append(f'<text x="{left + 17}" y="46">{escape(part)}</text>')
    for place, row in enumerate(rows):
        y = _TOP + _ROW * place
        pair, is_drafter, device = row
        lines.append(
            f'<text x="10" y="{y + 15}">pair {pair}, {"drafter" if is_drafter else TARGET}, {escape(device)}</text>'
        )
        for span in (span for span in spans if _row(span) == row):
            x, width = _LEFT + (span.begin - begin) * scale, max((span.end - span.begin) * scale, 0.3)
            tip = f"{span.part}: {span.begin - begin:.1f} to {span.end - begin:.1f} ms"
            lines.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_BAR}" fill="{COLOURS[span.part]}">'
                f"<title>{escape(tip)}</title></rect>"
            )
    for tick in range(11):
        x = _LEFT + tick * (end - begin) / 10 * scale
        lines.append(f'<line x1="{x:.1f}" y1="{_TOP - 6}" x2="{x:.1f}" y2="{bottom}" stroke="#dddddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{tick * (end - begin) / 10:.0f}</text>')
    lines.append(f'<text x="{_LEFT}" y="{bottom + 34}">ms</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _row(span: Span) -> tuple[int, bool, str]:
    return (span.pair, span.part != TARGET, span.device)
