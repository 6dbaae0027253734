"""Are there known vulnerabilities in what is installed here? Ends with 1 if there are; with 3 if the advisory database
can not be reached, which is no answer."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request

SERVICE = "https://api.osv.dev/v1/query"
#: An old version whose vulnerabilities are known: a service that knows none of them is none.
PROBE = {"package": {"name": "jinja2", "ecosystem": "PyPI"}, "version": "2.4.1"}
FOUND, NOT_CHECKED = 1, 3


def reason_of_silence(service: str) -> str:
    """Empty if the advisory database answers as one."""
    request = urllib.request.Request(
        service, json.dumps(PROBE).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=15) as answer:
            found = json.load(answer)
    except (urllib.error.URLError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return (
        "" if isinstance(found, dict) and found.get("vulns") else "it does not know what it should"
    )


def main(service: str = SERVICE) -> int:
    reason = reason_of_silence(service)
    if reason:
        sys.stderr.write(
            f"audit: NOT CHECKED for known vulnerabilities: no answer from {service} ({reason})\n"
        )
        return NOT_CHECKED
    # Only here, where it can be of use.
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
