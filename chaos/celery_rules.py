"""The checker's rules for rows that have the messages of Celery tasks.

Each acknowledged message is published at least once and not before its time, not after its
acknowledged revoke, and more often only because of a fault. A published message reaches the Celery
task unless a fault loses messages of bare Celery, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from chaos.history import Fault, PublishRecord, RowChange
from chaos.task_records import TaskRecord
from chaos.violation import Violation
from delaytasks.model.moves import Status

#: After the end of a fault, components notice and repair its effects: the publisher connects again,
#: and an operation on the broker reaches its time limit.
AFTERMATH_US = 10_000_000
#: How long a message may wait at the broker or in a worker until its task begins.
IN_BROKER_US = 30_000_000


class CeleryRules:
    """Rules that concern only rows with messages of Celery tasks.

    `is_explained` returns whether a fault explains that a claim lost its lease.
    """

    def __init__(
        self, faults: Sequence[Fault], is_explained: Callable[[TaskRecord, RowChange], bool]
    ) -> None:
        self._faults = faults
        self._is_explained = is_explained

    def published(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that were published early, without a claim, or after the end of the row."""
        for each in task.publications:
            claim = task.claim_before(each.at_us)
            if claim is None:
                if not self._is_forgotten(task, each):
                    yield Violation("I4", "unexpected", "its message was published without a claim")
            elif each.at_us < claim.due_us:
                yield Violation(
                    "I3",
                    "early",
                    f"its message was published {claim.due_us - each.at_us} us before its time",
                )
        dues = [record.due_us for record in task.calls("schedule", "ok") if record.due_us]
        if task.publications and dues and task.publications[0].at_us < min(dues):
            yield Violation(
                "I3", "early", "its message was published before the time that the caller asked for"
            )
        last = task.last
        if task.is_celery and last is not None and last.status is Status.FAILED and not last.lapses:
            yield Violation("I1", "lost", "its message was given up")

    def revoked(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages whose row was claimed after the revoke was acknowledged."""
        for call in task.calls("revoke", "ok"):
            for each in task.publications:
                claim = task.claim_before(each.at_us)
                if claim is not None and claim.at_us > call.answered_us:
                    yield Violation(
                        "I1", "revoked", "it was published after its revoke was acknowledged"
                    )
                    break

    def once(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that were published again although no fault explains that."""
        claims: dict[int, int] = {}
        for each in task.publications:
            claim = task.claim_before(each.at_us)
            if claim is not None and not self._is_forgotten(task, each):
                claims[claim.version] = claims.get(claim.version, 0) + 1
        last = max(claims, default=0)
        for claim in task.claims:
            count = claims.get(claim.version, 0)
            if count == 0 or (count == 1 and claim.version == last):
                continue
            if not self._is_explained(task, claim) and not self._is_disturbed(task, claim):
                yield Violation(
                    "I6",
                    "duplicated",
                    f"version {claim.version} published its message, which was published again",
                )

    def delivered(self, task: TaskRecord) -> Iterator[Violation]:
        """Find messages that the broker confirmed, but whose Celery task never began."""
        last = task.last
        if last is None or last.status is not Status.DONE or not task.publications:
            return
        if task.deliveries or task.calls("revoke", "ok", "unknown"):
            return
        at_us = task.publications[-1].at_us
        if not any(
            fault.loses_messages
            and fault.until_us + AFTERMATH_US >= at_us
            and fault.from_us <= at_us + IN_BROKER_US
            for fault in self._faults
        ):
            yield Violation("I1", "lost", "its message was published, but its task never began")

    def _is_forgotten(self, task: TaskRecord, publication: PublishRecord) -> bool:
        """Return whether a crash of the database may have lost the claim of a publication.

        While a recorded claim lasts, the publication belongs to it.
        """
        claim = task.claim_before(publication.at_us)
        end = None if claim is None else task.end_of(claim)
        if claim is not None and (end is None or end.at_us > publication.at_us):
            return False
        return any(fault.may_lose_claim(publication.at_us, AFTERMATH_US) for fault in self._faults)

    def _is_disturbed(self, task: TaskRecord, claim: RowChange) -> bool:
        """Return whether a fault may have kept the broker from confirming the message."""
        end = task.end_of(claim)
        until_us = claim.at_us + AFTERMATH_US if end is None else end.at_us
        return any(
            fault.from_us <= until_us and fault.until_us + AFTERMATH_US >= claim.at_us
            for fault in self._faults
        )
