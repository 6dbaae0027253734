"""Clocks an hour apart, in some of the ways. All of them are `./dev clocks`."""

from __future__ import annotations

from pathlib import Path

import pytest

from chaos.clocks import HOUR_S, Hours, server, try_out
from tests import faketime
from tests.services import MissingServiceError

APART = [
    ("postgresql", Hours(HOUR_S, -HOUR_S, 0)),
    ("mariadb", Hours(-HOUR_S, 0, HOUR_S)),
]


@pytest.mark.skipif(faketime.library() is None, reason=faketime.MISSING)
@pytest.mark.parametrize(("database", "hours"), APART)
def test_the_databases_clock_decides_and_nobody_asks_it_without_end(
    database: str, hours: Hours, redis_url: str, tmp_path: Path
) -> None:
    try:
        with server(database, hours.database) as url:
            outcome = try_out(tmp_path, url, redis_url, hours)
    except MissingServiceError as error:
        pytest.skip(str(error))
    assert outcome.flaws == [], str(outcome.verdict)
