"""The number of random examples per test.

By default there are few and always the same. `DELAYTASKS_TEST_EXAMPLES` (or `./dev fuzz`) selects
more, which differ in each run.
"""

from __future__ import annotations

import os
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

ASKED = int(os.environ.get("DELAYTASKS_TEST_EXAMPLES", "0"))


def fuzz(few: int) -> Any:
    return settings(
        max_examples=ASKED or few,
        derandomize=not ASKED,
        database=None,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


#: Values of JSON except text, fractions and containers.
plain: Any = st.none() | st.booleans() | st.integers()
#: Values of JSON, with the extensions that other programs write.
json_like: Any = st.recursive(
    plain
    | st.sampled_from([0, -1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, 2**64, 10**30, -(2**63)])
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)
