"""A heat map of a prompt as one HTML page that needs nothing else, in light and in dark."""

from html import escape

import numpy as np

from specprefill_jax.engine import Scored
from specprefill_jax.report.heat import LEVELS, kept_mask, levels, runs
from specprefill_jax.report.terminal import selection_line

_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfa; --text: #1a1a18; --faint: #6f6f69; --line: #d8d8d0;
        --heat: 214 90 20; }
@media (prefers-color-scheme: dark) {
  :root { --page: #151514; --text: #ecece6; --faint: #908f88; --line: #3a3a36; --heat: 235 120 40; }
}
body { margin: 2rem auto; max-width: 72rem; padding: 0 1rem; background: var(--page); color: var(--text);
       font: 15px/1.6 system-ui, sans-serif; }
h1 { font-size: 1.3rem; margin: 0 0 .3rem; }
p { margin: .3rem 0; }
.prompt { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.9 ui-monospace, monospace;
          border-top: 1px solid var(--line); margin-top: 1rem; padding-top: 1rem; }
.prompt span { border-radius: 2px; padding: .15em 0; }
.kept { border-bottom: 2px solid var(--text); }
.dropped { color: var(--faint); }
table { border-collapse: collapse; margin: .6rem 0; font-variant-numeric: tabular-nums; }
td { padding: .05rem 1.2rem .05rem 0; }
td + td { text-align: right; }
""" + "\n".join(
    f".h{i} {{ background: rgb(var(--heat) / {i / (LEVELS - 1) * 0.75:.2f}); }}" for i in range(LEVELS)
)


def heat_map(scored: Scored) -> str:
    """The page: counts, times, and the prompt with each token's importance behind it, kept ones underlined.

    Pointing at a token tells its positions, its chunk and the chunk's score.
    """
    read = "in one pass" if scored.scoring == "continuous" else f"by {len(scored.windows)} windows"
    times = "".join(
        f"<tr><td>{escape(phase)}</td><td>{milliseconds:.1f} ms</td></tr>"
        for phase, milliseconds in scored.phases.items()
    )
    scale = "".join(f'<span class="h{i}">&nbsp;{i}&nbsp;</span>' for i in range(LEVELS))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>What is kept of the prompt</title>
<style>{_STYLE}
</style>
</head>
<body>
<h1>What is kept of the prompt</h1>
<p>{escape(selection_line(scored.selection))}. The draft read it {read}.</p>
<p class="prompt">{scale} importance
<span class="kept">kept</span> <span class="dropped">dropped</span></p>
<table>{times}</table>
<div class="prompt">{_spans(scored)}</div>
</body>
</html>
"""


def _spans(scored: Scored) -> str:
    """Neighbors that look alike share a span, within a chunk."""
    kept, heat = kept_mask(scored), levels(scored.importance)
    sizes = np.diff(scored.selection.edges)
    chunk = np.repeat(np.arange(sizes.size), sizes)
    spans = []
    for start, end in runs((chunk * 2 + kept) * LEVELS + heat):
        text = escape("".join(scored.pieces[start:end]))
        kind = "kept" if kept[start] else "dropped"
        title = _title(scored, start, end, int(chunk[start]))
        spans.append(f'<span class="{kind} h{heat[start]}" title="{title}">{text}</span>')
    return "".join(spans)


def _title(scored: Scored, start: int, end: int, chunk: int) -> str:
    where = f"token {start}" if end == start + 1 else f"tokens {start}-{end - 1}"
    scores = scored.selection.chunk_scores
    score = f", score {scores[chunk]:.3f}" if scores.size else ""
    return f"{where}, chunk {chunk}{score}"
