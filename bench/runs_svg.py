#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the results of bench/peers.py for columns: the time of each peer relative to raw, by length of a run.

    bench/peers.py --state 64,128,256,448,1024,4096,16384,65536 --work columns > runs.jsonl
    bench/runs_svg.py runs.jsonl > docs/pictures/runs.svg
"""

import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 60, 150, 30, 50
COLOURS = {"ours": "#0b6e4f", "ours-unverified": "#7cc6a4", "mapped": "#c8553d", "safetensors": "#e0a458", "torch.save": "#8d6a9f",
           "dcp": "#4d5d78", "tensorstore": "#7b7b7b", "ours-exchange": "#2f9c95"}


def text(x, y, words, anchor="start", colour="#333", size=12):
    return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}" fill="{colour}" font-size="{size}">{words}</text>'


def main():
    with open(sys.argv[1]) as lines:
        rows = [json.loads(line) for line in lines if line.startswith("{")]
    rows = [r for r in rows if r["work"] == "columns" and r["state"].isdigit() and r["peer"] != "raw"]
    lengths = sorted({int(r["state"]) for r in rows})
    most = max(r["of_raw"] for r in rows)
    low, high = 0.5, 2 ** math.ceil(math.log2(most))

    def x(length):
        span = math.log2(lengths[-1] / lengths[0]) or 1
        return LEFT + (WIDTH - LEFT - RIGHT) * math.log2(length / lengths[0]) / span

    def y(ratio):
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * math.log2(max(ratio, low) / low) / math.log2(high / low)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
           f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    ratio = low
    while ratio <= high:
        strong = ' stroke-width="1.5"' if ratio == 1 else ""
        out.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" stroke="#ccc"{strong}/>')
        out.append(text(LEFT - 8, y(ratio) + 4, f"{ratio:g}x", "end"))
        ratio *= 2
    for length in lengths:
        label = f"{length} B" if length < 1024 else f"{length // 1024} KiB"
        out.append(text(x(length), HEIGHT - BOTTOM + 18, label, "middle"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "length of a run: the columns of one row that a rank wants", "middle"))
    out.append(text(LEFT, 18, "time of a load, rows to columns, of a pread of as many bytes"))
    ends = []
    for peer in sorted({r["peer"] for r in rows}, key=lambda p: -max(r["of_raw"] for r in rows if r["peer"] == p)):
        points = sorted((int(r["state"]), r["of_raw"]) for r in rows if r["peer"] == peer)
        colour = COLOURS.get(peer, "#000")
        path = " ".join(f"{x(length):.1f},{y(value):.1f}" for length, value in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{x(length):.1f}" cy="{y(value):.1f}" r="3" fill="{colour}"/>' for length, value in points]
        ends.append([y(points[-1][1]), peer, colour])
    ends.sort()
    for before, after in zip(ends, ends[1:]):
        after[0] = max(after[0], before[0] + 15)
    out += [text(WIDTH - RIGHT + 10, at + 4, peer, colour=colour) for at, peer, colour in ends]
    out.append("</svg>")
    print("\n".join(out))


if __name__ == "__main__":
    main()
