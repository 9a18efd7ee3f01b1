"""Where metrics go is a site's own affair, and follows the rule of all that listens."""

from __future__ import annotations

from pathlib import Path

import pytest

from diloco.config.classes import fingerprint
from diloco.config.load import load_config
from diloco.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "runs" / "demo.toml"
METRICS = ("telemetry.coordinator_metrics", "telemetry.syncer_metrics")


def test_nothing_but_events_is_written_unless_asked_for() -> None:
    telemetry = load_config(DEMO).telemetry

    assert (telemetry.wandb.mode, telemetry.tensorboard) == ("disabled", False)
    assert (telemetry.coordinator_metrics, telemetry.syncer_metrics) == ("", "")


def test_sinks_of_two_sites_may_differ() -> None:
    overrides = (
        "telemetry.tensorboard=true",
        "telemetry.wandb.mode=offline",
        f"{METRICS[0]}=[::1]:9",
    )

    assert fingerprint(load_config(DEMO, overrides)) == fingerprint(load_config(DEMO))


@pytest.mark.parametrize("setting", METRICS)
def test_metrics_beyond_this_machine_need_a_declaration(setting: str) -> None:
    override = f"{setting}=0.0.0.0:9400"

    with pytest.raises(ConfigError, match=f"{setting}.*transport.insecure = true"):
        load_config(DEMO, [override])

    with pytest.raises(ConfigError, match=f"{setting}.*metrics_token"):
        load_config(DEMO, ["transport.insecure=true", override])

    token = "telemetry.metrics_token=metrics.token"
    load_config(DEMO, ["transport.insecure=true", token, override])
    load_config(DEMO, ["transport.certs=certs", token, override])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("telemetry.syncer_metrics=localhost", "telemetry.syncer_metrics.*must be HOST:PORT"),
        ("telemetry.coordinator_metrics=localhost:70000", "coordinator_metrics.*port 0 to 65535"),
        ("telemetry.wandb.mode=on", 'telemetry.wandb.mode.*"?disabled"?'),
        ("telemetry.wandb.group=mine", "telemetry.wandb.group"),
    ],
    ids=["no-host", "no-such-port", "no-such-mode", "no-such-key"],
)
def test_wrong_values_are_named(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(DEMO, [override])


def test_a_trace_of_no_steps_is_refused_with_what_to_set() -> None:
    with pytest.raises(
        ConfigError, match=r"telemetry.profile.start_step: 20: needs num_steps, and .* leave"
    ):
        load_config(DEMO, ["telemetry.profile.start_step=20"])

    config = load_config(DEMO, ["telemetry.profile.num_steps=3", "telemetry.dir=told"])
    assert config.profile_dir == Path("told/traces")
