"""Test the list of failpoints and the orders to fail."""

from __future__ import annotations

from pathlib import Path
from pkgutil import resolve_name

import pytest

from chaos.failpoints.catalogue import BY_NAME, FAILPOINTS, Failpoint
from chaos.failpoints.orders import FailpointError, Orders, write_order
from delaytasks.execution.settlement import Settler


@pytest.mark.parametrize("failpoint", FAILPOINTS, ids=lambda failpoint: failpoint.name)
def test_each_failpoint_is_an_existing_method(failpoint: Failpoint) -> None:
    for path in failpoint.methods:
        owner, _, name = f"delaytasks.{path}".rpartition(".")
        assert callable(getattr(resolve_name(owner), name))


def test_each_failpoint_has_a_name_of_its_own() -> None:
    assert len(BY_NAME) == len(FAILPOINTS)


def test_a_failpoint_is_triggered_once_at_the_ordered_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failpoint = BY_NAME["arming again"]._replace(process_kind="main")
    monkeypatch.setattr("chaos.failpoints.orders.FAILPOINTS", [failpoint])
    monkeypatch.setattr(Settler, "_arm_again", lambda self, settlements: settlements)
    arm_again = Settler._arm_again
    Orders(tmp_path)
    method = Settler._arm_again
    assert method is not arm_again
    order = write_order(tmp_path, failpoint.name, "raise", 2)
    nobody: list[object] = []
    assert method(None, nobody) is nobody
    with pytest.raises(FailpointError):
        method(None, nobody)
    assert not order.exists()
    assert method(None, nobody) is nobody
