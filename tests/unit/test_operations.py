"""The table of operations: each of them is in the faces, explained, with valid bounds."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest
from jsonschema import Draft202012Validator

from delaytasks import InvalidInputError
from delaytasks.cli.main import main
from delaytasks.http_api.routes import ROUTES
from delaytasks.model.clock import UTC
from delaytasks.operate.operations import OPERATIONS, Parameter
from tests.unit.test_cli import commands

PARAMETERS = [
    (f"{name} {each.name}", each)
    for name, operation in OPERATIONS.items()
    for each in (*operation.parameters, *operation.only_bulk)
]


def test_each_operation_is_a_command_or_a_route() -> None:
    names, routed = {path for path, _ in commands(main)}, {each.operation.name for each in ROUTES}
    assert {name for name, each in OPERATIONS.items() if each.is_command} <= names
    assert OPERATIONS.keys() == names.intersection(OPERATIONS) | routed
    assert len({each.name for each in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("parameter", dict(PARAMETERS).values(), ids=dict(PARAMETERS))
def test_each_parameter_is_explained_and_has_a_valid_schema(parameter: Parameter) -> None:
    assert parameter.help.endswith((".", "]"))
    Draft202012Validator.check_schema(parameter.schema)


def test_the_fields_of_a_form_become_arguments() -> None:
    fields = {
        "tag": " order.close ",
        "body": '{"order": 7}',
        "at": "2030-01-31T18:00",
        "priority": "9",
        "meta": "tenant=acme\r\nplan=pro\r\n",
        "key": "",
    }
    assert OPERATIONS["schedule"].parse(fields, ZoneInfo("Europe/Berlin")) == {
        "tag": "order.close",
        "body": {"order": 7},
        "at": datetime(2030, 1, 31, 17, tzinfo=UTC),
        "priority": 9,
        "meta": {"tenant": "acme", "plan": "pro"},
    }
    for name, typed in (("priority", "10"), ("body", "{"), ("at", "2030-01-31T18:00")):
        with pytest.raises(InvalidInputError) as caught:
            OPERATIONS["schedule"].parse({name: typed})
        assert caught.value.argument == name
    with pytest.raises(InvalidInputError, match="'90' has no unit; write 2h"):
        OPERATIONS["pause"].parse({"until": "90"})


def test_a_field_has_a_label_and_the_words_to_choose_from() -> None:
    fields = {each.name: each for each in OPERATIONS["recurring set"].parameters}
    assert (fields["max_late"].label, fields["max_late"].choices) == ("Max late", [])
    assert fields["overlap"].choices == ["allow", "skip"]
