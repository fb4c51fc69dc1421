"""The report's page: its skeleton, its style, and the small blocks that it is built of. The page fetches nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

STYLE = """
:root {
  color-scheme: light dark;
  --paper: #fbfbf9; --card: #ffffff; --ink: #1d2529; --soft: #5c686e; --line: #e4e6e3; --grid: #eceeeb;
  --track: #f1f3f1; --a: #17758c; --b: #c76b29; --c: #6d7f3f; --d: #8a5a9e; --e: #b34a5f; --f: #3f6fb5;
  --g: #9a7b24; --h: #4a8f73; --other: #a3abaf; --wait: #cfd5d6; --good: #2c7a4b; --bad: #b3372f; --goodbg: #e5f2ea;
  --badbg: #f8e6e4; --notebg: #fdf4df; --noteink: #6d5312; --inside: #ffffff;
}
@media (prefers-color-scheme: dark) {
  :root {
    --paper: #12171a; --card: #191f23; --ink: #e4e9ea; --soft: #98a5aa; --line: #2a3237; --grid: #252d31;
    --track: #20272b; --a: #45b0c8; --b: #e2935a; --c: #a3b867; --d: #b98acb; --e: #dd8093; --f: #7ba4e0;
    --g: #cfae55; --h: #72bf9e; --other: #6d777c; --wait: #3a454a; --good: #6cc490; --bad: #ea8a81; --goodbg: #1c3327;
    --badbg: #3d2422; --notebg: #352d18; --noteink: #e6cf94; --inside: #10161a;
  }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 15px/1.55 ui-sans-serif, system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1140px; margin: 0 auto; padding: 40px 28px 72px; }
h1 { font-size: 28px; line-height: 1.2; margin: 0; font-weight: 650; letter-spacing: -0.015em; }
h2 { font-size: 18px; margin: 44px 0 4px; font-weight: 640; letter-spacing: -0.005em; }
h3 { font-size: 13.5px; margin: 0 0 8px; font-weight: 600; }
p { margin: 0 0 12px; } .soft, h2 + p { color: var(--soft); }
header { display: flex; flex-wrap: wrap; align-items: baseline; gap: 6px 14px; margin-bottom: 24px; }
header .soft { flex-basis: 100%; }
.pill { font-size: 12.5px; font-weight: 600; border-radius: 99px; padding: 2px 11px; background: var(--track);
  color: var(--soft); }
.pill.good { background: var(--goodbg); color: var(--good); } .pill.bad { background: var(--badbg); color: var(--bad); }
.notice { background: var(--notebg); color: var(--noteink); border-radius: 8px; padding: 10px 14px; margin: 0 0 16px; }
.tiles { display: grid; grid-template-columns: repeat(4, 1fr); gap: 14px; }
.tile, .card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px; }
.tile.wide { grid-column: span 2; }
.tile b { display: block; font-size: 25px; line-height: 1.25; font-weight: 640; letter-spacing: -0.02em;
  font-variant-numeric: tabular-nums; }
.tile .what { font-size: 12.5px; color: var(--soft); font-weight: 550; } .tile small { color: var(--soft); }
.tile .to { color: var(--soft); font-weight: 400; padding: 0 4px; }
.grid2, .grid3 { display: grid; gap: 14px; } .grid2 { grid-template-columns: 1fr 1fr; }
.grid3 { grid-template-columns: repeat(3, 1fr); } .card + .card { margin: 0; } .stack { display: grid; gap: 14px; }
.card .none { color: var(--soft); padding: 24px 0; text-align: center; }
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font-size: 12px; fill: var(--soft); font-family: inherit; font-variant-numeric: tabular-nums; }
.grid3 svg text { font-size: 13.5px; }
svg .label { font-size: 12px; } svg .mid { text-anchor: middle; } svg .end { text-anchor: end; }
svg .row { fill: var(--ink); } svg .note { fill: var(--b); font-weight: 600; } svg .inside { fill: var(--inside); }
svg .inside, svg .probe { pointer-events: none; } svg .probe { fill: transparent; pointer-events: all; }
.grid { stroke: var(--grid); } .axis { stroke: var(--soft); stroke-opacity: .55; }
.bound { stroke: var(--b); stroke-dasharray: 4 4; stroke-width: 1.4; } .track { fill: var(--track); }
path.line { fill: none; stroke-width: 2; stroke-linejoin: round; stroke-linecap: round; }
.line.faint { stroke: var(--a); stroke-opacity: .28; stroke-width: 1.1; }
.line.a { stroke: var(--a); } .line.b { stroke: var(--b); } .line.c { stroke: var(--c); }
.line.d { stroke: var(--d); } .line.e { stroke: var(--e); } .line.f { stroke: var(--f); } .line.g { stroke: var(--g); }
.hit rect, .hit .target { fill: transparent; } .hit .dot { opacity: 0; }
.hit:hover .dot, .hit.shown .dot { opacity: 1; }
.a { fill: var(--a); } .b { fill: var(--b); } .c { fill: var(--c); } .d { fill: var(--d); } .e { fill: var(--e); }
.f { fill: var(--f); } .g { fill: var(--g); } .h { fill: var(--h); } .other { fill: var(--other); }
.wait { fill: var(--wait); } .bar.bad { fill: var(--bad); } .area { fill-opacity: .82; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; font-size: 12.5px; color: var(--soft); margin-top: 8px; }
.key { display: inline-block; width: 11px; height: 11px; border-radius: 3px; margin-right: 7px; vertical-align: -1px; }
.key.a { background: var(--a); } .key.b { background: var(--b); } .key.c { background: var(--c); }
.key.d { background: var(--d); } .key.e { background: var(--e); } .key.f { background: var(--f); }
.key.g { background: var(--g); } .key.h { background: var(--h); } .key.other { background: var(--other); }
.key.wait { background: var(--wait); } .key.faint { background: var(--a); opacity: .35; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; font-size: 14px; }
th { text-align: left; font-weight: 600; color: var(--soft); font-size: 12.5px; }
th, td { padding: 6px 10px 6px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; } .num { text-align: right; }
.num:last-child { padding-right: 0; }
.samples { table-layout: fixed; } .samples td, .samples th { padding-right: 22px; }
.samples td:last-child { padding-right: 0; }
.said { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0 0 6px; max-height: 260px; overflow-y: auto;
  font: 12.5px/1.5 ui-monospace, "SF Mono", "Cascadia Code", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.badge { font-size: 11.5px; font-weight: 600; border-radius: 5px; padding: 1px 7px; background: var(--track);
  color: var(--soft); }
.badge.good { background: var(--goodbg); color: var(--good); }
.badge.bad { background: var(--badbg); color: var(--bad); }
.scroll { overflow-x: auto; } .scroll svg { min-width: 760px; }
details, .missing { margin-top: 36px; } summary { cursor: pointer; font-weight: 600; }
details pre { background: var(--card); border: 1px solid var(--line); border-radius: 10px; padding: 14px 16px;
  overflow-x: auto; font: 12.5px/1.55 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
footer { margin-top: 40px; color: var(--soft); font-size: 13px; }
@media (max-width: 820px) {
  main { padding: 24px 16px 48px; } .tiles { grid-template-columns: 1fr 1fr; }
  .grid2, .grid3 { grid-template-columns: 1fr; }
  .tile.wide { grid-column: span 2; }
}
@media print { body { background: #fff; } .card, .tile { break-inside: avoid; } }
"""


def page(title: str, body: str) -> str:
    """Return a whole HTML document."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        # The page holds text that a model wrote. Whatever that text is, it may not run or fetch anything.
        """<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">"""
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def section(title: str, lead: str, *blocks: str) -> str:
    """Return a section: a heading, one sentence that says how to read it, and its blocks."""
    return f"<section><h2>{escape(title)}</h2><p>{escape(lead)}</p>{''.join(blocks)}</section>\n"


def tile(what: str, value: str, note: str = "", *, wide: bool = False) -> str:
    """Return a tile with a headline number. `value` is markup, the rest is text."""
    kind = "tile wide" if wide else "tile"
    return (
        f'<div class="{kind}"><span class="what">{escape(what)}</span><b>{value}</b><small>{escape(note)}</small></div>'
    )


def card(title: str, body: str) -> str:
    """Return a titled box around markup."""
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def nothing(why: str) -> str:
    """Return a note that stands in the place of a chart."""
    return f'<div class="none">{escape(why)}</div>'


def columns(*blocks: str) -> str:
    """Put blocks side by side, two or three to a row."""
    return f'<div class="grid{3 if len(blocks) % 3 == 0 else 2}">{"".join(blocks)}</div>'


def stack(*blocks: str) -> str:
    """Put blocks below each other."""
    return f'<div class="stack">{"".join(blocks)}</div>'


def table(head: Sequence[str], lines: Sequence[Sequence[str]], *, left: int = 1) -> str:
    """Return a table of text. The first `left` columns are words, the others numbers."""

    def row(tag: str, cells: Sequence[str]) -> str:
        marks = [""] * left + [' class="num"'] * (len(cells) - left)
        return "".join(f"<{tag}{mark}>{escape(cell)}</{tag}>" for mark, cell in zip(marks, cells, strict=True))

    body = "".join(f"<tr>{row('td', line)}</tr>" for line in lines)
    titles = f"<thead><tr>{row('th', head)}</tr></thead>" if head else ""
    return f"<table>{titles}<tbody>{body}</tbody></table>"
