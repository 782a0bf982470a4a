"""A preview of data as one HTML file without anything from elsewhere."""

from __future__ import annotations

from html import escape
from pathlib import Path

from mlxlab.data.preview import Histogram, Preview, Run
from mlxlab.errors import DataError
from mlxlab.rundir import write_text

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; background: #8881; padding: .8rem; border-radius: 6px; }
mark { background: #2a72; color: inherit; border-bottom: 2px solid #2a7; }
.refused { color: #c33; }
td { padding: 0 .6rem 0 0; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.bar { background: #2a7; height: .8rem; }
"""


def write_html(preview: Preview, path: Path) -> Path:
    """Write the file atomically and return its path.

    Raises:
        DataError: it cannot be written.
    """
    try:
        write_text(path, to_html(preview))
    except OSError as error:
        raise DataError(f"output={path} cannot be written ({error}); give a file in a folder that exists.") from error
    return path.absolute()


def to_html(preview: Preview) -> str:
    """The whole document; every text of the data is escaped."""
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in preview.facts)
    refused = "".join(f"<li>{escape(line)}</li>" for line in preview.refused)
    rows = "".join(
        f"<h3>{escape(row.source)}</h3>"
        + "".join(f"<p>{escape(n)}</p><pre>{_marked(runs)}</pre>" for n, runs in row.branches)
        for row in preview.rows
    )
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<meta name="color-scheme" content="light dark">\n'
        f"<title>mlxlab data</title>\n<style>{_STYLE}</style>\n<h1>Data</h1>\n<table>{facts}</table>\n"
        + (f'<h2 class="refused">Refused rows</h2>\n<ul class="refused">{refused}</ul>\n' if refused else "")
        + "<h2>Lengths</h2>\n"
        + "".join(map(_histogram, preview.histograms))
        + f"\n<h2>Rows</h2>\n<p>Marked tokens are <mark>learned</mark>.</p>\n{rows}\n</html>\n"
    )


def _histogram(histogram: Histogram) -> str:
    highest = max((count for *_, count in histogram.bins), default=1)
    rows = "".join(
        f'<tr><td class="number">{first} to {last}</td><td class="number">{count}</td>'
        f'<td><div class="bar" style="width: {300 * count / highest:.0f}px"></div></td></tr>'
        for first, last, count in histogram.bins
    )
    return f"<h3>{escape(histogram.title)}</h3><table>{rows}</table>"


def _marked(runs: list[Run]) -> str:
    return "".join(f"<mark>{escape(text)}</mark>" if learned else escape(text) for text, learned in runs)
