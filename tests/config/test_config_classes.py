"""Identity, policy and local: what is compared, what is taken over, what stays."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from diloco.config.classes import (
    ConfigClass,
    Section,
    class_of,
    explain,
    fingerprint,
    identity_difference,
    identity_json,
    leaves,
    policy_json,
    section_of,
)
from diloco.config.load import load_config, with_policy
from diloco.config.model import ExpertsConfig, LatentAttentionConfig, RopeScalingConfig
from diloco.config.schema import Config
from diloco.errors import ConfigError

DEMO = Path(__file__).resolve().parents[2] / "configs" / "runs" / "demo.toml"
CONFIG = load_config(DEMO, island="eu-west")
#: Fields that hold the names of tables.
NAMES = ("islands", "data.sources", "syncers")
LEAVES = [(path, mark) for path, mark, _ in leaves(CONFIG) if path not in NAMES]
IDENTITY = {
    "run.name run.seed islands data.source data.sequence_length model.family model.vocab_size",
    "data.sources data.separator data.held_out_documents data.shuffle_window",
    "model.dim model.num_layers model.num_heads model.num_kv_heads model.ffn_dim model.rope_theta",
    "model.max_sequence_length model.norm_eps model.tie_embeddings outer.inner_steps_per_round",
    "outer.num_fragments outer.fragment_pattern outer.embedding_alone outer.explicit_fragments",
    "outer.first_inner_steps_per_round",
    "outer.phases outer.overlap_steps outer.local_mix outer.merge outer.num_lanes",
    "outer.merge_rule outer.plain_mean outer.experts model.head_dim model.qk_norm",
    "model.transformers",
    *(f"model.rope_scaling.{name}" for name in RopeScalingConfig.model_fields),
    *(f"model.latent_attention.{name}" for name in LatentAttentionConfig.model_fields),
    *(f"model.experts.{name}" for name in ExpertsConfig.model_fields),
}
POLICY = {
    "run.inner_steps outer.flush outer.weighting outer.min_contributions outer.round_deadline",
    "checkpoint.every_tokens",
    "outer.grace outer.grace_share outer.grace_cap",
    "run.min_islands run.max_islands run.open coordinator.lease",
    "data.handover_samples inner.expert_bias_speed",
    "outer.on_member_lost outer.optimizer.name outer.optimizer.lr outer.optimizer.momentum",
    "outer.optimizer.momentum_ramp_rounds outer.uplink_codec outer.downlink_codec",
    "outer.codec_by_name outer.clip_norm_ratio outer.guard outer.optimizer.betas",
    "outer.optimizer.eps outer.snapshot_rounds outer.keep_contributions",
    "outer.error_feedback outer.error_feedback_decay outer.retained_versions inner.clip_norm",
    "inner.optimizer.name",
    "inner.optimizer.lr inner.optimizer.schedule inner.optimizer.warmup_steps",
    "inner.optimizer.min_lr_ratio inner.optimizer.betas inner.optimizer.weight_decay",
    "inner.optimizer.decay_ratio inner.optimizer.decay_shape inner.optimizer.momentum",
    "inner.optimizer.adamw_by_name inner.optimizer.lr_by_name",
    "inner.optimizer.weight_decay_by_name inner.z_loss",
    "inner.optimizer.eps checkpoint.every_inner_steps checkpoint.every_tokens checkpoint.keep",
    "evaluation.every_checkpoints evaluation.every_inner_steps evaluation.max_returns",
    "evaluation.max_rise evaluation.num_sequences",
}


def replaced(section: Section, path: list[str], value: object) -> Section:
    """Copy a section with one value changed, unchecked (some fields have one valid value only)."""
    key, *rest = path
    old = getattr(section, key)
    if rest and isinstance(old, dict):
        new: Any = {**old, rest[0]: replaced(old[rest[0]], rest[1:], value)}
    else:
        new = replaced(old, rest, value) if rest else value
    return section.model_copy(update={key: new})


def sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for field in section.model_fields.values():
        if inner := section_of(field):
            yield from sections(inner)


@pytest.mark.parametrize(("path", "mark"), LEAVES, ids=[path for path, _ in LEAVES])
def test_a_changed_field_changes_its_own_class_only(path: str, mark: ConfigClass) -> None:
    other = replaced(CONFIG, path.split("."), "changed")

    assert (fingerprint(other) != fingerprint(CONFIG)) == (mark is ConfigClass.IDENTITY)
    assert (identity_json(other) != identity_json(CONFIG)) == (mark is ConfigClass.IDENTITY)
    assert (policy_json(other) != policy_json(CONFIG)) == (mark is ConfigClass.POLICY)


def test_classes_are_those_of_the_protocol() -> None:
    identity, policy = json.loads(identity_json(CONFIG)), json.loads(policy_json(CONFIG))

    assert identity.keys() == {path for line in IDENTITY for path in line.split()}
    assert policy.keys() == {path for line in POLICY for path in line.split()}


def test_every_field_is_described_and_has_exactly_one_class() -> None:
    for section in sections(Config):
        for name, field in section.model_fields.items():
            assert field.description, f"{section.__name__}.{name}"
            is_container = section_of(field) is not None and class_of(field) is None
            marks = [mark for mark in field.metadata if isinstance(mark, ConfigClass)]
            assert len(marks) == (0 if is_container else 1), f"{section.__name__}.{name}"


def test_names_of_islands_are_identity_and_their_shapes_are_not() -> None:
    renamed = CONFIG.model_copy(update={"islands": {"x": CONFIG.islands["eu-west"]}})
    reversed_order = CONFIG.model_copy(update={"islands": dict(reversed(CONFIG.islands.items()))})
    bigger_batch = load_config(DEMO, ["islands.us-east.tokens_per_inner_step=3072"])

    assert fingerprint(renamed) != fingerprint(CONFIG)
    assert fingerprint(reversed_order) == fingerprint(CONFIG)
    assert fingerprint(bigger_batch) == fingerprint(CONFIG)


def test_identity_is_canonical_json() -> None:
    text = identity_json(CONFIG)

    assert text == json.dumps(json.loads(text), sort_keys=True, separators=(",", ":"))
    assert '"islands":["eu-west","us-east"]' in text
    assert '"outer.local_mix":0.0' in text


def test_same_values_by_preset_or_by_hand_have_one_fingerprint() -> None:
    by_hand = load_config(
        DEMO,
        [
            "model={preset='custom', dim=128, num_layers=4, num_heads=4, num_kv_heads=2,"
            " ffn_dim=416}",
            "outer.preset=classic",
        ],
    )

    assert fingerprint(by_hand) == fingerprint(CONFIG)


def test_difference_names_every_key_with_both_values() -> None:
    there = load_config(DEMO, ["outer.overlap_steps=3", "run.seed=5", "outer.optimizer.lr=0.1"])
    short = json.dumps({"run.seed": 5})

    lines = identity_difference(identity_json(CONFIG), identity_json(there))

    assert lines == ["outer.overlap_steps: 2 here, 3 there", "run.seed: 1234 here, 5 there"]
    assert identity_difference(short, short) == []
    assert identity_difference(short, "{}") == ["run.seed: 5 here, absent there"]


def test_policy_of_the_coordinator_wins_and_nothing_else_changes() -> None:
    theirs = load_config(
        DEMO,
        [
            "run.inner_steps=99",
            "outer.optimizer.lr=0.4",
            "outer.round_deadline=5s",
            "inner.optimizer.betas=[0.8, 0.9]",
            "coordinator.state_dir=far",
            "islands.eu-west.threads=4",
        ],
    )

    config = with_policy(CONFIG, policy_json(theirs))

    assert policy_json(config) == policy_json(theirs)
    assert identity_json(config) == identity_json(CONFIG)
    assert (config.run.inner_steps, config.outer.round_deadline.seconds) == (99, 5.0)
    assert (config.coordinator, config.islands) == (CONFIG.coordinator, CONFIG.islands)
    assert config.island_id == "eu-west"


def test_own_policy_changes_nothing() -> None:
    assert with_policy(CONFIG, policy_json(CONFIG)) == CONFIG


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"run.seed": 5}, "run.seed"),
        ({"outer.shiny": 1}, "outer.shiny"),
        ({"outer.local_mix": 0.5}, "outer.local_mix"),
    ],
    ids=["identity field", "unknown field", "identity field of outer"],
)
def test_policy_with_other_fields_is_refused(change: dict[str, object], part: str) -> None:
    text = json.dumps({**json.loads(policy_json(CONFIG)), **change})

    with pytest.raises(ConfigError, match=part):
        with_policy(CONFIG, text)


def test_policy_without_a_field_is_refused() -> None:
    values = json.loads(policy_json(CONFIG))
    del values["outer.flush"]

    with pytest.raises(ConfigError, match=r"outer\.flush"):
        with_policy(CONFIG, json.dumps(values))


def test_policy_with_a_bad_value_is_refused_by_path() -> None:
    values = {**json.loads(policy_json(CONFIG)), "outer.optimizer.lr": -1}

    with pytest.raises(ConfigError, match=r"outer\.optimizer\.lr: -1"):
        with_policy(CONFIG, json.dumps(values))


def test_explain_lists_every_field_with_class_range_and_description() -> None:
    rows = {row.path: row for row in explain(Config)}

    expected = {
        path.replace(".eu-west.", ".NAME.")
        for path, _, _ in leaves(CONFIG)
        if "us-east" not in path
    }
    tables = ("data.sources.NAME.", "syncers.NAME.")
    named = {path for path in rows if path.startswith(tables)}
    assert rows.keys() - named == expected | {"model.hf_config"}  # has no keys here
    assert {"data.sources.NAME.files", "syncers.NAME.listen"} <= named
    assert all(row.description for row in rows.values())
    alpha, gamma = rows["outer.local_mix"], rows["outer.grace_share"]
    assert (alpha.config_class, alpha.default) == ("identity", "0.0")
    assert (gamma.config_class, gamma.allowed) == ("policy", ">= 0 and <= 1")
    assert rows["run.seed"].default == "-"
    assert rows["outer.preset"].allowed == '"classic" or "streaming" or "decoupled"'
