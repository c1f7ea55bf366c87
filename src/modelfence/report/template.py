"""The frame of the report page: markup and style sheet, light and dark."""

from string import Template

from modelfence import __version__
from modelfence.report.style import THEME

_LIGHT = "".join(f"--{name}:{colour};" for colour, name in THEME.items())

_STYLE = f"""
:root{{color-scheme:light dark;{_LIGHT}--paper:#ffffff;--raised:#f4f6f8}}
@media (prefers-color-scheme:dark){{:root{{--ink:#e6e9ed;--muted:#9aa5b1;--grid:#343b44;--before:#64707d;
--authorized:#2bb3a9;--unauthorized:#f0713f;--refreshed:#e8b45a;--paper:#14181d;--raised:#1e242b}}}}
*{{box-sizing:border-box}}
body{{margin:0 auto;max-width:66rem;padding:1.5rem 1rem 4rem;background:var(--paper);color:var(--ink);
font:1rem/1.55 system-ui,sans-serif}}
h1{{font-size:1.6rem;line-height:1.25;margin:0 0 .25rem;overflow-wrap:anywhere}}
h2{{font-size:1.2rem;margin:2.5rem 0 .75rem;padding-top:.75rem;border-top:1px solid var(--grid)}}
h3{{font-size:1rem;margin:1.5rem 0 .25rem}}
p,ul{{max-width:44rem}}
ul{{padding-left:1.2rem}}
li{{margin:.3rem 0;overflow-wrap:anywhere}}
.tiles{{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.75rem;margin:1rem 0}}
.tiles div{{background:var(--raised);border-radius:.5rem;padding:.75rem .9rem}}
.tiles dt{{color:var(--muted);font-size:.85rem}}
.tiles dd{{margin:0;font-size:.85rem;color:var(--muted)}}
.tiles b{{display:block;font-size:1.5rem;line-height:1.3;color:var(--ink);font-variant-numeric:tabular-nums}}
figure{{margin:1rem 0}}
figcaption,caption,.made{{color:var(--muted);font-size:.85rem;text-align:left}}
.wide{{overflow-x:auto}}
svg{{display:block;width:100%;min-width:26rem;max-width:42rem;height:auto}}
svg *{{stroke-linejoin:round;stroke-linecap:butt}}
svg text{{font-family:system-ui,sans-serif!important}}
table{{border-collapse:collapse;font-size:.85rem;font-variant-numeric:tabular-nums;margin:.75rem 0}}
caption{{padding-bottom:.4rem}}
th,td{{padding:.35rem .45rem;text-align:right;border-bottom:1px solid var(--grid);vertical-align:baseline}}
thead th{{vertical-align:bottom}}
th[scope=row],thead tr:first-child th:first-child,.config td{{text-align:left}}
thead th{{color:var(--muted);font-weight:500}}
th.group{{text-align:center;border-left:.5rem solid var(--paper)}}
tbody th{{font-weight:600;position:sticky;left:0;background:var(--paper);
min-width:8rem;max-width:12rem;overflow-wrap:break-word}}
th small{{display:block;font-weight:400;font-size:.75rem;color:var(--unauthorized)}}
.authorized small{{color:var(--authorized)}}
.config td,.config tbody th{{font-family:ui-monospace,monospace;font-weight:400;overflow-wrap:anywhere}}
.config td{{min-width:12rem}}
@media print{{svg{{max-width:16cm}}section{{break-inside:avoid}}}}
"""

PAGE = Template(f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<meta name="generator" content="modelfence {__version__}">
<title>$title</title>
<style>{_STYLE}</style>
</head>
<body>
<header>
<h1>$title</h1>
<p class="made">Report of modelfence {__version__}</p>
</header>
<main>
$body
</main>
</body>
</html>
""")
"""Substitute ``title`` (escaped) and ``body`` (markup)."""
