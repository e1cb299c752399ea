#!/usr/bin/env python3
"""Draws what `cargo run --release --example bench -- --json` measured: verify.svg, decode.svg and prefill.svg.

    python3 docs/plots/plot.py docs/plots/bench.json [results.json of benches/peers]

The figures follow the reader's choice of a light or dark background.
"""

import argparse
import json
import math
from html import escape
from pathlib import Path

WIDTH, HEIGHT = 720, 400
LEFT, RIGHT, TOP, BOTTOM = 64, 24, 76, 56

# Each class in a light and in a dark surrounding.
COLOURS = {
    "ground": ("fill", "#ffffff", "#0d1117"),
    "title": ("fill", "#1f2328", "#f0f6fc"),
    "text": ("fill", "#59636e", "#9198a1"),
    "grid": ("stroke", "#d8dee4", "#2a313c"),
    "bf16": ("color", "#0969da", "#4493f8"),
    "int8": ("color", "#bc4c00", "#f0883e"),
    "int4": ("color", "#1a7f37", "#3fb950"),
    "other": ("color", "#59636e", "#9198a1"),
}
SHAPES = """
text { font: 13px system-ui, -apple-system, 'Segoe UI', sans-serif; }
.title { font-size: 16px; font-weight: 600; }
.small { font-size: 11px; }
.grid { stroke-width: 1; }
.line { fill: none; stroke: currentColor; stroke-width: 2; }
.dashed { stroke-dasharray: 6 4; }
.ours { fill: currentColor; stroke: currentColor; }
.theirs { fill: currentColor; fill-opacity: 0.25; stroke: currentColor; }
.limit { fill: none; stroke: currentColor; stroke-dasharray: 3 3; }
"""


def rules(which):
    return "\n".join(f".{name} {{ {entry[0]}: {entry[which]}; }}" for name, entry in COLOURS.items())


def ticks(top):
    """Round numbers from 0 to `top` or a little beyond."""
    rough = top / 5
    power = 10 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough)
    return [step * i for i in range(math.ceil(top / step - 1e-9) + 1)]


def number(value):
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


class Figure:
    """A figure with a vertical axis from 0, to which elements are added."""

    def __init__(self, title, vertical, horizontal, top):
        self.parts = []
        marks = ticks(top)
        self.top = marks[-1]
        self.text(LEFT, 26, title, "title")
        for mark in marks:
            y = self.y(mark)
            self.parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            self.text(LEFT - 8, y + 4, f"{mark:,g}", "text", "end")
        middle = (TOP + HEIGHT - BOTTOM) / 2
        turned = f'transform="rotate(-90 18 {middle})"'
        self.text(18, middle, vertical, "text", "middle", turned)
        self.text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 12, horizontal, "text", "middle")

    def y(self, value):
        return HEIGHT - BOTTOM - value / self.top * (HEIGHT - BOTTOM - TOP)

    def text(self, x, y, text, classes, anchor="start", more=""):
        place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
        self.parts.append(f'<text class="{classes}" {place} {more}>{escape(text)}</text>')

    def bar(self, x, width, value, colour, style):
        y = self.y(value)
        place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{self.y(0) - y:.1f}"'
        self.parts.append(f'<rect class="{colour} {style}" {place}/>')

    def line(self, points, colour, style=""):
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.parts.append(f'<polyline class="{colour} line {style}" points="{path}"/>')
        self.parts += [f'<circle class="{colour} ours" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points]

    def legend(self, entries):
        """Entries of a name, a colour and a style, in a row below the title."""
        x = LEFT
        for name, colour, style in entries:
            if "line" in style:
                self.parts.append(f'<line class="{colour} {style}" x1="{x}" x2="{x + 22}" y1="50" y2="50"/>')
            else:
                self.parts.append(f'<rect class="{colour} {style}" x="{x + 4}" y="44" width="14" height="12"/>')
            self.text(x + 28, 54, name, "text")
            x += 28 + 7.5 * len(name) + 20

    def write(self, path):
        style = f"{rules(1)}\n@media (prefers-color-scheme: dark) {{\n{rules(2)}\n}}{SHAPES}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">'
        ground = f'<rect class="ground" width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        path.write_text("\n".join([head, f"<style>{style}</style>", ground, *self.parts, "</svg>\n"]))
        print(path)


def key(widths, ours, theirs):
    """What colours stand for, and styles if both sides are drawn."""
    entries = [(width, width, ours) for width in widths]
    if theirs:
        entries += [("recant", "other", ours), ("llama.cpp", "other", theirs)]
    return entries


def verification(ours, theirs):
    """What T rows cost, as a multiple of one row."""

    def ratios(costs):
        return {int(rows): cost / costs["1"] for rows, cost in costs.items()}

    lines = [(width, ratios(costs), "") for width, costs in ours["verify_ms"].items()]
    # With a way back where it was measured: what recant's figures always hold.
    others = {width: peer.get("round_ms") or peer.get("verify_ms") for width, peer in theirs.items()}
    lines += [(width, ratios(costs), "dashed") for width, costs in others.items() if costs]
    most = max(max(points) for _, points, _ in lines)
    top = max(max(points.values()) for _, points, _ in lines)
    figure = Figure("Cost of checking T tokens in one call", "times the cost of one token", "T, tokens", top)

    def x(rows):
        return LEFT + (rows - 0.5) / most * (WIDTH - LEFT - RIGHT)

    for rows in sorted({rows for _, points, _ in lines for rows in points}):
        figure.text(x(rows), HEIGHT - BOTTOM + 18, str(rows), "text", "middle")
    for width, points, style in lines:
        figure.line([(x(rows), figure.y(ratio)) for rows, ratio in sorted(points.items())], width, style)
    both = any(style for _, _, style in lines)
    figure.legend(key(ours["verify_ms"], "line", "line dashed" if both else None))
    return figure


def bars(figure, groups):
    """Groups of bars: a name, then for each bar its value, colour and style."""
    room = (WIDTH - LEFT - RIGHT) / len(groups)
    for at, (name, group) in enumerate(groups):
        width = min(48, 0.8 * room / len(group))
        x = LEFT + (at + 0.5) * room - width * len(group) / 2
        figure.text(LEFT + (at + 0.5) * room, HEIGHT - BOTTOM + 18, name, "text", "middle")
        for value, colour, style in group:
            figure.bar(x + 2, width - 4, value, colour, style)
            figure.text(x + width / 2, figure.y(value) - 5, number(value), "text small", "middle")
            x += width
    return figure


def decoding(ours, theirs):
    """Tokens a second beside what the speed of memory allows."""
    groups = []
    for width, decode in ours["decode"].items():
        speed = decode["tokens_per_s"]
        group = [(speed, width, "ours"), (speed / decode["share_of_limit"], width, "limit")]
        if "decode_tokens_per_s" in theirs.get(width, {}):
            group.append((theirs[width]["decode_tokens_per_s"], width, "theirs"))
        groups.append((width, group))
    top = max(value for _, group in groups for value, _, _ in group)
    figure = Figure("Decoding, one token a step", "tokens a second", "width of weights", top)
    legend = [("recant", "other", "ours"), ("limit: memory read once at full speed", "other", "limit")]
    if any(style == "theirs" for _, group in groups for _, _, style in group):
        legend.append(("llama.cpp", "other", "theirs"))
    figure.legend(legend)
    return bars(figure, groups)


def prefill(ours, theirs):
    """Tokens a second by the length of the prompt."""
    groups = []
    lengths = sorted({int(tokens) for speeds in ours["prefill"].values() for tokens in speeds})
    for tokens in map(str, lengths):
        group = []
        for width, speeds in ours["prefill"].items():
            sides = [(speeds, "ours"), (theirs.get(width, {}).get("prefill", {}), "theirs")]
            group += [(side[tokens], width, style) for side, style in sides if tokens in side]
        groups.append((tokens, group))
    top = max(value for _, group in groups for value, _, _ in group)
    figure = Figure("Reading a prompt in one call", "tokens a second", "prompt, tokens", top)
    both = any(style == "theirs" for _, group in groups for _, _, style in group)
    figure.legend(key(ours["prefill"], "ours", "theirs" if both else None))
    return bars(figure, groups)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("bench", type=Path, help="what the bench example printed with --json")
    parser.add_argument("peers", type=Path, nargs="?", help="results.json of benches/peers/peers.py")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder for the figures")
    args = parser.parse_args()
    ours = json.loads(args.bench.read_text())
    medians = json.loads(args.peers.read_text())["medians"] if args.peers else {}
    theirs = {width: sides["llama.cpp"] for width, sides in medians.items() if "llama.cpp" in sides}
    for name, draw in [("verify", verification), ("decode", decoding), ("prefill", prefill)]:
        draw(ours, theirs).write(args.out / f"{name}.svg")


if __name__ == "__main__":
    main()
