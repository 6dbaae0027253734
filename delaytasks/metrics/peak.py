"""The metrics of a forecast of the next week: its peak, and the workers that it needs."""

from __future__ import annotations

from collections.abc import Iterator

from delaytasks.forecast.result import Forecast
from delaytasks.metrics.families import Family, gauge

_ABOUT = {
    "delaytasks_forecast_age_seconds": "How old the forecast is.",
    "delaytasks_forecast_peak_late_seconds": (
        "How late the tasks of the peak will start. The peak is the hour of the next week whose "
        "tasks start latest."
    ),
    "delaytasks_forecast_peak_tasks": "Tasks that are due in the hour of the peak.",
    "delaytasks_forecast_peak_in_seconds": "Time until this hour begins; 0 if it has begun.",
    "delaytasks_forecast_needed_workers": (
        "Workers with which no task of the next week starts more than a minute late; absent if no "
        "number is enough."
    ),
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
    peak, needed = forecast.peak, forecast.needed_workers
    if peak is None:
        return age_s, 0.0, 0, None, needed
    ahead_s = (peak.start - forecast.made_at).total_seconds() - age_s
    return age_s, peak.late_s_served, peak.due, max(ahead_s, 0.0), needed
