"""Do the dashboard's queries give rows? A real Prometheus scrapes our metrics, and is asked each of them.

    python -m tests.lab.panels PROMETHEUS

PROMETHEUS is the program; `.ci/alerts` gets it out of Debian's package. It exits with 1 if a query fails or finds nothing.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import tempfile
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode
from urllib.request import urlopen

from devices.source import Reading
from gateway.telling import gpumetrics
from gateway.telling.metrics import Metrics
from tests.unit import documents

DASHBOARD: Final = Path(__file__).parents[2] / "deploy/chart/files/dashboard.json"
SET: Final = {"$node": "node-.", "$resource": ".*", "$__rate_interval": "10s"}
SECONDS: Final = 30.0
"""For how long a query may find nothing: rates need two scrapes."""


class Scraped(BaseHTTPRequestHandler):
    """Answers with the metrics of a node that has every trouble."""

    def do_GET(self) -> None:
        metrics = Metrics(lambda _: lambda: documents.FULL, documents.counted(), device_ids=True)
        metrics.take()
        reading = Reading(documents.IDS[0], "0", 0, busy=93.0, used=70_000.0, free=10_000.0, celsius=61.0, watts=400.0)
        self.send_response(200)
        self.send_header("Content-Type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(metrics.exposition() + gpumetrics.text([reading], {}, "node-1"))

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def rows(address: str, query: str) -> int:
    """Return how many rows a query finds, or raise what Prometheus says against it."""
    with urlopen(f"http://{address}/api/v1/query?{urlencode({'query': query})}", timeout=5) as answer:
        return len(json.load(answer)["data"]["result"])


def wait(address: str, query: str) -> bool:
    """Ask until there are rows."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        try:
            if rows(address, query):
                return True
        except OSError as error:  # It still starts, or the query is wrong.
            if getattr(error, "code", 503) == 400:
                return False
        time.sleep(0.3)
    return False


def main(prometheus: str) -> None:
    """Ask every panel's queries."""
    server = HTTPServer(("127.0.0.1", 0), Scraped)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        target = {"targets": [f"127.0.0.1:{server.server_port}"], "labels": {"node": "node-1"}}
        job = {"job_name": "gpu", "scrape_interval": "1s", "static_configs": [target]}
        (config := Path(folder) / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        options = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data", f"--web.listen-address={address}"]
        with subprocess.Popen([prometheus, *options], stderr=subprocess.DEVNULL) as process:
            try:
                wait(address, "up == 1")
                queries = [
                    (panel["title"], target["expr"])
                    for panel in json.loads(DASHBOARD.read_text())["panels"]
                    for target in panel["targets"]
                ]
                empty = []
                for title, query in queries:
                    asked = query
                    for name, value in SET.items():
                        asked = asked.replace(name, value)
                    if not wait(address, asked):
                        empty.append(f"{title}: {asked}")
            finally:
                process.terminate()
    if empty:
        sys.exit("\n".join(["these queries of the dashboard find nothing:", *empty]))
    sys.stdout.write(f"dashboard: {len(queries)} queries find rows\n")


if __name__ == "__main__":
    main(sys.argv[1])
