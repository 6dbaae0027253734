"""Each alert fires if what it is about happens, and stays silent if all is well."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.doc_pages import RULES, block_beginning

#: The state of a deployment without problems: series and their values, one each minute.
HEALTHY = {
    "delaytasks_database_up": "1x120",
    'delaytasks_database_problem{problem="read_only"}': "0x120",
    "delaytasks_broker_up": "1x120",
    "delaytasks_oldest_overdue_seconds": "0x20 45 0x99",
    "delaytasks_expired_leases": "0x10 3 0x109",
    "delaytasks_workers": "2x120",
    'delaytasks_queue_workers{queue="mail"}': "2x120",
    'delaytasks_overdue_tasks_by_tag{queue="mail",tag="mail.send"}': "7x120",
    'delaytasks_sweep_age_seconds{sweep_partition="0"}': "4x120",
    'delaytasks_runs_total{instance="w1",tag="mail.send",outcome="done"}': "0+100x120",
    'delaytasks_runs_total{instance="w1",tag="mail.send",outcome="failed"}': "0+1x120",
    # A partner fails often, and a retry succeeds.
    'delaytasks_runs_total{instance="w1",tag="mail.send",outcome="retried"}': "0+40x120",
    'delaytasks_runs_total{instance="w1",tag="mail.send",outcome="lease_lost"}': "0x120",
    'delaytasks_runs_total{instance="w1",tag="rare",outcome="failed"}': "0x50 1x69",
    'delaytasks_worker_broker_down_seconds{worker="w1"}': "0x20 45 0x99",
    'delaytasks_worker_timer_down_seconds{worker="w1"}': "0x20 45 0x99",
    "delaytasks_beat_age_seconds": "4x20 45 4x99",
    'delaytasks_timer_up{instance="w1"}': "1x120",
    'delaytasks_loop_turned_seconds{instance="w1",loop="leases"}': "1x120",
}
RUNS = 'runs_total{instance="w1",tag="mail.send",outcome="'
#: What is different, for each alert, and the labels with which the alert fires.
PROBLEMS: dict[str, tuple[dict[str, str], dict[str, str]]] = {
    "Late": ({"oldest_overdue_seconds": "61+60x120"}, {}),
    "Stuck": ({"expired_leases": "3x120"}, {}),
    "NoWorker": ({"workers": "0x120"}, {}),
    "QueueWithoutWorker": ({'queue_workers{queue="mail"}': "0x120"}, {"queue": "mail"}),
    "SweepOld": (
        {'sweep_age_seconds{sweep_partition="0"}': "3600x120"}, {"sweep_partition": "0"}
    ),
    "DatabaseDown": ({"database_up": "0x120"}, {}),
    "DatabaseProblem": (
        {'database_problem{problem="read_only"}': "1x120"}, {"problem": "read_only"}
    ),
    "BrokerDown": ({"broker_up": "0x120"}, {}),
    "Failing": ({f'{RUNS}failed"}}': "0+20x120"}, {"tag": "mail.send"}),
    "Retrying": ({f'{RUNS}retried"}}': "0+110x120"}, {"tag": "mail.send"}),
    "LeasesLost": ({f'{RUNS}lease_lost"}}': "0x60 2x60"}, {"tag": "mail.send"}),
    "WorkerWithoutBroker": (
        {'worker_broker_down_seconds{worker="w1"}': "61+60x120"}, {"worker": "w1"}
    ),
    "BeatSilent": ({"beat_age_seconds": "61+60x120"}, {}),
    "TimerDown": ({'timer_up{instance="w1"}': "0x120"}, {"instance": "w1"}),
    "LoopStuck": (
        {'loop_turned_seconds{instance="w1",loop="leases"}': "61+60x120"},
        {"instance": "w1", "loop": "leases"},
    ),
}  # fmt: skip


def promtool(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Return the status of promtool, and what it prints."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("needs promtool, which the package prometheus contains")
    run = subprocess.run(
        [program, *arguments], cwd=cwd, capture_output=True, text=True, timeout=120
    )
    return run.returncode, run.stdout + run.stderr


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    shutil.copy(RULES, tmp_path)
    return tmp_path


def alert_names() -> list[str]:
    return re.findall(r"- alert: (\w+)", RULES.read_text())


def fired(rules: Path, changes: dict[str, str]) -> tuple[list[str], str]:
    """Return the names of the alerts that fire within the two hours, and what promtool prints.

    promtool compares the alerts with those that a test expects, and prints the difference. The
    files are JSON, which is YAML, too.
    """
    own = {f"delaytasks_{name}": text for name, text in changes.items()}
    series = [{"series": name, "values": text} for name, text in (HEALTHY | own).items()]
    tests: list[dict[str, Any]] = [
        {"eval_time": f"{minute}m", "alertname": name, "exp_alerts": []}
        for name in alert_names()
        for minute in (65, 70, 90)
    ]
    document = {
        "rule_files": [RULES.name],
        "evaluation_interval": "1m",
        "tests": [{"interval": "1m", "input_series": series, "alert_rule_test": tests}],
    }
    (rules / "test.json").write_text(json.dumps(document))
    status, said = promtool("test", "rules", "test.json", cwd=rules)
    found = set(re.findall(r"alertname: (\w+),", said))
    assert bool(found) == bool(status), said
    return sorted(found), said


def test_prometheus_accepts_the_configuration_in_the_documentation(rules: Path) -> None:
    block = block_beginning("docs/monitor.md", "scrape_configs:")
    (rules / "prometheus.yml").write_text(block.text)
    status, said = promtool("check", "config", "prometheus.yml", cwd=rules)
    assert (status, f"{len(alert_names())} rules found" in said) == (0, True), said


def test_no_alert_fires_in_a_healthy_deployment_and_each_has_a_problem_here(rules: Path) -> None:
    assert fired(rules, {})[0] == []
    assert sorted(f"DelayTasks{name}" for name in PROBLEMS) == sorted(alert_names())


@pytest.mark.parametrize("name", PROBLEMS)
def test_an_alert_fires_for_its_problem_and_no_other_one(rules: Path, name: str) -> None:
    changes, labels = PROBLEMS[name]
    names, shown = fired(rules, changes)
    assert names == [f"DelayTasks{name}"]
    for label, value in labels.items():
        assert f'{label}="{value}"' in shown
    for annotation in ("summary", "remedy"):
        text = re.search(rf'{annotation}="([^"]+)', shown)
        assert text is not None
        assert "<no value>" not in text[1]
