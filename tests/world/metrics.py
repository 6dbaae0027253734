"""What users import to show metrics, as the documentation says. It needs an extra."""

from delaytasks.metrics.process import ProducerMetrics
from delaytasks.metrics.snapshot import exporter_app

__all__ = ["count_scheduled", "exporter_app"]

count_scheduled = ProducerMetrics.of
