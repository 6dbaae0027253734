"""The methods of `DelaysTester` that read and set the time of the test."""

from __future__ import annotations

from datetime import datetime

from delaytasks.core.inputs import check_instant
from delaytasks.testing.clock import MovesTime
from delaytasks.testing.instance_in_test import TesterPart


class TimeTravel(TesterPart):
    """Reads and sets the time of the test."""

    @property
    def now(self) -> datetime:
        """The time of the test, by which tasks are due.

        It goes on with the clock of the host, and stands still if freezegun or time-machine stop
        that clock.
        """
        return self._instance.time.now()

    def travel_to(self, instant: datetime) -> None:
        """Set the time, forward or back, and run nothing.

        Parameters
        ----------
        instant
            An aware datetime.

        Examples
        --------
        >>> tester.travel_to(datetime(2027, 1, 1, tzinfo=timezone.utc))
        """
        self._instance.time.move_to(check_instant(instant))

    def move_with(self, traveller: MovesTime | None) -> None:
        """Let `fast_forward` and `travel_to` move the time of freezegun or time-machine too.

        The code under test then reads the same time as delaytasks.

        Parameters
        ----------
        traveller
            What `freeze_time` or `time_machine.travel` returns in a `with` block, or the fixture
            of one of their pytest plugins. None ends this.

        Examples
        --------
        >>> with freeze_time("2027-01-01") as frozen, DelaysTester(delays) as tester:
        ...     tester.move_with(frozen)
        ...     tester.fast_forward("1d")
        """
        self._instance.time.move_with(traveller)
