"""Draws what the time of a training step goes into, docs/pictures/step.svg, from the newest results of train_step.py.

python -m tools.step_parts
"""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "pictures" / "step.svg"
PARTS = {"passes": "#4c78a8", "optimiser": "#72b7b2", "augmentation": "#f58518", "host": "#b0b0b0"}
LEFT, WIDTH, BAR, GAP, TOP = 90, 520, 22, 14, 34


def main() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("train_step-*.json"))
    PICTURE.write_text(draw(json.loads(newest.read_text())), encoding="utf-8")
    print(f"Wrote {PICTURE.name}")


def draw(results: dict[str, Any]) -> str:
    """A bar for each model that has parts: milliseconds of a step, side by side."""
    rows = [row for row in results["rows"] if row.get("milliseconds")]
    longest = max(sum(row["milliseconds"].values()) for row in rows)
    height = TOP + len(rows) * (BAR + GAP)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 90} {height}" font-family="sans-serif"'
        ' font-size="12">',
        f'<rect width="100%" height="{height}" fill="white"/>',
    ]
    for number, (part, colour) in enumerate(PARTS.items()):
        x = LEFT + 130 * number
        out.append(
            f'<rect x="{x}" y="8" width="12" height="12" fill="{colour}"/><text x="{x + 17}" y="18">{part}</text>'
        )
    for number, row in enumerate(rows):
        x, y = float(LEFT), TOP + number * (BAR + GAP)
        out.append(f'<text x="{LEFT - 8}" y="{y + 15}" text-anchor="end">{row["model"]}</text>')
        for part, colour in PARTS.items():
            share = row["milliseconds"][part]
            width = WIDTH * share / longest
            out.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{BAR}" fill="{colour}">')
            out.append(f"<title>{part} {share:.2f} ms</title></rect>")
            x += width
        out.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(row["milliseconds"].values()):.1f} ms</text>')
    return "\n".join([*out, "</svg>", ""])


if __name__ == "__main__":
    main()
