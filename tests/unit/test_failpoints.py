"""The list of failpoints, and orders to fail."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from chaos.failpoints.orders import FailpointError, Orders, give
from chaos.failpoints.places import BY_NAME, PLACES, DatabaseAddress
from delaytasks.execution.settlement import Settler


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.name)
def test_each_failpoint_is_a_method_that_there_is(place: DatabaseAddress) -> None:
    for at in place.at:
        owner, _, name = f"delaytasks.{at}".rpartition(".")
        assert callable(getattr(resolve_name(owner), name))


def test_each_failpoint_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(PLACES)


def test_an_order_is_carried_out_once_and_when_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = BY_NAME["arming again"]._replace(who="main")
    monkeypatch.setattr("chaos.failpoints.orders.PLACES", [place])
    monkeypatch.setattr(Settler, "_arm_again", lambda self, settlements: settlements)
    arm_again = Settler._arm_again
    Orders(tmp_path)
    method = Settler._arm_again
    assert method is not arm_again
    order = give(tmp_path, place.name, "raise", 2)
    nobody: list[object] = []
    assert method(None, nobody) is nobody  # type: ignore[arg-type, func-returns-value]
    with pytest.raises(FailpointError):
        method(None, nobody)  # type: ignore[arg-type]
    assert not order.exists()
    assert method(None, nobody) is nobody  # type: ignore[arg-type, func-returns-value]
