"""Operations x faces: each operation of the table does the same on each face that offers it.

The faces are the commands, the HTTP API and the console; `django_admin_tests.py` adds the admin. An
operation, a route, an offer or a parameter needs an example in `operation_examples.py`.
"""

from __future__ import annotations

import html
import json
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, NamedTuple

import pytest
from click.testing import CliRunner
from jsonschema import Draft202012Validator

from delaytasks import DelayTasks
from delaytasks.cli import main as cli
from delaytasks.console.application import make_console
from delaytasks.console.forms import OFFERS
from delaytasks.console.requests import Role, Viewer
from delaytasks.http_api.api_keys import ApiKeys, new_entry
from delaytasks.http_api.routes import COMPONENTS, ROUTES, Route, make_api
from delaytasks.operate.operations import (
    ANY_VALUE,
    FILTERS,
    FLAG,
    HEADERS,
    OPERATIONS,
    PAIRS,
    Parameter,
)
from delaytasks.runtime import runtime_of
from tests.integration.operation_examples import (
    EXAMPLES,
    FILTERED,
    REFUSED,
    SAYS,
    VALUES,
    WHO,
    WITHOUT_EXAMPLE,
    WRONG,
    Example,
    arrange,
    changes,
    parameters_of,
    state_of,
)
from tests.unit.test_cli import commands
from tests.waiting import wait_until
from tests.world.recording import delays_on, make_tables

#: The user of the process, who is the actor of a command without --actor.
USER = "bob"

# -- Faces ----------------------------------------------------------------------------------------


class Answer(NamedTuple):
    """What a face says: an exit code, a status of HTTP, or the kind of a notice; and a message."""

    code: Any
    said: str
    document: Any = None


def calls_of(names: Iterable[str], *kinds: str) -> set[tuple[str, str]]:
    """Return each operation with the kinds of tasks that a call names: one, or many."""
    of_many = {name: kinds for name, each in OPERATIONS.items() if each.bulk is not None}
    of_many["show"] = kinds[:2]
    return {(name, kind) for name in names for kind in of_many.get(name, ("",))}


def call_of(route: Route) -> tuple[str, str]:
    is_by_key = "key" in route.parameters and "/keys/" in route.path
    return route.operation.name, "id" if "{id}" in route.path else "key" * is_by_key


class Commands:
    #: Codes of the answers: it is done, the input is invalid, a state refuses it, nothing is there.
    DONE, INVALID, STATE, MISSING = 0, 2, 1, 1
    NAMES: ClassVar = [path for path, _ in commands(cli.main) if path in OPERATIONS]
    OFFERED: ClassVar = calls_of(NAMES, "id", "key", "many")
    #: The options of filters and listings that are not named after their parameter.
    OPTIONS: ClassVar = {
        "ids": "{}", "key_prefix": "--key={}*", "since": "--due={}..", "until": "--due=..{}",
        "created_since": "--created={}..", "created_until": "--created=..{}", "newest_first": "",
    }  # fmt: skip

    def __init__(self, delays: DelayTasks) -> None:
        self.app = SimpleNamespace(app=runtime_of(delays).celery, no_color=True)

    def takes(self, example: Example, name: str) -> bool:
        return (example.operation, name) != ("list", "newest_first")

    def __call__(self, example: Example, typed: Mapping[str, str], *more: str) -> Answer:
        parameters, words = parameters_of(example), example.operation.split()
        if example.kind == "id":
            words.append(example.which)
        elif example.kind == "key":
            words += ["--tag", "mail", "--key", example.which]
        elif example.kind == "many":
            words += [*self._filters(example.filters), *(more or ["--yes"])]
        if example.operation == "list":
            return self._run(words + self._filters(typed))
        for name, parameter in parameters.items():
            if name not in typed:
                continue
            if parameter.is_required or parameter.kind is ANY_VALUE:
                words.append(typed[name])
            elif parameter.kind is FLAG:
                words.append(f"--{name}")
            else:
                words += (f"--{option(name)}={line}" for line in typed[name].split("\n"))
        if "actor" in parameters.keys() - typed.keys():
            words.append(f"--actor={WHO}")
        return self._run(words)

    def _filters(self, filters: Mapping[str, str]) -> list[str]:
        return [
            self.OPTIONS.get(name, f"--{option(name)}={{}}").format(line)
            for name, typed in filters.items()
            for line in typed.split("\n")
            if self.OPTIONS.get(name) != ""
        ]

    def _run(self, words: Sequence[str]) -> Answer:
        result = CliRunner().invoke(cli.delays, [*words, "--json"], obj=self.app)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exc_info
        document = json.loads(result.stdout or "null")
        said = json.loads(result.stderr) if result.stderr else {"error": ""}
        error = f"{said.get('argument')} {said['error']} {said.get('type')}"
        return Answer(result.exit_code, error, document)

    def found(self, filters: Mapping[str, str]) -> set[str]:
        document = self._run(["list", *self._filters(filters)]).document
        return {task["key"] for task in document["tasks"]}

    def count(self, example: Example) -> int:
        counted = self(example, example.typed, "--dry-run").document
        assert (counted["state"], counted["changed"], counted["runs"]) == ("dry run", 0, [])
        return int(counted["matched"] - counted["refused"])


def option(name: str) -> str:
    return name.replace("_", "-")


class HttpApi:
    DONE, INVALID, STATE, MISSING = 200, 400, 409, 404
    OFFERED: ClassVar = {call_of(route): route for route in ROUTES}
    ALL = ("read", "operate", "schedule:*", "schedule:delaytasks.callback", "queue:*")

    def __init__(self, delays: DelayTasks, scopes: Sequence[str] = ALL) -> None:
        key, entry = new_entry(scopes)
        self.client = make_api(delays, ApiKeys({WHO: entry})).test_client()
        self.headers = {"Authorization": f"Bearer {key}"}

    def takes(self, example: Example, name: str) -> bool:
        return name in self.OFFERED[example.call].parameters

    def __call__(self, example: Example, typed: Mapping[str, str]) -> Answer:
        route = self.OFFERED[example.call]
        if example.kind == "key":
            typed = {"tag": "mail", "key": example.which, **typed}
        values = {name: json_value(route.parameters[name], text) for name, text in typed.items()}
        path = route.path.replace("{id}", example.which)
        sent: Any = {"json" if route.has_body else "query_string": values}
        answer = self.client.open(path, method=route.method, headers=self.headers, **sent)
        found: Any = answer.json
        component = route.operation.reply if answer.status_code == 200 else "Problem"
        schema = {
            "$ref": f"#/components/schemas/{component}",
            "components": {"schemas": COMPONENTS},
        }
        Draft202012Validator(schema).validate(found)  # it is as the document of OpenAPI says
        said = f"{found.get('argument')} {found.get('detail')} {found.get('type')}"
        return Answer(answer.status_code, said, found)

    def found(self, filters: Mapping[str, str]) -> set[str]:
        document = self(Example("list", "", "", {}), filters).document
        return {task["key"] for task in document["tasks"]}

    @classmethod
    def too_little(cls, example: Example) -> Iterator[tuple[Any, int]]:
        """Yield scopes that do not allow a call, and the status of the answer."""
        route = cls.OFFERED[example.call]
        own = {"read", "operate"} - {route.operation.who}
        refused = [*own, "schedule:unlike"] if route.is_of_tag else [*own, "schedule:*"]
        if route.operation.name == "callback":
            refused.append("schedule:*")
        for scope in refused:
            is_hidden = "{id}" in route.path and scope.startswith("schedule:")
            yield [scope, "queue:*"], 404 if is_hidden else 403

    @classmethod
    def enough(cls, example: Example) -> Iterator[Any]:
        """Yield each of the scopes that allow a call."""
        route = cls.OFFERED[example.call]
        if not route.takes_idempotency_key:
            yield [route.operation.who]
        if route.is_of_tag:
            own = "delaytasks.*" if route.operation.name == "callback" else "[mo]*"
            yield [f"schedule:{own}", "queue:*"]


def json_value(parameter: Parameter, typed: str) -> Any:
    """Return a typed value as a JSON document has it; an invalid one stays a text."""
    lines = typed.split("\n")
    if parameter.kind is FLAG:
        return True if parameter.name == "running" else "true"  # in a query
    if parameter.is_many:
        return lines
    if parameter.kind is PAIRS and all("=" in line for line in lines):
        return dict(line.split("=", 1) for line in lines)
    is_json = parameter.kind in (ANY_VALUE, HEADERS) or typed.isdecimal()
    return json.loads(typed) if is_json and typed not in ("x", "\0") else typed


class Console:
    DONE, INVALID, STATE, MISSING = "good", "bad", "bad", "bad"
    OFFERED: ClassVar = calls_of(OFFERS, "id", "many")

    def __init__(self, delays: DelayTasks, role: Role = Role.ADMIN) -> None:
        self.delays = delays
        app = make_console(delays, lambda _: Viewer(WHO, role), secret_key="of tests")
        self.client = app.test_client()
        with self.client.session_transaction() as session:
            session["csrf"] = "a token"

    def takes(self, example: Example, name: str) -> bool:
        return name not in WITHOUT_EXAMPLE

    def __call__(self, example: Example, typed: Mapping[str, str]) -> Answer:
        fields = {"csrf": "a token", **example.filters, **typed}
        if example.kind == "id":
            fields["id"] = example.which
        path = f"/do/{example.operation.replace(' ', '-')}"
        answer = self.client.post(path, data=fields)
        if answer.status_code != 303:
            [said] = re.findall(r"</h1>\s*<p>(.*?)</p>", answer.text, re.DOTALL)
            return Answer("bad" if answer.status_code == 400 else answer.status_code, said)
        if example.kind == "many":
            log = self.delays.bulk.log
            wait_until(lambda: log()[0].state != "running", 10, "the end of the operation")
            return Answer("good", "")
        with self.client.session_transaction() as session:
            [(kind, said)] = session.pop("_flashes")
        return Answer(kind, said)

    def found(self, filters: Mapping[str, str]) -> set[str]:
        query = {name: typed.split("\n") for name, typed in filters.items()}
        text = self.client.get("/tasks", query_string=query).text
        ids = re.findall(r'href="/tasks/(\d+)"', text)
        return {str(self.delays.get(id).key) for id in ids}

    def count(self, example: Example) -> int:
        query = {"action": example.operation, **example.filters}
        text = html.unescape(self.client.get("/bulk", query_string=query).text)
        [count] = re.findall(r"<h1>[A-Z][a-z ]+ (\d+) tasks?\?</h1>", text)
        return int(count)

    @classmethod
    def too_little(cls, example: Example) -> Iterator[tuple[Any, int]]:
        """Yield the roles that may not make a call."""
        yield from ((role, 403) for role in Role if role < OFFERS[example.operation].role)

    @classmethod
    def enough(cls, example: Example) -> Iterator[Any]:
        yield OFFERS[example.operation].role


Face = Commands | HttpApi | Console
FACES: list[Any] = [Commands, HttpApi, Console]


def on_each_face(examples: Sequence[Example], faces: Sequence[Any] = FACES) -> Any:
    """Return a parameter for each example and each face that offers its operation."""
    cases = [
        pytest.param(example, face, id=f"{example} {face.__name__}")
        for example in examples
        for face in faces
        if example.call in face.OFFERED
    ]
    return pytest.mark.parametrize(("example", "face"), cases)


def new_delays(file: Path) -> DelayTasks:
    delays = delays_on(f"sqlite:///{file}", timer="direct", tags="any")
    delays.processor("mail", queue="letters")(lambda body: None)
    return delays


@pytest.fixture(scope="module")
def arranged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("faces") / "faces.sqlite3"
    with closing(new_delays(file)) as delays:
        make_tables(delays)
        arrange(delays)
    return file


@pytest.fixture
def delays(arranged: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DelayTasks]:
    """A deployment of its own for a test."""
    monkeypatch.setenv("LOGNAME", USER)
    for file in arranged.parent.iterdir():
        shutil.copy(file, tmp_path)
    with closing(new_delays(tmp_path / arranged.name)) as made:
        monkeypatch.setitem(VALUES, "entry", str(made.bulk.log()[0].id))
        yield made


def new_entries(delays: DelayTasks) -> list[tuple[str, str, str]]:
    """Return the action, the actor and the state of each log entry of a call."""
    found = [(each.action, each.actor.partition("@")[0], each.state) for each in delays.bulk.log()]
    return [entry for entry in found if entry[1] != "ann"]


# -- The matrix -----------------------------------------------------------------------------------


def test_each_operation_on_each_face_and_each_parameter_has_an_example() -> None:
    offered = set().union(*(face.OFFERED for face in FACES))
    assert offered == {each.call for each in EXAMPLES}
    assert {name for name, _ in offered} == OPERATIONS.keys()
    assert FILTERED.keys() == {each.name for each in FILTERS}
    for name in OPERATIONS:
        examples = [each for each in EXAMPLES if each.operation == name]
        given = {*WITHOUT_EXAMPLE, *(FILTERED if name == "list" else ())}
        given |= {parameter for each in examples for parameter in each.typed}
        for each in examples:
            assert parameters_of(each).keys() <= given, each


@on_each_face(EXAMPLES)
def test_an_operation_has_the_same_effect_on_each_face(
    delays: DelayTasks, example: Example, face: Any
) -> None:
    before, caller = state_of(delays), face(delays)
    answer = caller(example, {k: v for k, v in example.typed.items() if caller.takes(example, k)})
    assert answer.code == caller.DONE, answer
    assert changes(before, state_of(delays)) == example.effect
    is_audited = face is Console or example.kind == "many"
    actor = WHO if face is Console else USER
    assert new_entries(delays) == [(example.action, actor, "done")] * is_audited


@on_each_face(REFUSED)
def test_a_call_that_does_not_fit_the_state_is_refused(
    delays: DelayTasks, example: Example, face: Any
) -> None:
    before, caller, error = state_of(delays), face(delays), example.effect["error"]
    answer = caller(example, example.typed)
    assert answer.code == (caller.MISSING if error == "TaskNotFoundError" else caller.STATE), answer
    assert face is Console or error in answer.said
    assert state_of(delays) == before
    check_refused(delays, caller, example)


def check_refused(delays: DelayTasks, caller: Face, example: Example, calls: int = 1) -> None:
    """Check that the console has an entry of each call that it has refused."""
    expected = [(example.action, WHO, "failed")] * calls * isinstance(caller, Console)
    assert new_entries(delays) == expected


def wrong_calls(example: Example, caller: Face) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yield each parameter with an invalid value, a word of the message, and the whole call.

    The call is another example of the operation if only that one has the parameter.
    """
    alike = [each for each in EXAMPLES if each.call == example.call]
    for name, parameter in parameters_of(example).items():
        if parameter.kind is not FLAG and caller.takes(example, name):
            base = next((each for each in alike if name in each.typed), example).typed
            typed, word = WRONG[parameter.kind.name]
            given = {each: base[each] for each in base if caller.takes(example, each)}
            yield name, word or name, {**given, name: typed}


FIRST = {each.call: each for each in reversed(EXAMPLES)}.values()


@on_each_face([*FIRST])
def test_an_invalid_value_of_each_parameter_is_refused_with_its_name(
    delays: DelayTasks, example: Example, face: Any
) -> None:
    before, caller = state_of(delays), face(delays)
    calls = 0
    for name, word, typed in wrong_calls(example, caller):
        answer = caller(example, typed)
        assert answer.code == caller.INVALID, (name, answer)
        said = re.sub("[- ]", "_", answer.said).lower()
        assert word in said or SAYS.get(name, name) in said, (name, answer)
        calls += 1
    if any(each.is_required for each in OPERATIONS[example.operation].parameters):
        answer = caller(example, {})
        assert (answer.code, bool(answer.said)) == (caller.INVALID, True)
        calls += 1
    assert state_of(delays) == before
    check_refused(delays, caller, example, calls)


@on_each_face([*FIRST], [HttpApi, Console])
def test_an_operation_is_refused_without_its_scope_or_role(
    delays: DelayTasks, example: Example, face: Any
) -> None:
    before, calls = state_of(delays), 0
    for rights, status in face.too_little(example):
        assert face(delays, rights)(example, example.typed).code == status, rights
        calls += 1
    assert state_of(delays) == before
    check_refused(delays, face(delays), example, calls)
    for rights in face.enough(example):
        assert face(delays, rights)(example, example.typed).code in (face.DONE, face.STATE), rights


MANY = [each for each in EXAMPLES if each.filters]


@on_each_face(MANY, [Commands, Console])
def test_the_tasks_of_an_operation_are_counted_before_it(
    delays: DelayTasks, example: Example, face: Any
) -> None:
    before = state_of(delays)
    assert face(delays).count(example) == len(example.effect)
    assert (state_of(delays), new_entries(delays)) == (before, [])


@pytest.mark.parametrize("face", FACES)
def test_each_filter_finds_the_same_tasks_on_each_face(delays: DelayTasks, face: Any) -> None:
    caller = face(delays)
    for name, (typed, keys) in FILTERED.items():
        assert caller.found({name: typed}) == set(keys.split()), name
    assert caller.found({"tag": "mail", "status": "NOT_COMPLETE"}) == {"waits"}
