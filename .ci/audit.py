"""Check the installed packages for known vulnerabilities.

The exit status is 1 if there are any, and 3 if the advisory database cannot be reached.
"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request

SERVICE = "https://api.osv.dev/v1/query"
#: An old version with known vulnerabilities, to verify that the service has data.
PROBE = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
FOUND, NOT_CHECKED = 1, 3


def reason_of_silence(service: str) -> str:
    """Return why the advisory database is unusable, or an empty string."""
    request = urllib.request.Request(
        service, json.dumps(PROBE).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            found = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return (
        ""
        if isinstance(found, dict) and found.get("vulns")
        else "it does not know a known vulnerability"
    )


def main(service: str = SERVICE) -> int:
    reason = reason_of_silence(service)
    if reason:
        sys.stderr.write(
            f"audit: NOT CHECKED for known vulnerabilities: no answer from {service} ({reason})\n"
        )
        return NOT_CHECKED
    # Installed only if the service is reachable.
    subprocess.check_call([sys.executable, "-m", "pip", "install", "--quiet", "pip-audit>=2.7"])
    options = [
        "--local",
        "--skip-editable",
        "--vulnerability-service",
        "osv",
        "--progress-spinner",
        "off",
    ]
    return FOUND if subprocess.call([sys.executable, "-m", "pip_audit", *options]) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
