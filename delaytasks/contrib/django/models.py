"""Tables as read-only models: `DelayTaskRow.objects.filter(tag="order.close")`."""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.exceptions import PermissionDenied
from django.db import DEFAULT_DB_ALIAS, models
from sqlalchemy import BigInteger, Column, Integer, SmallInteger, String, Table

from delaytasks.contrib.django.instance import project_delays
from delaytasks.db.schema import BODY
from delaytasks.db.types import LongText, UTCDateTime
from delaytasks.model.moves import Status
from delaytasks.model.task import decoded
from delaytasks.runtime import runtime_of

#: Django's field for each type of a column.
_FIELDS: Any = {
    UTCDateTime: models.DateTimeField,
    type(LongText): models.TextField,
    String: models.CharField,
    BigInteger: models.BigIntegerField,
    SmallInteger: models.SmallIntegerField,
    Integer: models.IntegerField,
}


def _field(column: Column[Any]) -> Any:
    is_status = column.name == "status"
    return _FIELDS[type(column.type)](
        null=column.nullable,
        max_length=getattr(column.type, "length", None),
        choices=[(int(each), each.name) for each in Status] if is_status else None,
    )


def _table_name(table: Table) -> str:
    if not table.schema:
        return table.name
    # Django quotes a name unless it is quoted already.
    mark = "`" if runtime_of(project_delays()).store.database.backend == "mysql" else '"'
    return f"{mark}{table.schema}{mark}.{mark}{table.name}{mark}"


class ReadOnlyRowError(PermissionDenied, TypeError):
    """Raised for a write through a model. Django's admin answers 403."""


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise ReadOnlyRowError(
        "rows of delaytasks are read only here: use its methods, such as schedule_delay, cancel, "
        "reschedule, rerun, policies.pause and recurring.set"
    )


class ReadOnlyRows(models.QuerySet):
    create = get_or_create = update_or_create = update = delete = bulk_create = bulk_update = (
        _refuse
    )


_RowsManager: Any = models.Manager.from_queryset(ReadOnlyRows)


class RowManager(_RowsManager):
    """Reads the database that has the tables. If it is the default one, routers choose."""

    def get_queryset(self) -> Any:
        rows, alias = super().get_queryset(), project_delays().alias
        return rows if alias == DEFAULT_DB_ALIAS else rows.using(alias)


_TASKS = runtime_of(project_delays()).store.schema.tasks


class DelayTaskRow(models.Model):
    """A row of `yb_delay_task_message`, which only delaytasks writes.

    Its fields are the columns of the table.
    """

    objects = RowManager()

    save = delete = _refuse
    id = models.BigIntegerField(primary_key=True)

    class Meta:
        managed = False
        #: What the admin's pages and actions require.
        default_permissions = ("view", "change")
        db_table = _table_name(_TASKS)
        verbose_name = "delayed task"

    def __str__(self) -> str:
        return f"{self.tag} {self.id} ({self.get_status_display()})"

    @property
    def body(self) -> Any:
        """The body, decrypted and decoded."""
        cipher = runtime_of(project_delays()).store.schema.cipher
        text = self.message_body
        if cipher is not None:
            text = cipher.read(text, BODY, self.id, self.tag)
        return decoded(text, f"the body of task {self.id}")


for _column in _TASKS.columns:
    if _column.name != "id":
        DelayTaskRow.add_to_class(_column.name, _field(_column))
