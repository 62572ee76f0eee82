"""Draws a recorded run of the demo as an animated picture: `python docs/demo.py`.

The run is docs/pictures/demo.txt, what `eventpump demo --plain > docs/pictures/demo.txt` prints; the picture is
docs/pictures/demo.svg. The same recording gives the same bytes; `tests/test_documents.py` fails if the picture in the
repository is not what this script draws.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

FOLDER: Final = Path(__file__).parent / "pictures"
RECORDING: Final = FOLDER / "demo.txt"
PICTURE: Final = FOLDER / "demo.svg"

_WIDTH: Final = 860
_LEFT: Final = 100
_RIGHT: Final = 24
_TOP: Final = 74
_ROW: Final = 26
_SECONDS, _HELD = 12, 6
"""How long the run is shown in, whatever it took, and how long its end stands still, before it and at the very start:
what does not move, such as a screenshot or a printer, shows the first frame, and that is the whole run."""

_STILL: Final = round(100 * _HELD / (_SECONDS + _HELD), 2)

_STYLE: Final = f"""
  text {{ font: 13px "Segoe UI", "Helvetica Neue", Arial, "DejaVu Sans", sans-serif; fill: #1f2328; }}
  .title {{ font-weight: 600; font-size: 15px; }}
  .small {{ font-size: 11px; fill: #59636e; }}
  .owner {{ font-size: 11px; fill: #ffffff; font-weight: 600; }}
  .page {{ fill: #ffffff; stroke: #d1d9e0; }}
  .none {{ fill: #eff1f3; stroke: #818b98; stroke-dasharray: 3 3; }}
  .host-1 {{ fill: #0969da; }}
  .host-2 {{ fill: #bc4c00; }}
  .host-3 {{ fill: #1a7f37; }}
  .host-4 {{ fill: #8250df; }}
  .event {{ stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 4 3; }}
  .reveal {{ transform-origin: {_LEFT}px 0; animation: reveal {_SECONDS + _HELD}s linear infinite; }}
  @keyframes reveal {{
    0%, {_STILL:g}% {{ transform: scaleX(1); }}
    {_STILL + 0.01:g}% {{ transform: scaleX(0); }}
    100% {{ transform: scaleX(1); }}
  }}
  @media (prefers-reduced-motion: reduce) {{ .reveal {{ animation: none; }} }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #f0f6fc; }}
    .small {{ fill: #9198a1; }}
    .page {{ fill: #0d1117; stroke: #3d444d; }}
    .none {{ fill: #262c36; }}
    .event {{ stroke: #f0f6fc; }}
  }}
"""


class Moment(NamedTuple):
    """A line of the table: who owned each partition."""

    time: float
    owners: Sequence[str]


class Recording(NamedTuple):
    """A run of the demo.

    Attributes:
        moments: In order of time, from the first published event on.
        story: What happened, and when.
        figures: What the demo counted at its end, by name.
        verdict: The last line.
    """

    moments: Sequence[Moment]
    story: Sequence[tuple[float, str]]
    figures: dict[str, str]
    verdict: str

    @classmethod
    def parse(cls, text: str) -> Recording:
        """Read what `eventpump demo --plain` printed."""
        moments: list[Moment] = []
        story = []
        for line in text.splitlines():
            found = re.match(r" *([\d.]+)  (.*)", line)
            if found is None:
                continue
            time, what = float(found[1]), found[2]
            owners = re.findall(r"\b\d+:(\S+)", what)
            if not owners:
                story.append((time, what))
                if moments and (killed := re.match(r"(\S+) was killed", what)):
                    # The next line of the table may be seconds later.
                    left = ["none" if each == killed[1] else each for each in moments[-1].owners]
                    moments.append(Moment(time, left))
            elif not what.startswith("published 0 "):
                moments.append(Moment(time, [each if each.startswith("host") else "none" for each in owners]))
        figures = dict(re.findall(r"^([a-z ]+): (.+)$", text, re.M))
        return cls(moments, story, figures, text.strip().splitlines()[-1])


def _spans(recording: Recording, partition: int) -> Iterator[tuple[float, float, str]]:
    """Yield from when to when a partition had an owner."""
    begin, owner = recording.moments[0].time, recording.moments[0].owners[partition]
    for moment in recording.moments:
        if moment.owners[partition] != owner:
            yield begin, moment.time, owner
            begin, owner = moment.time, moment.owners[partition]
    yield begin, recording.moments[-1].time, owner


def draw(recording: Recording) -> str:
    """Return the picture: a row per partition, time from left to right, colors for the owners."""
    first, last = recording.moments[0].time, recording.moments[-1].time
    count = len(recording.moments[0].owners)
    bottom = _TOP + count * _ROW
    height = bottom + 78

    def at(time: float) -> float:
        return round(_LEFT + (time - first) / (last - first) * (_WIDTH - _LEFT - _RIGHT), 1)

    size = f'width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}"'
    seen = f'<rect class="reveal" x="{_LEFT}" y="0" width="{_WIDTH - _LEFT}" height="{height}"/>'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">',
        f"<title>A run of eventpump demo: {escape(recording.verdict)}</title>",
        f"<style>{_STYLE}</style>",
        f'<rect class="page" x="0.5" y="0.5" width="{_WIDTH - 1}" height="{height - 1}" rx="8"/>',
        '<text class="title" x="24" y="30">eventpump demo: which host owns which partition</text>',
        f'<clipPath id="seen">{seen}</clipPath>',
    ]
    parts += [f'<text x="24" y="{_TOP + n * _ROW + 17}">partition {n}</text>' for n in range(count)]
    parts.append('<g clip-path="url(#seen)">')
    for time, text in recording.story:
        label = re.match(r"\S+ (was killed \(SIGKILL\)|joins)", text)
        if label is not None and first < time < last:
            parts.append(f'<path class="event" d="M{at(time):g} {_TOP - 12} V{bottom + 6}"/>')
            parts.append(f'<text x="{at(time):g}" y="{_TOP - 18}" text-anchor="middle">{escape(label[0])}</text>')
    for partition in range(count):
        y = _TOP + partition * _ROW
        for begin, end, owner in _spans(recording, partition):
            x, width = at(begin), round(at(end) - at(begin), 1)
            parts.append(f'<rect class="{owner}" x="{x:g}" y="{y + 3}" width="{width:g}" height="{_ROW - 6}" rx="4"/>')
            if width > 48 and owner != "none":
                parts.append(f'<text class="owner" x="{x + 6:g}" y="{y + 17}">{owner}</text>')
    parts.append("</g>")
    figures = ("published", "processed", "lost", "duplicates", "time to take over")
    summary = " · ".join(f"{name} {recording.figures[name]}" for name in figures if name in recording.figures)
    parts += [
        f'<text x="{_LEFT}" y="{bottom + 24}" class="small">0 s</text>',
        f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 24}" class="small" text-anchor="end">{last - first:.0f} s</text>',
        f'<text x="24" y="{bottom + 44}">{escape(recording.verdict)}</text>',
        f'<text x="24" y="{bottom + 63}" class="small">{escape(summary)}</text>',
        "</svg>\n",
    ]
    return "\n".join(parts)


def main() -> None:
    """Write the picture."""
    picture = draw(Recording.parse(RECORDING.read_text(encoding="utf-8")))
    PICTURE.write_text(picture, encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
