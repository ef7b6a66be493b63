"""Draws docs/pictures/tiles.svg: a plan as a tiled rectangle, for a mixed machine of two families.

python docs/pictures/tiles.py
"""

from pathlib import Path

from hpctrain.plan.file import parse_plan
from hpctrain.plan.tiling import Plan

PLAN = """
schedule = "1f1b"
microbatches = 8
rows = 12

[[tile]]
items = [0, 16]
rows = [0, 8]
family = "H100"
ranks = [0, 1, 2, 3]
tensor = {x = 1, y = 4, z = 1}
[[tile]]
items = [16, 26]
rows = [0, 4]
family = "MI250X"
ranks = [4, 5]
tensor = {x = 1, y = 2, z = 1}
[[tile]]
items = [16, 26]
rows = [4, 8]
family = "MI250X"
ranks = [6, 7]
tensor = {x = 1, y = 2, z = 1}
[[tile]]
items = [0, 26]
rows = [8, 12]
family = "H100"
ranks = [8, 9]
tensor = {x = 1, y = 2, z = 1}
"""
COLOURS = {"H100": "#cfe3f7", "MI250X": "#f9dcc4"}
LEFT, TOP, ITEM, ROW = 70, 56, 23, 22


def draw(plan: Plan) -> str:
    """Return the picture as SVG: items across, rows down, a box for each tile."""
    width = LEFT + ITEM * max(tile.items.stop for tile in plan.tiles) + 20
    height = TOP + ROW * plan.rows + 44
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        ' font-family="sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="20">items: embedding, attention and feed-forward part of each block, head</text>',
        f'<text x="16" y="{TOP + ROW * plan.rows / 2}" transform="rotate(-90 16 {TOP + ROW * plan.rows / 2})"'
        ' text-anchor="middle">rows of a micro-batch</text>',
    ]
    for bound in sorted({bound for tile in plan.tiles for bound in tile.items}):
        parts.append(f'<text x="{LEFT + ITEM * bound}" y="{TOP - 8}" text-anchor="middle">{bound}</text>')
    for bound in sorted({bound for tile in plan.tiles for bound in tile.rows}):
        parts.append(f'<text x="{LEFT - 8}" y="{TOP + ROW * bound + 5}" text-anchor="end">{bound}</text>')
    for number, tile in enumerate(plan.tiles):
        x, y = LEFT + ITEM * tile.items.start, TOP + ROW * tile.rows.start
        parts.append(
            f'<rect x="{x}" y="{y}" width="{ITEM * tile.items.size}" height="{ROW * tile.rows.size}"'
            f' fill="{COLOURS[tile.family]}" stroke="#333333" stroke-width="1.5"/>'
        )
        ranks = f"ranks {tile.ranks[0]} to {tile.ranks[-1]}"
        lines = (f"tile {number}: {tile.family}", f"{tile.tensor}, {ranks}")
        for offset, line in enumerate(lines):
            middle = x + ITEM * tile.items.size / 2, y + ROW * tile.rows.size / 2 + 18 * offset - 4
            parts.append(f'<text x="{middle[0]}" y="{middle[1]}" text-anchor="middle">{line}</text>')
    note = "Tiles 0 to 2 are a pipeline with one stage on each family; tile 3 is a whole replica next to it."
    parts.append(f'<text x="{LEFT}" y="{height - 14}" fill="#555555">{note}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(draw(parse_plan(PLAN, "tiles.py")))
