import pytest

pytest.register_assert_rewrite("tests.conformance.timers", "tests.conformance.timer_faults")
