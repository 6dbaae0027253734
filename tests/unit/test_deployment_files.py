"""The files in deployment/ agree with their schemas and with the command line."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from delaytasks import ConfigError
from delaytasks.cli.servers import API_PORT
from delaytasks.operate.serving import READY_ANSWER_S
from delaytasks.settings import load_settings
from tests.doc_commands import check_command
from tests.running import ROOT

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "deployment"
UNITS = sorted((FOLDER / "systemd").glob("*.service"))
MANIFESTS: dict[str, dict[str, Any]] = {
    f"{path.name}-{document['kind']}": document
    for path in sorted((FOLDER / "kubernetes").glob("*.yaml"))
    if path.name != "kustomization.yaml"
    for document in yaml.safe_load_all(path.read_text())
}
COMPOSE: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yml").read_text())
#: The newest version of Kubernetes whose schemas are checked.
KUBERNETES = "1.34"


PODS = [
    manifest["spec"]["template"]["spec"]
    for manifest in MANIFESTS.values()
    if "template" in manifest.get("spec", {})
]
CONTAINERS = {container["name"]: container for pod in PODS for container in pod["containers"]}


def commands() -> Iterator[tuple[str, list[str]]]:
    """Yield the words of each command line, with the file that has it."""
    for name, service in COMPOSE["services"].items():
        yield f"compose.yml {name}", service.get("command", [])
        yield f"compose.yml {name}", service.get("healthcheck", {}).get("test", ["CMD"])[1:]
    for name, container in CONTAINERS.items():
        yield name, container["command"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            yield name, container.get(probe, {}).get("exec", {}).get("command", [])
    for unit in UNITS:
        lines = re.findall(r"^Exec(?:Start|Condition)=(.*)", unit.read_text(), re.MULTILINE)
        assert lines
        for found in re.findall(r"/bin/((?:celery|delaytasks) [^;']+)", "\n".join(lines)):
            yield unit.name, shlex.split(found)
    for line in (ROOT / "Procfile").read_text().splitlines():
        yield "Procfile", shlex.split(line.partition(": ")[2])
    yield "Dockerfile", json.loads(instructions("CMD")[0])


def instructions(*names: str) -> list[str]:
    """Return the arguments of the instructions of the Dockerfile that have one of the names."""
    found = re.findall(r"^([A-Z]+) (.*)$", (FOLDER / "Dockerfile").read_text(), re.MULTILINE)
    return [arguments for name, arguments in found if name in names]


def test_each_command_exists_with_its_options() -> None:
    ours = [found for found in commands() if found[1][:1] in (["celery"], ["delaytasks"])]
    assert len(ours) > 15
    for where, words in ours:
        check_command(words.copy(), where)


@pytest.mark.parametrize("name", MANIFESTS)
def test_the_manifests_agree_with_the_schemas_of_kubernetes(name: str) -> None:
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(MANIFESTS[name], KUBERNETES, strict=True)
    wrong = json.loads(json.dumps(MANIFESTS[name]))
    wrong["metadata"]["nmae"] = "typo"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


def test_services_of_kubernetes_add_no_unknown_settings_to_the_pods() -> None:
    with pytest.raises(ConfigError, match="exporter_port"):
        load_settings({}, {"DELAYTASKS_EXPORTER_PORT": "tcp://10.0.0.1:9819"})
    assert not any(pod["enableServiceLinks"] for pod in PODS)


def test_probes_end_before_kubernetes_gives_them_up() -> None:
    """A probe that is given up counts as a failure, even of liveness during an outage."""
    worker, api = CONTAINERS["worker"], CONTAINERS["api"]
    probes = [worker[f"{name}Probe"] for name in ("startup", "liveness", "readiness")]
    assert all(probe["timeoutSeconds"] >= 15 for probe in probes)
    assert ["--live" in probe["exec"]["command"] for probe in probes] == [True, True, False]
    for name, path in {"liveness": "/health/live", "readiness": "/health/ready"}.items():
        assert api[f"{name}Probe"]["httpGet"]["path"] == path
        assert api[f"{name}Probe"]["timeoutSeconds"] > READY_ANSWER_S
    assert api["ports"] == [{"name": "http", "containerPort": API_PORT}]


def test_the_image_runs_as_a_user_without_rights_and_contains_no_cache_and_no_secret() -> None:
    [user] = instructions("USER")
    assert {pod["securityContext"]["runAsUser"] for pod in PODS} == {int(user)}
    assert int(user) >= 1000
    runs = instructions("RUN")
    assert any(f"--uid {user}" in command for command in runs)
    text = (FOLDER / "Dockerfile").read_text()
    assert not re.search(r"^(RUN|COPY|FROM) ", text.partition("\nUSER ")[2], re.MULTILINE)
    assert all("--no-cache-dir" in command for command in runs if "pip install" in command)
    assert instructions("ADD", "ARG") == []
    assert not re.search(r"(?i)password|secret|token", " ".join(instructions("ENV", "RUN")))
    # Without the exec form, a shell would be the main process and would not pass TERM on.
    assert [json.loads(form)[0] for form in instructions("CMD", "ENTRYPOINT")] == ["celery"]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_the_units_import_the_project_as_its_user_only(unit: Path) -> None:
    text = unit.read_text()
    assert re.findall(r"^User=(.*)", text, re.MULTILINE) == ["delaytasks"]
    assert not re.search(r"^Exec\w+=[-@:]*[+!].*(python|celery|delaytasks )", text, re.MULTILINE)


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    if (program := shutil.which("systemd-analyze")) is None:
        pytest.skip("needs systemd-analyze, which is not available on this machine")
    (units := tmp_path / "units").mkdir()
    for name in ("celery", "delaytasks"):
        (tmp_path / name).symlink_to("/bin/true")
    for path in (FOLDER / "systemd").glob("delaytasks*"):
        text = path.read_text().replace("/srv/delaytasks/.venv/bin", str(tmp_path))
        (units / path.name.replace("@.", "@w1.")).write_text(text)
    environment = {**os.environ, "SYSTEMD_UNIT_PATH": f"{units}:"}
    command = [program, "verify", "--man=no", *sorted(map(str, units.iterdir()))]
    checked = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_the_compose_file_agrees_with_the_schema_of_compose() -> None:
    pytest.importorskip("check_jsonschema")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    command.append(str(FOLDER / "compose.yml"))
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
