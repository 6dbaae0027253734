"""The style of the page of a report, for light and dark screens and for print."""

STYLE = """
:root { color-scheme: light dark; --page: #f6f7f9; --card: #fff; --text: #1c2530; --dim: #5d6b7a;
  --line: #e1e6ec; --done: #2f9e77; --retried: #e0a030; --failed: #d64550; --other: #9aa7b4;
  --p50: #3b82c4; --p99: #b0579b; --good: #1f7a5a; --warning: #9a6700; --bad: #b42331; }
@media (prefers-color-scheme: dark) { :root { --page: #12161c; --card: #1b2129; --text: #e6ebf0;
  --dim: #98a5b3; --line: #2e3741; --done: #45b98f; --retried: #e6b455; --failed: #ef6b73;
  --other: #6d7a88; --p50: #6db1ec; --p99: #d88cc6; --good: #5cc79f; --warning: #e6b455;
  --bad: #ff7d85; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
main { max-width: 1120px; margin: 0 auto; padding: 24px 20px 48px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 16px; margin: 0 0 10px; }
p { margin: 0 0 8px; } .dim, small { color: var(--dim); }
header { margin-bottom: 18px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px 18px; margin-bottom: 16px; overflow-x: auto; }
.verdict { border-left: 6px solid var(--good); }
.verdict.warning { border-left-color: var(--warning); }
.verdict.bad { border-left-color: var(--bad); }
.verdict strong { font-size: 19px; display: block; margin-bottom: 4px; color: var(--good); }
.verdict.warning strong { color: var(--warning); } .verdict.bad strong { color: var(--bad); }
.verdict ul { margin: 6px 0 0; padding-left: 20px; } .verdict li { margin-bottom: 4px; }
li.bad::marker { color: var(--bad); } li.warning::marker { color: var(--warning); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(180px, 1fr)); gap: 12px;
  margin-bottom: 16px; }
.tile { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 9px 12px; }
.tile b { display: block; font-size: 20px; line-height: 1.25; font-variant-numeric: tabular-nums; }
.tile.bad b { color: var(--bad); }
.pair { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 16px; }
.pair section { margin-bottom: 0; } .pair { margin-bottom: 16px; }
table { border-collapse: collapse; width: 100%; font-size: 14px; }
th { text-align: left; color: var(--dim); font-weight: 500; white-space: nowrap; }
th, td { padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
tr:last-child td { border-bottom: 0; }
.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
td.text { overflow-wrap: anywhere; min-width: 160px; }
code { font: 13px ui-monospace, "SF Mono", Menlo, Consolas, monospace; overflow-wrap: anywhere; }
.share { display: block; height: 4px; border-radius: 2px; background: var(--p50);
  margin: 3px 0 0 auto; }
.chart { width: 100%; height: auto; display: block; }
.legend span { margin-right: 16px; color: var(--dim); font-size: 13px; }
.key { display: inline-block; width: 10px; height: 10px; border-radius: 2px; margin-right: 6px; }
.grid { stroke: var(--line); } .axis { fill: var(--dim); font-size: 11px; }
.hover { fill: transparent; } .hover:hover { fill: var(--dim); fill-opacity: .15; }
.line { fill: none; stroke-width: 2; stroke-linejoin: round; }
.done { fill: var(--done); background: var(--done); }
.retried { fill: var(--retried); background: var(--retried); }
.failed { fill: var(--failed); background: var(--failed); }
.other { fill: var(--other); background: var(--other); }
.p50 { stroke: var(--p50); background: var(--p50); } circle.p50 { fill: var(--p50); }
.p99 { stroke: var(--p99); background: var(--p99); } circle.p99 { fill: var(--p99); }
.due { fill: var(--p50); background: var(--p50); }
.late { fill: var(--failed); background: var(--failed); }
.spark { width: 120px; height: 20px; fill: var(--failed); }
@media print { body { background: #fff; } section, .tile { break-inside: avoid; } }
"""
