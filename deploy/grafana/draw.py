"""Pictures of the dashboards, from a Prometheus that has scraped a deployment.

`python deploy/grafana/draw.py http://127.0.0.1:9090 docs/dashboards` writes one PNG for each file
of `dashboards/`, for machines without Grafana and for the documentation. It sends the same queries
as Grafana, with all values of each variable.
"""

from __future__ import annotations

import argparse
import re
import time
from datetime import UTC, datetime
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import matplotlib.pyplot as plt
from generate import DASHBOARDS, dashboard
from matplotlib import dates
from matplotlib.axes import Axes
from matplotlib.ticker import EngFormatter, PercentFormatter
from PIL import Image

POINTS = 240
MAX_LEGENDS = 8
COLOURS = 64
FORMATS = {"s": EngFormatter("s"), "bytes": EngFormatter("B"), "percentunit": PercentFormatter(1.0)}
ORDINARY = EngFormatter()


def expression(query: str) -> str:
    """The query as Grafana sends it: an interval of rates, and all values of each variable."""
    return re.sub(r'"\$\w+"', '".*"', query.replace("$__rate_interval", "1m"))


def legend(template: str, labels: dict[str, str]) -> str:
    """The name of a series; without the address where there is the name of a pod."""
    if "pod" in labels:
        template = template.replace(" {{instance}}", "")
    return re.sub(r"{{(\w+)}}", lambda found: labels.get(found[1], ""), template) or "(none)"


def draw_panel(axes: Axes, panel: dict[str, Any], prometheus: httpx.Client, minutes: int) -> None:
    """One panel: all series of its queries over the last minutes."""
    now = time.time()
    span = {"start": now - 60 * minutes, "end": now, "step": 60 * minutes / POINTS}
    for target in panel["targets"]:
        answer = prometheus.get(
            "/api/v1/query_range", params=span | {"query": expression(target["expr"])}
        )
        answer.raise_for_status()
        for series in answer.json()["data"]["result"]:
            times = [datetime.fromtimestamp(at, UTC) for at, _ in series["values"]]
            values = [float(value) for _, value in series["values"]]
            name = legend(target["legendFormat"], series["metric"])
            axes.plot(times, values, linewidth=1, label=name)
    axes.set_title(panel["title"], loc="left", fontsize=9)
    axes.yaxis.set_major_formatter(FORMATS.get(panel["fieldConfig"]["defaults"]["unit"], ORDINARY))
    axes.xaxis.set_major_formatter(dates.DateFormatter("%H:%M"))
    axes.xaxis.set_major_locator(dates.AutoDateLocator(maxticks=6))
    axes.set_xlim(*(datetime.fromtimestamp(span[end], UTC) for end in ("start", "end")))
    axes.set_ylim(bottom=0)
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.3)
    handles, labels = axes.get_legend_handles_labels()
    if handles:
        axes.legend(
            handles[:MAX_LEGENDS],
            labels[:MAX_LEGENDS],
            fontsize=6,
            loc="upper left",
            framealpha=0.5,
        )
    else:
        axes.text(0.5, 0.5, "no data", ha="center", transform=axes.transAxes)


def main() -> None:
    """Draw all dashboards."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("prometheus", help="its URL")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=int, default=10)
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    with httpx.Client(base_url=options.prometheus, timeout=30) as prometheus:
        for name in DASHBOARDS:
            board = dashboard(name)
            rows = (len(board["panels"]) + 1) // 2
            figure, grid = plt.subplots(rows, 2, figsize=(10, 2 * rows), layout="constrained")
            figure.suptitle(board["title"], fontsize=10)
            for axes, panel in zip(grid.flat, board["panels"], strict=False):
                draw_panel(axes, panel, prometheus, options.minutes)
            for axes in grid.flat[len(board["panels"]) :]:
                axes.set_axis_off()
            picture = BytesIO()
            figure.savefig(picture, dpi=80)
            plt.close(figure)
            Image.open(picture).quantize(COLOURS).save(
                options.folder / f"{name}.png", optimize=True
            )


if __name__ == "__main__":
    main()
