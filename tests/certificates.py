"""Self-signed certificates for servers on this machine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from tests.services import MissingServiceError


class Certificate(NamedTuple):
    key: Path
    file: Path


def self_signed(folder: Path) -> Certificate:
    """Create a certificate for `localhost` and 127.0.0.1."""
    if shutil.which("openssl") is None:
        raise MissingServiceError("there is no openssl on this machine")
    made = Certificate(folder / "key.pem", folder / "cert.pem")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-days",
            "1",
            "-subj",
            "/CN=localhost",
            "-addext",
            "subjectAltName=DNS:localhost,IP:127.0.0.1",
            "-addext",
            "keyUsage=critical,digitalSignature,keyEncipherment,keyCertSign",
            "-keyout",
            made.key,
            "-out",
            made.file,
        ],
        check=True,
        capture_output=True,
    )
    return made
