"""How a page looks: colours that colour-blind readers tell apart (Okabe and Ito), in light and in dark."""

from typing import Any

FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', Arial, sans-serif"
# Blue, vermilion, green, purple, orange, sky, ink: as Okabe and Ito order contrast, lighter on dark.
LIGHT = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#1b1f24"]
DARK = ["#5AB0EA", "#FF8A4C", "#2DC5A0", "#E79CC4", "#F2B632", "#A6DBFF", "#E8EAED"]


def _config(colours: list[str], ink: str, soft: str, grid: str, paper: str, extent: list[float]) -> dict[str, Any]:
    """A theme of Vega-Lite."""
    viridis = {"scheme": "viridis", "extent": extent}  # without the end that the paper swallows
    axis = {
        "labelColor": soft, "titleColor": soft, "gridColor": grid, "domainColor": soft, "tickColor": grid, "labelFontSize": 11,
        "titleFontSize": 12, "titleFontWeight": "normal", "titlePadding": 8, "domain": False, "labelPadding": 5, "tickSize": 0,
    }  # fmt: skip
    return {
        "font": FONT,
        "background": "transparent",
        "view": {"stroke": None},
        "axis": axis,
        "axisX": {"grid": False, "domain": True, "domainColor": grid},
        "legend": {
            "labelColor": ink, "titleColor": soft, "labelFontSize": 12, "titleFontWeight": "normal", "orient": "top",
            "symbolType": "stroke", "symbolStrokeWidth": 3, "symbolSize": 150, "labelLimit": 420, "offset": 8, "titleLimit": 300,
        },
        "title": {"color": ink, "fontSize": 15, "fontWeight": 600},
        "range": {"category": colours, "ramp": viridis, "heatmap": viridis},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "bar": {"color": colours[0]},
        "text": {"color": ink, "fontSize": 11},
        "style": {
            "strong": {"color": ink, "strokeWidth": 3},
            "halo": {"color": paper, "stroke": paper, "strokeWidth": 4, "fontSize": 11},
            "guide": {"color": soft},
            "faint": {"color": grid},
            "soft": {"color": soft, "fontSize": 11},
            "accent": {"color": colours[0]},
        },
    }  # fmt: skip


CONFIGS = {
    "light": _config(LIGHT, "#1b1f24", "#57606a", "#e4e7eb", "#ffffff", [0.05, 0.88]),
    "dark": _config(DARK, "#e8eaed", "#9aa4af", "#31373f", "#1b1f24", [0.3, 1.0]),
}

CSS = """
:root { --ink:#1b1f24; --soft:#57606a; --line:#e1e4e8; --page:#f6f7f9; --card:#ffffff; --accent:#0066a1; --good:#00785a;
  --bad:#b34700; --warn:#7a5500; --code:#f1f3f5; }
@media (prefers-color-scheme: dark) { :root { --ink:#e8eaed; --soft:#9aa4af; --line:#2c323a; --page:#121519; --card:#1b1f24;
  --accent:#6cbcf5; --good:#2dc5a0; --bad:#ff8a4c; --warn:#f2b632; --code:#262b32; } }
* { box-sizing:border-box; }
html { color-scheme:light dark; }
body { margin:0; background:var(--page); color:var(--ink); font:15px/1.5 system-ui,-apple-system,'Segoe UI',Roboto,
  'Helvetica Neue','Liberation Sans',Arial,sans-serif; }
main { max-width:1240px; margin:0 auto; padding:32px 24px 64px; }
h1 { font-size:26px; line-height:1.25; margin:0 0 6px; letter-spacing:-.01em; overflow-wrap:anywhere; }
h2 { font-size:18px; margin:40px 0 12px; }
h3 { font-size:14px; margin:0; font-weight:600; }
a { color:var(--accent); text-decoration:none; } a:hover { text-decoration:underline; }
code, pre, .path { font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,'Liberation Mono',monospace; font-size:12.5px; }
.path { color:var(--soft); margin:0 0 10px; overflow-wrap:anywhere; }
.chip { display:inline-block; border:1px solid var(--line); border-radius:999px; padding:1px 10px; margin:0 6px 6px 0;
  font-size:12.5px; color:var(--soft); background:var(--card); overflow-wrap:anywhere; }
.chip.state { font-weight:600; color:var(--soft); }
.chip.state::before { content:''; display:inline-block; width:8px; height:8px; border-radius:50%; margin-right:7px;
  background:currentColor; }
.chip.finished { color:var(--good); } .chip.failed { color:var(--bad); } .chip.interrupted, .chip.stopped { color:var(--warn); }
.chip.running { color:var(--accent); }
.numbers { display:grid; grid-template-columns:repeat(auto-fit,minmax(160px,1fr)); background:var(--card);
  border:1px solid var(--line); border-radius:10px; overflow:hidden; margin:14px 0; }
.numbers > div { padding:14px 16px; min-width:0; box-shadow:1px 1px 0 0 var(--line); }
.numbers dt { font-size:12.5px; color:var(--soft); overflow-wrap:anywhere; }
.numbers dd { margin:2px 0 0; font-size:21px; font-weight:600; font-variant-numeric:tabular-nums; overflow-wrap:anywhere;
  line-height:1.25; }
.numbers > div:first-child dd { color:var(--accent); }
.numbers small { color:var(--soft); font-size:12.5px; overflow-wrap:anywhere; }
.command { margin:6px 0; display:flex; gap:10px; align-items:baseline; }
.command span { flex:none; width:64px; color:var(--soft); font-size:12.5px; }
.command code { background:var(--code); border-radius:6px; padding:4px 9px; overflow-wrap:anywhere; user-select:all; }
.grid { display:grid; grid-template-columns:repeat(auto-fit,minmax(min(100%,460px),1fr)); gap:16px; align-items:start; }
.wide { grid-column:1/-1; }
.card { margin:0; background:var(--card); border:1px solid var(--line); border-radius:10px; padding:14px 16px; min-width:0; }
figcaption { display:grid; grid-template-columns:1fr auto; margin-bottom:8px; gap:0 12px; }
figcaption a { font-size:12px; color:var(--soft); }
.note { margin:0; color:var(--soft); font-size:13px; } figcaption .note { grid-column:1/-1; }
.error { margin:0; border-left:3px solid var(--bad); background:var(--card); padding:10px 14px; border-radius:0 8px 8px 0;
  white-space:pre-wrap; overflow-wrap:anywhere; font-size:13.5px; }
.plot { width:100%; } .plot.vega-embed { display:block; padding:0; }
.scroll { overflow-x:auto; } .card h3 + .scroll { margin-top:8px; }
table { border-collapse:collapse; width:100%; font-size:13.5px; font-variant-numeric:tabular-nums; }
th { text-align:left; font-weight:500; color:var(--soft); font-size:12.5px; white-space:nowrap; }
th, td { padding:6px 14px 6px 0; border-bottom:1px solid var(--line); vertical-align:top; }
td { overflow-wrap:break-word; max-width:520px; } td.short { white-space:nowrap; } tr:last-child td { border-bottom:0; }
details summary { cursor:pointer; font-size:14px; font-weight:600; } pre { overflow-x:auto; margin:10px 0 0; }
.pictures { display:grid; grid-template-columns:repeat(auto-fill,minmax(112px,1fr)); gap:14px; margin-top:10px; }
.pictures figure { margin:0; } .pictures img { width:100%; aspect-ratio:1; object-fit:contain; image-rendering:pixelated;
  border-radius:6px; background:#000; display:block; }
.pictures figcaption { display:block; font-size:12.5px; line-height:1.4; margin-top:5px; overflow-wrap:anywhere; }
.pictures b { font-weight:600; } .pictures .no { color:var(--bad); } .pictures small { color:var(--soft); display:block; }
#vg-tooltip-element { font-family:inherit; }
@media print { body { background:#fff; } .card, .numbers { break-inside:avoid; } }
"""

SCRIPT = """
(() => {
  const told = JSON.parse(document.getElementById('charts').textContent);
  const dark = window.matchMedia('(prefers-color-scheme: dark)');
  let views = [];
  const draw = async () => {
    views.forEach(view => view.finalize());
    views = [];
    const mode = dark.matches ? 'dark' : 'light';
    for (const [name, spec] of Object.entries(told.specs)) {
      const options = {actions: false, renderer: 'svg', config: told.configs[mode], tooltip: {theme: mode}};
      views.push(await vegaEmbed(document.getElementById(name), spec, options));
    }
    document.documentElement.dataset.drawn = mode;
  };
  dark.addEventListener('change', draw);
  draw();
})();
"""
