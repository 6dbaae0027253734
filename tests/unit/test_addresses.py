"""Callbacks are sent only to addresses that the guard allows."""

from __future__ import annotations

from ipaddress import ip_address

import pytest

from delaytasks import ConfigError, ForbiddenURLError
from delaytasks.callbacks.sending import Guard

PUBLIC = [
    "https://partner.example/paid", "HTTPS://Partner.Example/paid", "https://1.2.3.4a/",
    "https://partner.example:8443?a=1&b=%C3%A9#x", "https://xn--bcher-kva.example",
    "https://93.184.216.34/", "https://[2606:2800:220:1:248:1893:25c8:1946]:444/",
]  # fmt: skip
NOT_PUBLIC = [
    "127.0.0.1", "127.1.2.3", "10.0.0.1", "172.31.255.255", "192.168.1.1", "169.254.169.254",
    "100.64.0.1", "0.0.0.0", "0.1.2.3", "192.0.0.8", "192.0.2.1", "198.18.0.1", "198.51.100.1",
    "203.0.113.7", "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255", "[::]", "[::1]",
    "[::ffff:127.0.0.1]", "[::ffff:93.184.216.34]", "[::7f00:1]", "[64:ff9b::7f00:1]",
    "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001:0:1::1]", "[2001:db8::1]", "[fc00::1]",
    "[fd00:ec2::254]", "[fe80::1]", "[fec0::1]", "[ff02::1]", "[100::1]", "[5f00::1]",
]  # fmt: skip
ODD = [
    # Only some programs accept these spellings of addresses.
    "https://0x7f.1", "https://0x7f000001", "https://017700000001", "https://2130706433",
    "https://127.1", "https://127.0.0.01", "https://1.2.3.0x4", "https://127.0.0.1.",
    "https://[::1%25eth0]", "https://[127.0.0.1]",
    # These names are invalid or not public.
    "https://localhost", "https://LOCALHOST:8080/", "https://foo.localhost", "https://redis",
    "https://partner.example.", "https://.example", "https://a..example", "https://-a.example",
    "https://" + "a" * 64 + ".example", "https://bücher.example", "https://①②⑦.⓪.⓪.①",
    "https://exa\u00admple.com",
    # Programs disagree about the host of these URLs.
    "https://user@partner.example/", "https://user:pw@partner.example/",
    "https://partner.example\\@10.0.0.1/", "https://partner.example#@10.0.0.1",
    "https:/partner.example", "https:partner.example", "//partner.example",
    "https://partner.example/a b", "https://partner.example/\r\nX: y",
    "https://partner.example/é", " https://a.example", "https://partner.example:0/",
    "https://partner.example:65536/", "https://partner.example:/", "https://", "",
    # These URLs do not use HTTP.
    "file:///etc/passwd", "ftp://partner.example/", "gopher://partner.example/",
    "javascript:alert(1)",
    # These values are not text.
    None, 7, b"https://partner.example/",
]  # fmt: skip


def guard(*allow: str, **names: list[str]) -> Guard:
    """Return a guard that resolves only these names. An underscore in a name stands for a dot."""
    known = {name.replace("_", "."): addresses for name, addresses in names.items()}

    def resolve(host: str, port: int) -> list[str]:
        if host not in known:
            raise OSError("no such name")
        return known[host]

    return Guard(allow, resolve)


@pytest.mark.parametrize("url", PUBLIC)
def test_public_https_urls_are_allowed(url: str) -> None:
    target = guard().check(url)
    assert (target.scheme, target.host) == ("https", target.host.lower())
    for end, path in (("", "/"), ("?a=1", "/?a=1"), ("/x?a#b", "/x?a"), ("?a#b", "/?a")):
        assert guard().check(f"https://partner.example{end}").path == path, "it has no fragment"


@pytest.mark.parametrize("host", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_forbidden_as_text_and_as_a_name(host: str) -> None:
    with pytest.raises(ForbiddenURLError, match="is not a public address"):
        guard().check(f"https://{host}/")
    named = guard(partner_example=[host.strip("[]")])
    with pytest.raises(ForbiddenURLError, match="is not a public address"):
        named.addresses(named.check("https://partner.example/"), 5)


@pytest.mark.parametrize("url", ODD)
def test_an_ambiguous_or_invalid_url_is_forbidden(url: object) -> None:
    with pytest.raises(ForbiddenURLError):
        guard().check(url)


def test_http_is_forbidden_and_an_error_does_not_quote_a_password() -> None:
    for url in ("http://partner.example/", "http://93.184.216.34/"):
        with pytest.raises(ForbiddenURLError, match="is not https"):
            guard().check(url)
    with pytest.raises(ForbiddenURLError) as raised:
        guard().check("https://user:hunter2@partner.example/")
    assert "hunter2" not in str(raised.value)


#: An entry of the setting, and URLs that it allows and does not allow.
ALLOWED = {
    "127.0.0.1": ("http://127.0.0.1:8080/", "https://10.0.0.1/"),
    "127.0.0.1:8080": ("http://127.0.0.1:8080/", "http://127.0.0.1:8081/"),
    "10.1.0.0/16": ("http://10.1.2.3/", "http://10.2.0.1/"),
    "::1": ("http://[::1]/", "http://127.0.0.1/"),
    "[::1]:8080": ("http://[0:0::1]:8080/", "http://[::1]/"),
    "fd00::/8": ("http://[fd00::1]/", "http://[fe80::1]/"),
    "localhost": ("http://LOCALHOST:1/", "http://redis:1/"),
    "Redis:6379": ("http://redis:6379/", "http://redis:6380/"),
}


@pytest.mark.parametrize("entry", ALLOWED)
def test_addresses_in_the_setting_are_allowed(entry: str) -> None:
    is_open, is_closed = ALLOWED[entry]
    guard(entry).check(is_open)
    with pytest.raises(ForbiddenURLError):
        guard(entry).check(is_closed)


def test_a_name_is_allowed_by_itself_or_if_it_resolves_into_an_allowed_network() -> None:
    names = {"billing": ["10.1.2.3"], "metadata": ["169.254.169.254"], "trusted": ["10.9.9.9"]}
    office = guard("10.1.0.0/16", "trusted", **names, public_example=["93.184.216.34"])
    for name in ("billing", "trusted"):
        found = office.addresses(office.check(f"http://{name}/"), 5)
        assert found == [ip_address(names[name][0])]
    for url in ("http://metadata/", "http://public.example/"):
        with pytest.raises(ForbiddenURLError):
            office.addresses(office.check(url), 5)


WRONG = ["10.0.0.1/8", "http://a.example", "a.example/", "127.1", "*", "*.a.example", "a:0", "a:"]


@pytest.mark.parametrize("entry", [*WRONG, ""])
def test_an_invalid_entry_of_the_setting_is_an_error(entry: str) -> None:
    with pytest.raises(ConfigError, match="callback_allow"):
        Guard([entry])
