"""The files for Prometheus and Grafana in configs/monitoring: of metrics that there are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import Metric

from diloco.protos.control_pb2 import (
    AlarmStatus,
    FragmentStatus,
    HeldOut,
    IslandStatus,
    LinkUse,
    ReportRequest,
    StatusReply,
    SyncerLinkUse,
    SyncerStatus,
)
from diloco.protos.fragment_pb2 import FragmentState
from diloco.telemetry.prometheus import coordinator_metrics, syncer_metrics
from diloco.telemetry.syncer_meter import SyncerMeter

ROOT = Path(__file__).resolve().parent.parent.parent
MONITORING = ROOT / "configs/monitoring"
RULES = MONITORING / "alerts.yml"
CASES = Path(__file__).with_name("alert_cases.yml")


def exported() -> list[Metric]:
    """All metrics of a coordinator and a syncer."""
    use = SyncerLinkUse(up_bps=1.0, down_bps=1.0, round_trip_s=0.1)
    report = ReportRequest(
        state="training",
        link=LinkUse(syncers=[use], up_capacity_bps=1.0, down_capacity_bps=1.0),
        mfu=0.5,
        resident_bytes=1,
        device_bytes=1,
        held_out=[HeldOut(checkpoint=1, nats_per_byte=1.0)],
    )
    status = StatusReply(
        run="demo",
        state="running",
        inner_steps=10,
        checkpoint_steps=[1],
        islands=[IslandStatus(island="east", incarnation=1, last_report=report, lease="active")],
        fragments=[FragmentStatus(fragment_id=0, phase="open")],
        syncers=[SyncerStatus(syncer_id=0)],
        alarms=[AlarmStatus()],
    )
    states = [FragmentState(fragment_id=0, is_founded=True)]
    of_syncer = syncer_metrics(states, SyncerMeter(lambda: 0.0), syncer_epoch=1)
    return [*coordinator_metrics(status), *of_syncer]


def samples() -> set[str]:
    """Names as Prometheus stores them."""
    ends = {"counter": ["_total"], "histogram": ["_sum", "_count", "_bucket"]}
    return {metric.name + end for metric in exported() for end in ends.get(metric.type, [""])}


def alerts() -> list[dict[str, object]]:
    (group,) = yaml.safe_load(RULES.read_text("utf-8"))["groups"]
    return list(group["rules"])


def queries() -> dict[str, str]:
    """Queries of the dashboard, by panel."""
    content = json.loads((MONITORING / "dashboard.json").read_text("utf-8"))
    return {
        f"{panel['id']} {target['refId']}": target["expr"]
        for panel in content["panels"]
        for target in panel["targets"]
    }


def test_rules_and_dashboard_ask_for_metrics_that_there_are() -> None:
    asked = {str(rule["expr"]) for rule in alerts()} | {*queries().values()}
    named = {name for each in asked for name in re.findall(r"\bdiloco_\w+", each)}
    assert named <= samples()
    assert len(named) > 20


def test_every_alert_says_what_to_type() -> None:
    for rule in alerts():
        annotations = rule["annotations"]
        assert isinstance(annotations, dict)
        assert annotations["summary"]
        assert re.search(r"diloco [a-z]+ |edac-util|firewall", annotations["runbook"]), rule


def test_names_keep_the_conventions_of_prometheus() -> None:
    for metric in exported():
        assert metric.documentation, metric.name
        assert re.fullmatch(r"diloco_[a-z0-9_]+", metric.name)
        assert not re.search(r"_(ms|us|kb|mb|gb|minutes|hours|percent)$", metric.name)
        assert (metric.type == "counter") or not metric.name.endswith("_total")


@pytest.mark.slow
def test_promtool_takes_them_and_each_alert_goes_off_when_it_should(tmp_path: Path) -> None:
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("no promtool here: apt-get install prometheus")
    of_dashboard = tmp_path / "dashboard.yml"
    rules = [{"record": f"q{n}", "expr": expr} for n, expr in enumerate(queries().values())]
    of_dashboard.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    for command in (
        ("check", "config", str(MONITORING / "prometheus.yml")),
        ("check", "rules", str(RULES), str(of_dashboard)),
        ("test", "rules", str(CASES)),
    ):
        done = subprocess.run([promtool, *command], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout + done.stderr
    tested = re.findall(r'alertname="(\w+)"', CASES.read_text("utf-8"))
    assert sorted(tested) == sorted(str(rule["alert"]) for rule in alerts())
