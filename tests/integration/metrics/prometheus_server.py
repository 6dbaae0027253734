"""A private Prometheus, which scrapes what a test starts."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import requests

from tests.services import MissingServiceError, free_port
from tests.waiting import wait_until


class PrometheusServer:
    """Scrapes `targets`, by the names of their jobs, each second."""

    def __init__(self, folder: Path, targets: dict[str, int], rules: Path) -> None:
        program = shutil.which("prometheus")
        if program is None:
            raise MissingServiceError("prometheus is not on the PATH")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(rules)],
            "scrape_configs": [
                {"job_name": name, "static_configs": [{"targets": [f"127.0.0.1:{port}"]}]}
                for name, port in targets.items()
            ],
        }
        file = folder / "prometheus.yml"
        file.write_text(json.dumps(config))  # JSON is YAML, too
        port = free_port()
        self.url = f"http://127.0.0.1:{port}/api/v1"
        self.log = folder / "prometheus.log"
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={file}",
                    f"--storage.tsdb.path={folder / 'tsdb'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(self._answers, 60, lambda: self.log.read_text(), every_s=0.2)
        except BaseException:
            self.stop()
            raise

    def _answers(self) -> bool:
        assert self._process.poll() is None, self.log.read_text()
        try:
            return requests.get(self.url.replace("/api/v1", "/-/ready"), timeout=5).ok
        except requests.ConnectionError:
            return False

    def get(self, path: str, **parameters: str) -> Any:
        answer = requests.get(f"{self.url}/{path}", params=parameters, timeout=30).json()
        assert answer["status"] == "success", answer
        return answer["data"]

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the values of an expression now, with their labels."""
        found: list[dict[str, Any]] = self.get("query", query=expression)["result"]
        return found

    def value(self, expression: str) -> float | None:
        """Return the only value of an expression, or None without one."""
        found = self.query(expression)
        assert len(found) <= 1, found
        return float(found[0]["value"][1]) if found else None

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(30)
