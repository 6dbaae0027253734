"""Callbacks by TLS."""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from delaytasks import Done
from tests.integration.http_callbacks.caller import HEAD, Caller, listener
from tests.proxy import WebServer, drip, hang


class Authority:
    """Issue certificates for the servers of a test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.file = folder / "ca.pem"
        self._key = folder / "ca.key"
        # Since Python 3.13 a default context checks certificates as strictly as RFC 5280, which
        # requires the key usage of a certificate authority.
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")
        self._run(
            "req",
            "-x509",
            "-subj",
            "/CN=Test CA",
            "-days",
            "2",
            *usage,
            "-keyout",
            self._key,
            "-out",
            self.file,
        )

    def context(self, san: str) -> ssl.SSLContext:
        key, request, certificate, names = (
            self._folder / f"server.{end}" for end in ("key", "csr", "pem", "ext")
        )
        names.write_text(f"subjectAltName={san}\nauthorityKeyIdentifier=keyid\n")
        self._run("req", "-subj", "/CN=server", "-keyout", key, "-out", request)
        signing = (
            "-CA",
            self.file,
            "-CAkey",
            self._key,
            "-CAcreateserial",
            "-days",
            "2",
            "-extfile",
            names,
        )
        self._run("x509", "-req", "-in", request, "-out", certificate, *signing, new_key=False)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        return context

    @staticmethod
    def _run(command: str, *options: object, new_key: bool = True) -> None:
        made = (
            ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
            if new_key
            else ()
        )
        subprocess.run(
            ["openssl", command, *made, *map(str, options)], check=True, capture_output=True
        )


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ca"))


Secure = Callable[[str], WebServer]


@pytest.fixture
def secure(authority: Authority) -> Iterator[Secure]:
    made: list[WebServer] = []

    def start(san: str) -> WebServer:
        context = authority.context(san)
        server = WebServer(context)
        server.asked_for = asked = []  # type: ignore[attr-defined]
        context.sni_callback = lambda sock, name, _: asked.append(name)
        made.append(server)
        return server

    yield start
    for server in made:
        server.close()


def test_a_pinned_address_is_asked_for_the_hosts_certificate_and_checked_by_the_hosts_name(
    secure: Secure, authority: Authority
) -> None:
    server = secure("DNS:partner.example")
    caller = Caller(ca_file=str(authority.file))
    for _ in range(2):
        assert caller.post(server.url("/", "partner.example", "https")) == Done()
    assert server.asked_for == ["partner.example"]  # type: ignore[attr-defined]
    assert server.accepted == 1
    outcome = caller.post(server.url("/", "other.example", "https"))
    assert outcome.reason.startswith("network: SSLError at other.example:")
    assert (
        "not valid for 'other.example'" in outcome.reason or "Hostname mismatch" in outcome.reason
    )
    assert len(server.received) == 2


def test_a_certificate_for_the_address_is_not_valid_for_the_name(
    secure: Secure, authority: Authority
) -> None:
    server = secure("IP:127.0.0.1")
    caller = Caller(ca_file=str(authority.file))
    assert caller.post(server.url("/", "127.0.0.1", "https")) == Done()
    assert caller.post(server.url("/", "partner.example", "https")).reason.startswith(
        "network: SSLError"
    )


def test_a_certificate_of_an_unknown_authority_is_refused(secure: Secure) -> None:
    server = secure("DNS:partner.example")
    outcome = Caller().post(server.url("/", "partner.example", "https"))
    assert outcome.reason.startswith("network: SSLError")
    assert "certificate" in outcome.reason
    assert server.received == []


def test_tls_errors_are_bounded_in_time_as_well(secure: Secure, authority: Authority) -> None:
    server = secure("DNS:partner.example")
    server.answers = {
        "/head": drip(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        "/body": drip(HEAD, b"x"),
        "/hang": hang,
    }
    caller = Caller(ca_file=str(authority.file))
    for path in ("/head", "/hang"):
        assert caller.post(server.url(path, "partner.example", "https")).reason.startswith(
            "network: "
        )
    assert caller.post(server.url("/body", "partner.example", "https")).reason.startswith(
        "HTTP 500"
    )
    with listener() as port:
        outcome = caller.post(f"https://partner.example:{port}/")
    assert outcome.reason.startswith("network: ")
