"""One page of HTML about a simulation: its text, and plots over time."""

import html as escaping
import io
from typing import Any

from infra.planning.outcome import SimulationOutcome

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>batchway simulate</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 64rem; }}
pre {{ overflow-x: auto; background: #f4f5f7; padding: 1rem; border-radius: 6px; }}
svg {{ width: 100%; height: auto; }}
</style>
<h1>A simulated fleet</h1>
<p>Times are virtual. The plots show means over equal intervals.</p>
<pre>{text}</pre>
{figure}
</html>
"""
_NUM_BINS = 120
_COLOURS = ("#2a9d5c", "#6a9fd0", "#e0a030", "#c03030")


def html(found: SimulationOutcome, text: str) -> str:
    """The page. Raises ImportError without matplotlib."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, bin_s = _binned(found)
    times = [bin_s * (number + 0.5) for number in range(len(rows))]
    with rc_context({"svg.hashsalt": "batchway"}):  # the same bytes each time
        figure = Figure(figsize=(11, 10), layout="constrained")
        panels: Any = figure.subplots(4, 1, sharex=True)
        titles = ("output tokens/s", "sequences in a step", "jobs that wait", "workers")
        for axes, title, values, colour in zip(
            panels, titles, zip(*rows, strict=True), _COLOURS, strict=True
        ):
            axes.plot(times, values, color=colour)
            axes.set(ylabel=title)
            axes.set_ylim(bottom=0)
            axes.grid(alpha=0.3)
        panels[-1].set(xlabel="seconds")
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    svg = drawn.getvalue()
    return _PAGE.format(text=escaping.escape(text), figure=svg[svg.index("<svg") :])


def _binned(found: SimulationOutcome) -> tuple[list[tuple[float, float, float, float]], float]:
    """Tokens/s, sequences in a step, waiting jobs and workers, each by interval; its seconds."""
    num_seconds = max(found.seconds, default=0) + 1
    size = max(1, -(-num_seconds // _NUM_BINS))
    rows = []
    for start in range(0, num_seconds, size):
        part = [s for at in range(start, start + size) if (s := found.seconds.get(at)) is not None]
        busy_s = sum(second.busy_s for second in part)
        num = max(1, len(part))
        rows.append(
            (
                sum(second.num_tokens for second in part) / size,
                sum(second.sequence_s for second in part) / busy_s if busy_s else 0.0,
                sum(second.num_waiting for second in part) / num,
                sum(second.num_workers for second in part) / num,
            )
        )
    return rows, float(size)
