"""What users import to show metrics, as the documentation says. It needs an extra."""

from delaytasks.operate.exporter import exporter_app
from delaytasks.operate.metrics import ProducerMetrics

__all__ = ["count_scheduled", "exporter_app"]

count_scheduled = ProducerMetrics.of
