"""The console as a tab of a real Flower, for the users of Flower."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import requests
from sqlalchemy import text
from tornado.web import create_signed_value

from tests.doc_pages import block_beginning
from tests.running import Deployment
from tests.waiting import wait_until

pytestmark = pytest.mark.slow

SECRET = "a cookie secret of Flower"
Start = Callable[..., str]


@pytest.fixture(scope="module")
def deployment(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("flower-console")
    url, broker = (request.getfixturevalue(name) for name in ("postgresql_url", "redis_url"))
    made = Deployment(folder, url, broker)
    yield made
    made.close()


@pytest.fixture(scope="module")
def start(deployment: Deployment) -> Start:
    """Start Flower with arguments of `add_console` and options, and return its address.

    With None, the arguments are those in docs/flower.md.
    """
    documented = block_beginning("docs/flower.md", "from delaytasks.console.viewers import").text

    def started(arguments: str | None, *options: str, prefix: str = "") -> str:
        config = deployment.folder / "flowerconfig.py"
        if arguments is None:
            config.write_text(documented)
        else:
            imports = documented.partition("\nadd_console(")[0]
            config.write_text(f"{imports}\nadd_console({arguments})\n")
        return deployment.flower(
            f"--conf={config}", "--enable-events=False", *options, prefix=prefix
        )

    return started


@pytest.fixture(scope="module")
def with_passwords(start: Start) -> str:
    return start(None, "--basic-auth=ann:secret,bob:other")


def session(name: str, password: str) -> requests.Session:
    made = requests.Session()
    made.auth = (name, password)
    return made


def chip(page: str) -> list[tuple[str, str]]:
    """Return the name and the role of the viewer."""
    return re.findall(r'<summary[^>]*>(\S+) <span class="chip">(\w+)</span>', page)


@pytest.mark.quick
def test_each_page_of_flower_has_the_tab_and_the_console_leads_back(with_passwords: str) -> None:
    ann = session("ann", "secret")
    for path in ("/", "/tasks", "/broker"):
        page = ann.get(f"{with_passwords}{path}").text
        assert re.findall(r'href="([^"]+)">Delays</a>', page) == ["/delays/"], path
        assert 'href="/tasks"' in page
    console = ann.get(f"{with_passwords}/delays/")
    assert console.status_code == 200
    assert '<section class="verdict' in console.text
    assert re.search(r'<a [^>]*href="/"[^>]*>.*← ?</span> Flower</a>', console.text)
    style = re.search(r'href="(/delays/static/console\.css[^"]*)"', console.text)
    assert style is not None
    assert "--ground" in ann.get(f"{with_passwords}{style[1]}").text


def test_users_of_flower_have_the_role_of_their_name(
    with_passwords: str, deployment: Deployment
) -> None:
    ann, bob = session("ann", "secret"), session("bob", "other")
    page = ann.get(f"{with_passwords}/delays/policies").text
    assert chip(page) == [("ann", "operate")]
    assert chip(bob.get(f"{with_passwords}/delays/").text) == [("bob", "view")]
    token = re.search(r'name="csrf" value="([^"]+)"', page)
    assert token is not None
    pause = {"csrf": token[1], "kind": "tag", "name": "mail"}
    address = f"{with_passwords}/delays/policies/pause"
    assert ann.post(address, data={**pause, "csrf": "wrong"}).status_code == 403
    assert ann.post(address, data=pause, allow_redirects=False).status_code == 303
    assert deployment.delays.policies(tag="mail")[0].updated_by == "ann"
    assert bob.post(address, data=pause).status_code == 403


@pytest.mark.parametrize("path", ["/delays", "/delays/", "/delays/static/console.css"])
def test_flower_asks_for_the_password_first(with_passwords: str, path: str) -> None:
    for asking in (requests.Session(), session("ann", "wrong")):
        answer = asking.get(f"{with_passwords}{path}", allow_redirects=False)
        assert answer.status_code == 401
        assert "Basic" in answer.headers["WWW-Authenticate"]


def test_flower_answers_while_a_page_of_the_console_waits_for_the_database(
    with_passwords: str, deployment: Deployment
) -> None:
    ann, answers = session("ann", "secret"), list[Any]()
    database, table = deployment.store.database, deployment.store.schema.audit.name
    with database.begin() as connection:
        connection.execute(text(f"LOCK TABLE {table} IN ACCESS EXCLUSIVE MODE"))
        thread = threading.Thread(
            target=lambda: answers.append(ann.get(f"{with_passwords}/delays/audit"))
        )
        thread.start()
        waiting = text("SELECT count(*) FROM pg_locks WHERE NOT granted")
        wait_until(lambda: connection.execute(waiting).scalar_one(), 10, "the page to wait")
        assert requests.get(f"{with_passwords}/healthcheck", timeout=5).ok
        assert answers == []
    thread.join(30)
    assert answers[0].status_code == 200


def test_without_authentication_of_flower_the_console_is_closed_unless_it_is_opened(
    start: Start,
) -> None:
    closed = start("", prefix="/ops")
    assert requests.get(f"{closed}/").ok
    refused = requests.get(f"{closed}/delays/")
    assert (refused.status_code, "Not logged in" in refused.text) == (401, True)
    opened = start("anonymous=Role.VIEW", prefix="/ops")
    assert 'href="/ops/delays/">Delays' in requests.get(f"{opened}/").text
    page = requests.get(f"{opened}/delays/tasks").text
    assert chip(page) == [("anonymous", "view")]
    assert 'href="/ops/delays/failures"' in page


def test_accounts_of_flower_are_viewers_and_read_only_limits_them(start: Start) -> None:
    url = start(
        "roles={'ann@shop.example': Role.ADMIN}",
        "--auth=.*@shop.example",
        f"--cookie-secret={SECRET}",
        "--read_only",
    )
    outside = requests.get(f"{url}/delays/tasks", allow_redirects=False)
    assert (outside.status_code, outside.headers["location"]) == (
        302,
        "/login?next=%2Fdelays%2Ftasks",
    )
    assert requests.post(f"{url}/delays/policies/pause").status_code == 403
    cookie = create_signed_value(SECRET, "user", "ann@shop.example").decode()
    inside = requests.get(f"{url}/delays/tasks", cookies={"user": cookie})
    assert chip(inside.text) == [("ann@shop.example", "view")]
    cookie = create_signed_value(SECRET, "user", "eve@evil.example").decode()
    other = requests.get(f"{url}/delays/", cookies={"user": cookie}, allow_redirects=False)
    assert other.status_code == 302
