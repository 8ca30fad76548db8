"""Record what the dashboard shows: ask a Prometheus server each query of docs/grafana.json, as Grafana would.

    python docs/site/dashboard.py http://localhost:9090 BEGIN END

BEGIN and END are Unix times. The answers go to docs/data/dashboard.json, and docs/site/pictures.py draws them. The file
in the repository is of `python examples/openai_server serve --prefill 2 --decode 2`, scraped every 2 s: three clients,
eight after 90 s, and `decode-0` killed after 170 s.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode
from urllib.request import urlopen

DOCS = Path(__file__).resolve().parents[1]
PANELS, POINTS = 8, 90
RATE_INTERVAL = "10s"


def main() -> None:
    server, begin_s, end_s = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
    panels = [panel for panel in json.loads((DOCS / "grafana.json").read_text())["panels"] if panel.get("targets")]
    recorded = [
        {
            "title": panel["title"],
            "unit": panel["fieldConfig"]["defaults"]["unit"],
            "series": [
                series for target in panel["targets"] for series in asked(server, target, begin_s, end_s) if series
            ],
        }
        for panel in panels[:PANELS]
    ]
    (DOCS / "data" / "dashboard.json").write_text(json.dumps(recorded, indent=1) + "\n")


def asked(server: str, target: dict[str, Any], begin_s: float, end_s: float) -> list[dict[str, Any]]:
    """Return the series of one query: a legend, and points of seconds since `begin_s` and value."""
    query = target["expr"].replace("$__rate_interval", RATE_INTERVAL)
    query = re.sub(r"\$\w+", ".*", query)  # every variable of the dashboard is "All"
    asking = urlencode({"query": query, "start": begin_s, "end": end_s, "step": (end_s - begin_s) / POINTS})
    with urlopen(f"{server}/api/v1/query_range?{asking}") as response:
        found = json.load(response)["data"]["result"]
    return [
        {
            "legend": legend(target["legendFormat"], series["metric"]),
            "points": [
                [round(at - begin_s, 1), float(f"{float(value):.4g}")]
                for at, value in series["values"]
                if value != "NaN"
            ],
        }
        for series in found
    ]


def legend(template: str, labels: Mapping[str, str]) -> str:
    """Return a legend with the labels in place of their names in double braces."""
    return re.sub(r"{{(\w+)}}", lambda name: labels.get(name[1], ""), template)


if __name__ == "__main__":
    main()
