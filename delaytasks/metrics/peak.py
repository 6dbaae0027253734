"""The metrics of a forecast of the next week: the hour that keeps the processes busiest."""

from __future__ import annotations

from collections.abc import Iterator

from delaytasks.forecast import Forecast
from delaytasks.metrics.families import Family, gauge

_ABOUT = {
    "delaytasks_forecast_age_seconds": "How old the forecast is.",
    "delaytasks_forecast_peak_utilization": (
        "The share of the busiest hour of the next week for which its tasks keep the processes "
        "busy. Above 1, tasks start late."
    ),
    "delaytasks_forecast_peak_tasks": "Tasks that are due in this hour.",
    "delaytasks_forecast_peak_in_seconds": "Time until this hour begins; 0 if it has begun.",
}


def peak_families(recent: tuple[Forecast, float] | None) -> Iterator[Family]:
    """Yield the metrics of a forecast. They have no values if there is none."""
    for (name, about), value in zip(_ABOUT.items(), _values(recent), strict=True):
        yield gauge(name, about, value)


def _values(recent: tuple[Forecast, float] | None) -> tuple[float | None, ...]:
    """Return the values of the metrics, in the order of `_ABOUT`."""
    if recent is None:
        return (None,) * len(_ABOUT)
    forecast, age_s = recent
    peak = forecast.peak
    if peak is None:
        return age_s, 0.0, 0, None
    ahead_s = (peak.start - forecast.made_at).total_seconds() - age_s
    return age_s, peak.utilization, peak.due, max(ahead_s, 0.0)
