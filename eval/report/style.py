"""The look of the HTML report: light and dark as the reader's system says, and readable on a telephone."""

# Of the series on paper, --s0 to --s5 below.
COLOURS = ("#7a7f87", "#0072b2", "#d55e00", "#009e73", "#aa4499", "#b58900")

STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --ink: #1b1f24; --soft: #5b6570; --rule: #dde2e7;
  --card: #f6f8fa; --start: #ffd9a8; --run: #cfe5ff; --mark: #c00000; --shade: #0b5394;
  --s0: #7a7f87; --s1: #0072b2; --s2: #d55e00; --s3: #009e73; --s4: #aa4499; --s5: #b58900; }
@media (prefers-color-scheme: dark) { :root { --ground: #14171b; --ink: #e4e8ec; --soft: #9aa5b1; --rule: #343b43;
  --card: #1d2126; --start: #6b4310; --run: #173f6b; --mark: #ff6b5e; --shade: #6cb2ff;
  --s0: #a2a9b1; --s1: #56b4e9; --s2: #ff8c42; --s3: #2cc295; --s4: #d98cc9; --s5: #e3c05a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem clamp(0.8rem, 3vw, 2rem) 4rem; max-width: 84rem; background: var(--ground);
  color: var(--ink); font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { margin: 0.5rem 0 0; font-size: 1.7rem; } h2 { margin: 2.5rem 0 0.5rem; font-size: 1.25rem; }
h3 { margin: 1.5rem 0 0.5rem; font-size: 1rem; } p, .note { max-width: 48rem; }
h1, h2, h3, p, li, dt { overflow-wrap: anywhere; }
.note, figcaption, dt { color: var(--soft); font-size: 0.9rem; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2rem 1rem; padding: 0; margin: 0.8rem 0; list-style: none; }
a { color: var(--s1); } code { font-size: 0.9em; overflow-wrap: anywhere; }
.wide { overflow-x: auto; margin: 0.8rem 0; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.28rem 0.55rem; border-bottom: 1px solid var(--rule); text-align: right; white-space: nowrap; }
th { color: var(--soft); font-weight: 600; vertical-align: bottom; white-space: normal; min-width: 4rem; }
th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left; }
tr.first td { border-top: 2px solid var(--rule); }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 17rem), 1fr)); gap: 1rem; }
figure { margin: 0; } figure.chart { background: var(--card); border-radius: 0.5rem; padding: 0.6rem; }
svg { display: block; width: 100%; height: auto; } svg text { fill: var(--soft); font-size: 11px; }
svg text.document { fill: var(--ink); font-size: 12px; }
.rule { stroke: var(--rule); } .axis { stroke: var(--soft); } .whisker { stroke: var(--ink); fill: none; }
.bar { fill: var(--c); } .line { fill: none; stroke: var(--c); stroke-width: 2; } .dot { fill: var(--c); }
.band { fill: var(--c); fill-opacity: 0.15; } .tip { fill: var(--c); fill-opacity: 0; }
.tip:hover { fill-opacity: 0.6; }
.s0 { --c: var(--s0); } .s1 { --c: var(--s1); } .s2 { --c: var(--s2); } .s3 { --c: var(--s3); }
.s4 { --c: var(--s4); } .s5 { --c: var(--s5); }
.s0.line { stroke-dasharray: 5 3; } .s2.line { stroke-dasharray: 9 3; } .s3.line { stroke-dasharray: 2 3; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2rem 1.2rem; padding: 0; margin: 0.4rem 0 0.8rem; list-style: none;
  font-size: 0.9rem; }
.swatch { display: inline-block; width: 0.9rem; height: 0.9rem; margin-right: 0.4rem; border-radius: 0.2rem;
  background: var(--c); vertical-align: -0.1rem; }
.ground { fill: var(--card); stroke: var(--rule); } .shade { fill: var(--shade); } .verbatim { fill: var(--mark); }
.maps-box { overflow-x: auto; } .maps { min-width: 34rem; max-width: 60rem; }
.example { background: var(--card); border-radius: 0.5rem; padding: 0.8rem 1rem; margin: 0.8rem 0; }
.example h4 { margin: 0 0 0.4rem; font-size: 0.95rem; overflow-wrap: anywhere; }
.sides { display: grid; grid-template-columns: 1fr 1fr; gap: 0.4rem 1.2rem; margin-top: 0.6rem; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; margin: 0; font-size: 0.92rem; unicode-bidi: isolate; }
mark { color: inherit; border-radius: 0.15rem; padding: 0.05em 0; } mark.start { background: var(--start); }
mark.run { background: var(--run); }
dl { margin: 0; } dt { margin-top: 0.2rem; } dd { margin: 0; overflow-wrap: anywhere; }
.provenance { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1rem; }
@media (max-width: 40rem) { .sides { grid-template-columns: 1fr; } body { font-size: 15px; } }
@media print { body { max-width: none; } .example, figure.chart { break-inside: avoid; } }
"""

# A map that stands alone has no page around it to give it colours.
MAP_STYLE = """
svg { background: #ffffff; font: 11px system-ui, sans-serif; } text { fill: #5b6570; } text.document { fill: #1b1f24; }
.ground { fill: #f6f8fa; stroke: #dde2e7; } .shade { fill: #0b5394; } .verbatim { fill: #c00000; }
"""
