"""`batchway top`: polls a gateway's metrics page and shows it."""

import argparse
import io
import os
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from infra import options as opts
from infra.options import Option, Value
from infra.preconditions import UsageError, check_extra, running_up
from infra.tables import write

if TYPE_CHECKING:
    from rich.console import RenderableType

KEY_VARIABLE = "BATCHWAY_API_KEY"
_TIMEOUT_S = 5.0
_DEFAULT_URL = "http://127.0.0.1:8000"
_PICTURE_COLUMNS = 150


def add_top_options(parser: argparse.ArgumentParser) -> None:
    table = {
        "url": Option(
            "a gateway, which shows all of them",
            Value(str, "URL"),
            shown=f"that of the running `batchway up`, else {_DEFAULT_URL}",
        ),
        "interval_s": Option(
            "time between updates; rates and percentiles cover it", opts.SECONDS, 2.0
        ),
        "once": Option(
            "show the totals since counting began, once", None, shown="update until Ctrl-C"
        ),
        "svg": Option(
            "draw the change between two snapshots into this file, and end",
            Value(Path, "OUT"),
            shown="no picture",
        ),
    }
    opts.add_options(parser, table)
    opts.add_options(parser, opts.JSON)


def run_top(options: argparse.Namespace) -> int:
    """Raises UsageError if the gateway cannot be reached."""
    check_extra("top")
    if options.url is None:
        up = running_up()
        options.url = _DEFAULT_URL if up is None else up.gateway_url
    if not options.url.startswith(("http://", "https://")):
        raise UsageError(f"--url must begin with http:// or https://, not {options.url!r}")
    if options.svg is not None:
        _draw(options)
    elif options.once or options.json is not None or not sys.stdout.isatty():
        _show_once(options)
    else:
        _watch(options)
    return 0


def _fetch(options: argparse.Namespace) -> str:
    key = os.environ.get(KEY_VARIABLE)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    url = f"{options.url.rstrip('/')}/metrics"
    request = urllib.request.Request(url, headers=headers)  # noqa: S310 - checked above
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:  # noqa: S310
            text: str = answer.read().decode()
            return text
    except urllib.error.HTTPError as exc:
        hint = {401: f": it wants {KEY_VARIABLE}", 403: ": the key lacks the scope `metrics`"}
        raise UsageError(f"{url} answers {exc.code}{hint.get(exc.code, '')}") from exc
    except OSError as exc:
        raise UsageError(f"{url} does not answer: {getattr(exc, 'reason', exc)}") from exc


def _show_once(options: argparse.Namespace) -> None:
    from rich.console import Console

    from contract.telemetry.metrics_reader import MetricsSamples, look
    from infra.top_screen import screen

    snapshot = look(MetricsSamples.parse(_fetch(options)))
    console = Console(width=None if sys.stdout.isatty() else _PICTURE_COLUMNS)
    with console.capture() as capture:
        console.print(screen(snapshot, options.url))
    write(asdict(snapshot), capture.get().rstrip("\n"), options.json)


def _looks(options: argparse.Namespace) -> Callable[[], "RenderableType"]:
    """Renders the change since the previous call."""
    from contract.telemetry.metrics_reader import MetricsSamples, look
    from infra.top_screen import screen

    before: tuple[float, MetricsSamples] | None = None

    def next_look() -> "RenderableType":
        nonlocal before
        now_s, page = time.monotonic(), MetricsSamples.parse(_fetch(options))
        snapshot = look(page) if before is None else look(page, before[1], now_s - before[0])
        before = now_s, page
        return screen(snapshot, options.url)

    return next_look


def _draw(options: argparse.Namespace) -> None:
    from rich.console import Console

    next_look = _looks(options)
    next_look()
    time.sleep(options.interval_s)
    console = Console(record=True, width=_PICTURE_COLUMNS, file=io.StringIO())
    console.print(next_look())
    drawn = console.export_svg(title="batchway top")
    # Remove web fonts, which a viewer would download.
    options.svg.write_text(re.sub(r"@font-face \{.*?\}\s*", "", drawn, flags=re.DOTALL))
    print(f"drawn into {options.svg}")


def _watch(options: argparse.Namespace) -> None:
    """Updates the screen. Waits for a gateway that stops answering, but not for one that never
    answered."""
    from rich.live import Live
    from rich.text import Text

    next_look = _looks(options)
    with Live(next_look(), screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(options.interval_s)
            try:
                live.update(next_look(), refresh=True)
            except UsageError as exc:
                live.update(Text(str(exc), "red"), refresh=True)
