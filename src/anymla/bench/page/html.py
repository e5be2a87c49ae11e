"""The page: one file, no network, light and dark, wide and narrow."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from anymla.bench.page.figure import Bars, Figure, Stacks
from anymla.bench.page.svg import NARROW, WIDE, legend, svg
from anymla.bench.page.table import Table

_STYLE = """
:root {
  color-scheme: light dark;
  --ink: #1b2430; --soft: #5a6675; --paper: #fbfbf9; --card: #fff; --rule: #dfe3e8; --bad: #b3261e;
  --c0: #0067b1; --c1: #c2410c; --c2: #137a4a; --c3: #8a2d8f; --c4: #8a6d00; --c5: #c0216b;
  --c6: #00757f; --c7: #5f6b7a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ink: #e7ebf0; --soft: #a3afbd; --paper: #12161c; --card: #1a2028; --rule: #333d49;
    --bad: #ff8a80; --c0: #6cb8ff; --c1: #ff9d5c; --c2: #5fd49a; --c3: #d99bdf; --c4: #e3c44a;
    --c5: #ff8fbd; --c6: #4fd0dc; --c7: #a9b5c3;
  }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 52rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.6rem; margin: .5rem 0; } h2 { font-size: 1.15rem; margin: 0 0 .4rem; }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 8px;
  padding: 1rem; margin: 1rem 0; }
p { margin: .4rem 0; } .source { color: var(--soft); font-size: .8rem; overflow-wrap: anywhere; }
a { color: var(--c0); }
nav ul { margin: .3rem 0; padding: 0; list-style: none; display: flex; flex-wrap: wrap;
  gap: .2rem 1rem; font-size: .95rem; }
svg { display: block; width: 100%; height: auto; font: 12px system-ui, "DejaVu Sans", sans-serif; }
svg.narrow { display: none; }
svg text { fill: var(--soft); text-anchor: middle; } svg text.y { text-anchor: end; }
svg text.axis { fill: var(--ink); } svg .grid { stroke: var(--rule); fill: none; }
svg polyline, svg g path { fill: none; stroke: currentColor; stroke-width: 2; }
svg circle { fill: currentColor; stroke: var(--card); stroke-width: 1; }
.limit { color: var(--soft); } svg .limit polyline { stroke-dasharray: 5 4; stroke-width: 1.5; }
ul.legend { list-style: none; padding: 0; margin: .4rem 0; display: flex; flex-wrap: wrap;
  gap: .1rem 1rem; font-size: .85rem; }
ul.legend li { overflow-wrap: anywhere; }
ul.legend li::before { content: ""; display: inline-block; width: .7em; height: .7em;
  margin-right: .4em; border-radius: 50%; background: currentColor; }
ul.legend li.limit::before { border-radius: 0; height: 2px; vertical-align: middle; }
svg text.last { text-anchor: end; }
ul.bars { list-style: none; margin: .4rem 0; padding: 0; font-size: .85rem; }
ul.bars li { margin: .35rem 0; display: flex; flex-wrap: wrap; gap: 0 .6rem; color: var(--ink); }
ul.bars b { font-weight: 400; color: var(--soft); margin-left: auto; }
ul.bars .bad b { color: var(--bad); font-weight: 600; }
.bar { position: relative; width: 100%; height: .55rem; background: var(--rule);
  border-radius: 3px; }
.bar em { display: block; height: 100%; background: var(--c0); border-radius: 3px; }
.bar.stack { display: flex; height: .8rem; overflow: hidden; }
.bar.stack em { background: currentColor; border-radius: 0; }
.bad .bar em { background: var(--bad); }
.bar i { position: absolute; top: -2px; bottom: -2px; width: 2px; background: var(--ink); }
.wide-table { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .25rem .6rem .25rem 0; border-bottom: 1px solid var(--rule);
  vertical-align: top; }
td.number { text-align: right; white-space: nowrap; }
td.bad { color: var(--bad); font-weight: 600; }
th { white-space: nowrap; } td:first-child { min-width: 7rem; }
#conformance td:first-child { min-width: 0; } #conformance td:nth-child(2) { min-width: 12rem; }
#conformance th { white-space: normal; overflow-wrap: break-word; min-width: 3.5rem; }
summary { cursor: pointer; font-weight: 600; }
@media (max-width: 640px) {
  body { padding: .6rem; } section { padding: .7rem; }
  svg.wide { display: none; } svg.narrow { display: block; }
}
"""


def page(figures: Sequence[Figure | Bars | Stacks], tables: Sequence[Table], made: str) -> str:
    """The whole document.

    Args:
        figures: drawn in this order.
        tables: below the figures, in this order.
        made: when, from which commit and by which command.
    """
    colours = "\n".join(f".s{i} {{ color: var(--c{i}); }}" for i in range(8))
    parts: list[Figure | Bars | Stacks | Table] = [*figures, *tables]
    links = "".join(f'<li><a href="#{part.key}">{escape(part.title)}</a></li>' for part in parts)
    body = [_drawn(each) for each in figures] + [_table(each) for each in tables]
    if not body:
        body = ["<section><p>There are no result rows to show.</p></section>"]
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>anymla: measurements</title>
<style>{_STYLE}{colours}</style>
</head>
<body>
<h1>anymla: measurements</h1>
<p>DeepSeek-V4's sparse attention: what was measured, on what, and where it falls short. Numbers can
be selected; a point says what it is when it is pointed at, and the tables have all of them.</p>
<p class="source">{_marked(made)}</p>
<nav><ul>{links}</ul></nav>
{chr(10).join(body)}
</body>
</html>
"""


def _drawn(figure: Figure | Bars | Stacks) -> str:
    if isinstance(figure, Bars):
        return _bars(figure)
    return _stacks(figure) if isinstance(figure, Stacks) else _figure(figure)


def _figure(figure: Figure) -> str:
    note = f"<p>{_marked(figure.note)}</p>" if figure.note else ""
    return f"""<section id="{figure.key}">
<h2>{escape(figure.title)}</h2>
{svg(figure, WIDE, "wide")}
{svg(figure, NARROW, "narrow")}
{legend(figure)}
{note}
<p class="source">{_marked(figure.source)}</p>
</section>"""


def _bars(bars: Bars) -> str:
    note = f"<p>{_marked(bars.note)}</p>" if bars.note else ""
    goal = ""
    if bars.goal is not None:
        goal = f'<i style="left:{bars.goal / bars.most:.1%}"></i>'
    rows = []
    for bar in bars.bars:
        length = min(bar.value / bars.most, 1.0)
        css = " class=bad" if bar.bad else ""
        rows.append(
            f"<li{css}><span>{escape(bar.name)}</span> <b>{escape(bar.text)}</b>"
            f'<div class="bar"><em style="width:{length:.1%}"></em>{goal}</div></li>'
        )
    return f"""<section id="{bars.key}">
<h2>{escape(bars.title)}</h2>
<p>{escape(bars.x_label)}</p>
<ul class="bars">
{chr(10).join(rows)}
</ul>
{note}
<p class="source">{_marked(bars.source)}</p>
</section>"""


def _stacks(figure: Stacks) -> str:
    names = "".join(f'<li class="s{i}">{escape(part)}</li>' for i, part in enumerate(figure.parts))
    rows = []
    for stack in figure.stacks:
        whole = sum(stack.parts) or 1.0
        cut = "".join(
            f'<em class="s{i}" style="width:{part / whole:.1%}" '
            f'title="{escape(name)}: {part:.4g}, {part / whole:.0%}"></em>'
            for i, (name, part) in enumerate(zip(figure.parts, stack.parts, strict=True))
        )
        rows.append(
            f"<li><span>{escape(stack.name)}</span> <b>{escape(stack.text)}</b>"
            f'<div class="bar stack">{cut}</div></li>'
        )
    return f"""<section id="{figure.key}">
<h2>{escape(figure.title)}</h2>
<p>{escape(figure.x_label)}</p>
<ul class="legend">{names}</ul>
<ul class="bars">
{chr(10).join(rows)}
</ul>
<p>{_marked(figure.note)}</p>
<p class="source">{_marked(figure.source)}</p>
</section>"""


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in table.head)
    body = "\n".join(f"<tr>{''.join(map(_cell, cells))}</tr>" for cells in table.body)
    inner = f"""<div class="wide-table"><table><thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>"""
    note = f"<p>{_marked(table.note)}</p>" if table.note else ""
    if table.folded:
        summary = f"<summary>{escape(table.title)} ({len(table.body)} rows)</summary>"
        content = f"<details>{summary}{note}{inner}</details>"
    else:
        content = f"<h2>{escape(table.title)}</h2>{note}{inner}"
    return f"""<section id="{table.key}">
{content}
<p class="source">{_marked(table.source)}</p>
</section>"""


def _cell(text: str) -> str:
    if text.startswith("!"):
        aligned = " number" if text.endswith("slower") else ""
        return f'<td class="bad{aligned}">{escape(text[1:])}</td>'
    number = re.fullmatch(r"[\d.,e+-]*\d", text)
    return f"<td{' class=number' if number else ''}>{escape(text)}</td>"


def _marked(text: str) -> str:
    """Escaped text in which `code` is code."""
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text))
