"""Writes SVG, and numbers with their sources. The pictures are lists of calls to what is here.

Coordinates are pixels. Colours are classes of the page's style sheet: `f0` fills with colour 0, `s0` draws with it.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

CHARACTER = 0.56
"""The mean width of letters and digits of a sans-serif font, as a share of its size."""
FONT = 12
LEGEND_LEFT, LANES_LEFT, RIGHT = 8.0, 83.2, 14.0
"""Pixels left of a legend, left of lanes (for their names), and right of a plot."""
LANE, MAX_GROUPS = 15, 24
"""Pixels from one lane to the next; groups of lanes in a picture, which of more shows the first."""


def attributes(**values: object) -> str:
    """Return attributes; `class_` is class, `data_from` is data-from; None is left out."""
    texts = []
    for key, value in values.items():
        if value is not None:
            short = f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, (int, float)) else str(value)
            texts.append(f' {key.rstrip("_").replace("_", "-")}="{escape(short)}"')
    return "".join(texts)


def sourced(value: float, shown: str, source: str) -> Markup:
    """Return a number as `shown` to people, with the `value` that `source`, such as `a/drift.json:steps`, has."""
    return Markup('<data value="{}" data-from="{}">{}</data>').format(repr(value), source, shown)


@dataclass(frozen=True)
class PixelScale:
    """Turns values into pixels, linearly."""

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        return self.start + (value - self.low) / span * (self.stop - self.start) if span else self.start

    def __str__(self) -> str:
        return f"{self.low!r} {self.high!r} {self.start!r} {self.stop!r}"

    def ticks(self, spacing: float = 90, base: int = 10) -> list[float]:
        """Return values that are round by a base, 10 or 2, about `spacing` pixels apart."""
        span = self.high - self.low
        if span <= 0:
            return [self.low]
        step = span / max(1, abs(self.stop - self.start) / spacing)
        magnitude = float(base) ** math.floor(math.log(step, base))
        step = magnitude * next(m for m in ((1, 2, 5, 10) if base == 10 else (1, 2)) if m * magnitude >= step * 0.999)
        first = math.ceil(self.low / step - 1e-9)
        return [i * step for i in range(first, math.floor(self.high / step + 1e-9) + 1)]


class Svg:
    """A picture: a legend, below it a plot, and below that an axis where it has one."""

    def __init__(self, width: float, label: str, legend: Sequence[tuple[str, str]], gap: float = 10):
        """`label` is what screen readers say; `legend` has a class and a name for each entry; `gap` are the pixels
        between legend and plot."""
        self.width, self.height = float(width), 0.0
        self._attributes: dict[str, object] = {"role": "img", "aria_label": label}
        self._parts: list[str] = []
        x, line = LEGEND_LEFT, 0
        for class_, name in legend:
            size = 18 + text_width(name) + 14
            if x > LEGEND_LEFT and x + size > self.width:
                x, line = LEGEND_LEFT, line + 1
            self.rect(x, 2 + line * 19, 12, 12, class_)
            self.text(x + 17, 12.5 + line * 19, name, "key")
            x += size
        self.top = 19.0 * (line + 1) + gap
        """Where the plot begins."""

    def axis_x(
        self,
        values: tuple[float, float],
        left: float,
        height: float,
        show: Callable[[float], str],
        title: str,
        right: float = RIGHT,
        base: int = 10,
    ) -> PixelScale:
        """Draw the lower axis of a plot with so many pixels on its left and right; return the scale.

        A tick has a line up to the top of the plot and a text, unless `show` has none for it.
        """
        scale = PixelScale(*values, left, self.width - right)
        bottom = self.top + height
        for value in scale.ticks(base=base):
            if shown := show(value):
                self.line(scale(value), self.top, scale(value), bottom)
                inside = min(scale(value), scale.stop + 12 - text_width(shown) / 2)
                self.text(inside, bottom + 15, shown, "tick", "middle")
        self.line(left, bottom, scale.stop, bottom, "axis")
        self.text((left + scale.stop) / 2, bottom + 31, title, "label", "middle")
        self.height = bottom + 40
        self._attributes["data_x"] = scale
        return scale

    def axis_y(
        self, values: tuple[float, float], left: float, height: float, show: Callable[[float], str], title: str
    ) -> PixelScale:
        """Draw the left axis: a line for each tick, its text, and above it what the axis is; return the scale."""
        scale = PixelScale(*values, self.top + height, self.top)
        for value in scale.ticks(42):
            self.line(left, scale(value), self.width - RIGHT, scale(value))
            self.text(left - 6, scale(value) + 4, show(value), "tick", "end")
        self.text(4, self.top - 12, title, "label")
        self._attributes["data_y"] = scale
        return scale

    def lanes(self, top: float, heading: str, names: Iterable[str]) -> list[float]:
        """Write a heading, and below it the names of lanes; return the top of each lane."""
        tops = []
        self.text(LANES_LEFT, top + 11, clip(heading, self.width - LANES_LEFT - 10), "strong")
        for number, name in enumerate(names):
            tops.append(top + 16 + number * LANE)
            self.text(LANES_LEFT - 6, tops[-1] + 11, name, "tick", "end")
        return tops

    def rect(self, x: float, y: float, width: float, height: float, class_: str, title: str = "", **more) -> None:
        self._add("rect", title=title, x=x, y=y, width=max(0, width), height=height, class_=class_, **more)

    def text(self, x: float, y: float, text: object, class_: str = "", anchor: str | None = None, **more) -> None:
        self._add("text", text, x=x, y=y, class_=class_ or None, text_anchor=anchor, **more)

    def line(self, x1: float, y1: float, x2: float, y2: float, class_: str = "grid") -> None:
        self._add("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)

    def polyline(self, points: Iterable[tuple[float, float]], class_: str, **more) -> None:
        self._add("polyline", points=" ".join(f"{x:.2f},{y:.2f}" for x, y in points), class_=class_, **more)

    def circle(self, x: float, y: float, radius: float, class_: str, title: str = "", **more) -> None:
        self._add("circle", title=title, cx=x, cy=y, r=radius, class_=class_, **more)

    def boxes(self, boxes: Iterable[tuple[float, float]], y: float, height: float, class_: str, **more) -> None:
        """Draw boxes from one x to another, all at one height, as one shape."""
        if path := "".join(f"M{a:.1f} {y:g}h{b - a:.1f}v{height:g}H{a:.1f}z" for a, b in boxes):
            self._add("path", d=path, class_=class_, **more)

    def _add(self, tag: str, text: object = "", title: str = "", **shape: object) -> None:
        shown_on_hover = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(f"<{tag}{attributes(**shape)}>{shown_on_hover}{escape(text)}</{tag}>")

    def __str__(self) -> str:
        size = f'viewBox="0 0 {self.width:g} {self.height:g}" width="{self.width:g}" height="{self.height:g}"'
        return f"<svg {size}{attributes(**self._attributes)}>{''.join(self._parts)}</svg>"

    def __html__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Panel:
    """A picture of one run, or of all, with its title and notes."""

    title: Markup | str
    draw: Callable[[int], Svg | None]
    """Draws it so many pixels wide; None where there is nothing to draw."""
    note: Markup | str = ""
    """Below the picture; or, where there is none, why."""
    rows: Sequence[Sequence[Markup | str]] = ()
    """The rows of the table of axes, its header not included."""


def text_width(text: str, size: float = FONT) -> float:
    """Return about how many pixels a text is wide."""
    return len(text) * CHARACTER * size


def clip(text: str, width: float, size: float = FONT) -> str:
    """Return a text as far as it fits into a width, "" where not even a few letters do."""
    count = int(width / (CHARACTER * size))
    if count >= len(text):
        return text
    return f"{text[: count - 1]}…" if count > 3 else ""


def show_whole(value: float) -> str:
    """Return a whole number; "" for others, which have no place among steps or items."""
    return f"{value:,.0f}" if value == int(value) else ""


def show_seconds(value: float) -> str:
    """Return seconds in the unit that fits."""
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f} s"
    if size >= 1 or not size:
        return f"{value:.3g} s"
    return f"{value * 1e3:.3g} ms" if size >= 1e-3 else f"{value * 1e6:.3g} µs"


def _with_unit(value: float, base: int, units: Sequence[str]) -> str | None:
    """Return a value in the largest of the units that it has one of; these are powers of a base."""
    for power in range(len(units), 0, -1):
        if abs(value) >= base**power:
            number = value / base**power
            return f"{number:.3g} {units[power - 1]}" if number < 1000 else f"{number:,.0f} {units[power - 1]}"
    return None


def show_bytes(value: float) -> str:
    """Return bytes of memory in the unit that fits: KiB, MiB, GiB."""
    return _with_unit(value, 1024, ("KiB", "MiB", "GiB", "TiB")) or f"{value:.0f} B"


def show_traffic(value: float) -> str:
    """Return bytes that were sent in the unit that fits: kB, MB, GB."""
    return _with_unit(value, 1000, ("kB", "MB", "GB", "TB")) or f"{value:.0f} B"


def show_count(value: float) -> str:
    """Return a number with few digits, large ones in thousands and millions."""
    if abs(value) >= 10_000:
        return _with_unit(value, 1000, ("k", "M", "G")) or ""
    return f"{value:,.0f}" if value == int(value) or abs(value) >= 1000 else f"{value:.3g}"


def show_percent(value: float) -> str:
    return f"{value:.1%}" if abs(value) < 0.0995 else f"{value:.0%}"
