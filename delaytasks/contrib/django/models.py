"""Tables as read-only models: `DelayTaskRow.objects.filter(tag="order.close")`."""

from __future__ import annotations

from typing import Any, NoReturn

from django.core.exceptions import PermissionDenied
from django.db import DEFAULT_DB_ALIAS, models

from delaytasks.contrib.django.instance import project_delays
from delaytasks.db.schema import BODY
from delaytasks.model.inputs import KEY_LENGTH, LIMIT_KEY_LENGTH, QUEUE_LENGTH, TAG_LENGTH
from delaytasks.model.moves import Status
from delaytasks.model.task import decoded
from delaytasks.runtime import runtime_of


def table_name(name: str = "yb_delay_task_message") -> str:
    """Return the name with the prefix and the schema of the settings."""
    settings = project_delays().settings
    name = f"{settings.name_prefix}{name}"
    if not settings.table_schema:
        return name
    # Django quotes a name unless it is quoted already.
    mark = "`" if runtime_of(project_delays()).store.database.backend == "mysql" else '"'
    return f"{mark}{settings.table_schema}{mark}.{mark}{name}{mark}"


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


class DelayTaskRow(models.Model):
    """A row of `yb_delay_task_message`, which only delaytasks writes."""

    objects = RowManager()

    save = delete = _refuse
    id = models.BigIntegerField(primary_key=True)
    tag = models.CharField(max_length=TAG_LENGTH)
    message_body = models.TextField()
    status = models.SmallIntegerField(choices=[(int(status), status.name) for status in Status])
    error_stack = models.TextField(null=True)
    version = models.BigIntegerField()
    ip_address = models.BigIntegerField(null=True)
    delay_time = models.BigIntegerField()
    expected_time = models.DateTimeField()
    execution_time = models.DateTimeField(null=True)
    create_time = models.DateTimeField()
    update_time = models.DateTimeField()
    queue = models.CharField(max_length=QUEUE_LENGTH)
    priority = models.SmallIntegerField()
    headers = models.TextField(null=True)
    runs = models.IntegerField()
    lapses = models.IntegerField()
    lease_until = models.DateTimeField(null=True)
    worker = models.CharField(max_length=255, null=True)
    task_key = models.CharField(max_length=KEY_LENGTH, null=True)
    result = models.TextField(null=True)
    limit_key = models.CharField(max_length=LIMIT_KEY_LENGTH, null=True)
    due_time = models.DateTimeField(null=True)
    meta = models.TextField(null=True)
    cancel_request = models.SmallIntegerField(null=True)
    late_by = models.SmallIntegerField(null=True)

    class Meta:
        managed = False
        #: What the admin's pages and actions require.
        default_permissions = ("view", "change")
        db_table = table_name()
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
