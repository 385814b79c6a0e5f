"""The screen of `batchway top`, drawn with rich from a MetricsReader."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from contract.telemetry.metrics_reader import CLASSES, EngineRow, LaneRow, MetricsReader, WorkerRow

_STALE_S = 7.5  # two missed heartbeats and some slack
_OLD_S = 60.0
_LOW_DECODE = 0.7  # of the steps' time
_CLASS_STYLES = {"decode": "green", "mixed": "yellow", "prefill": "blue"}
_BAR_CELLS = 12


def screen(snapshot: MetricsReader, where: str) -> RenderableType:
    """Draws one screen, top to bottom: callers, workers, steps."""
    return Group(_head(snapshot, where), _lanes(snapshot.lanes), _workers(snapshot.workers),
                 _engines(snapshot.engines))  # fmt: skip


def _head(snapshot: MetricsReader, where: str) -> Text:
    span = (
        "since counting began" if snapshot.window_s is None else f"last {snapshot.window_s:.0f} s"
    )
    text = Text.assemble(("batchway top", "bold"), f"  {where}  {span}  ")
    text.append(f"{snapshot.open_streams} open streams")
    if not snapshot.is_broker_up:
        text.append("  Redis does not answer", "bold red")
    for reason, num in sorted(snapshot.refusals.items()):
        text.append(f"  {num} refused: {reason}", "yellow")
    for model, reason in sorted(snapshot.failed.items()):
        text.append(f"\n{model} has failed: {reason}", "bold red")
    return text


def _table(title: str, *columns: str) -> Table:
    """A table whose first two columns are names, and the others numbers."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, expand=False)
    for i, column in enumerate(columns):
        table.add_column(column, justify="left" if i < 2 else "right", no_wrap=True)
    return table


def _lanes(rows: tuple[LaneRow, ...]) -> Table:
    table = _table(
        "Lanes: times as p50 and p99", "model", "lane", "running", "waiting", "tokens waiting",
        "oldest", "jobs/s", "tokens/s", "wait", "first token", "between tokens",
    )  # fmt: skip
    for row in rows:
        oldest = Text(_seconds(row.oldest_s), "red" if row.oldest_s > _OLD_S else "")
        table.add_row(
            row.model,
            row.lane,
            str(row.num_running),
            Text(str(row.num_waiting), "yellow" if row.num_waiting else ""),
            f"{row.queue_tokens:,}",
            oldest,
            _rate(row.jobs_per_s),
            _rate(row.tokens_per_s),
            _pair(row.wait_s),
            _pair(row.ttft_s),
            _pair(row.itl_s),
        )
    return table


def _workers(rows: tuple[WorkerRow, ...]) -> Table:
    table = _table(
        "Workers", "model", "worker", "heartbeat", "jobs", "sequences", "waiting inside", "KV", ""
    )
    for row in rows:
        seen = Text(f"{row.seen_s:.1f} s ago", "red" if row.seen_s > _STALE_S else "")
        figures = (str(row.num_jobs), str(row.num_running), str(row.num_waiting))
        bar = Text("█" * round(row.kv_usage * _BAR_CELLS), "green")
        table.add_row(row.model, row.worker, seen, *figures, f"{row.kv_usage:.0%}", bar)
    return table


def _engines(rows: tuple[EngineRow, ...]) -> Table:
    table = _table(
        "Engines: steps as p50 and p99", "model", "time", "decode", "mixed", "prefill", "batch",
        "prompts", "padding", "prefix hits", "preempted",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row.model,
            _classes(row),
            *(_pair(row.step_s[kind]) for kind in ("decode", "mixed", "prefill")),
            "-" if row.batch_size is None else f"{row.batch_size:.1f}",
            _percent(row.prompt_share),
            _percent(row.padding),
            _percent(row.prefix_hits),
            Text(str(row.num_preemptions), "yellow" if row.num_preemptions else ""),
        )
    return table


def _classes(row: EngineRow) -> Text:
    """Draws the busy share of the engines, with a bar of decode, mixed and prefill."""
    if not any(row.step_share.values()):
        return Text("idle", "dim")
    text = Text()
    for kind in CLASSES:
        text.append("█" * round(row.step_share[kind] * _BAR_CELLS), _CLASS_STYLES[kind])
    text.append(" ")
    text.append(
        f"{row.step_share['decode']:.0%} decode",
        "yellow" if row.step_share["decode"] < _LOW_DECODE else "",
    )
    if row.busy is not None:
        text.append(f", {min(1.0, sum(row.busy.values())):.0%} busy")
    return text


def _pair(pair: tuple[float, float] | None) -> str:
    return "-" if pair is None else f"{_seconds(pair[0])} {_seconds(pair[1]):>7}"


def _seconds(seconds: float) -> str:
    if seconds == 0:
        return "-"
    if seconds < 1:
        return f"{1000 * seconds:.3g} ms" if seconds < 0.1 else f"{1000 * seconds:.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else f"{per_s:,.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"
