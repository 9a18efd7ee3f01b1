"""Loading run files: every refusal says where, what, the range and the remedy."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diloco.config.classes import fingerprint
from diloco.config.load import load_config, resolved_toml
from diloco.config.outer import FEWEST_OF_A_MEDIAN
from diloco.config.schema import Config
from diloco.errors import ConfigError
from diloco.outer.combination import MIN_JUDGED

RUNS = Path(__file__).resolve().parents[2] / "configs" / "runs"
DEMO = RUNS / "demo.toml"
MINIMAL = """
[run]
name = "minimal"
seed = 7
inner_steps = 10
[model]
preset = "tiny"
[data]
sequence_length = 32
[inner.optimizer]
lr = 1e-3
[outer]
preset = "classic"
inner_steps_per_round = 5
[coordinator]
state_dir = "runs/minimal"
[islands.a]
ranks = 1
tokens_per_inner_step = 64
"""


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(text)
    return path


def refusal(path: Path, *overrides: str, island: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides, island)
    return str(caught.value)


@pytest.mark.parametrize("path", sorted(RUNS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_shipped_run_file_loads_and_its_resolved_copy_is_equal(
    path: Path, tmp_path: Path
) -> None:
    config = load_config(path)

    copy = write(tmp_path, resolved_toml(config))

    assert load_config(copy) == config
    assert resolved_toml(load_config(copy)) == resolved_toml(config)


def test_demo_has_the_values_of_the_main_job() -> None:
    config = load_config(DEMO, island="us-east")

    assert (config.run.seed, config.run.inner_steps, config.data.sequence_length) == (
        1234,
        325,
        128,
    )
    assert (config.outer.inner_steps_per_round, config.outer.num_fragments) == (24, 4)
    assert (config.outer.overlap_steps, config.outer.local_mix) == (2, 0.0)
    assert (config.outer.uplink_codec, config.outer.downlink_codec) == ("int4", "int4")
    assert config.outer.round_deadline.seconds == 60.0
    assert config.transport.unreachable.seconds == 600.0
    assert (config.transport.num_channels, config.transport.rate.bps) == (0, 0.0)
    assert (config.island.mesh.dp_shard, config.island.mesh.tp) == (1, 2)
    assert set(config.islands) == {"eu-west", "us-east"}


def test_debug_preset_has_about_0_9m_parameters() -> None:
    model = load_config(DEMO).model
    head_dim = model.dim // model.num_heads
    attention = 2 * model.dim * head_dim * (model.num_heads + model.num_kv_heads)
    layer = attention + 3 * model.dim * model.ffn_dim + 2 * model.dim
    total = model.num_layers * layer + 2 * model.vocab_size * model.dim + model.dim

    assert 0.85e6 < total < 0.95e6


def test_resolved_copy_keeps_awkward_strings_and_arrays(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            r'coordinator.state_dir="a \"quoted\" \\ tab\t del\u007f \U0001F600"',
            "outer.num_fragments=2",
            'outer.fragment_pattern="explicit"',
            'outer.explicit_fragments=[["a.weight", "b"], ["c"]]',
            "outer.phases=[3, 5]",
            "inner.optimizer.eps=1e-20",
        ],
        island="a",
    )

    copy = load_config(write(tmp_path, resolved_toml(config)))

    assert copy == config
    assert copy.coordinator.state_dir == 'a "quoted" \\ tab\t del\x7f \U0001f600'
    assert copy.outer.explicit_fragments == (("a.weight", "b"), ("c",))
    assert copy.island_id == "a"


@pytest.mark.parametrize(
    ("preset", "expected"),
    [
        ("classic", (1, 0, "float32", "float32")),
        ("streaming", (3, 1, "int4", "int4")),
    ],
)
def test_outer_preset_gives_defaults(
    preset: str, expected: tuple[object, ...], tmp_path: Path
) -> None:
    given = [f"outer.preset={preset}"] + ["outer.num_fragments=3"] * (preset == "streaming")

    outer = load_config(write(tmp_path, MINIMAL), given).outer

    codecs = (outer.uplink_codec, outer.downlink_codec)
    assert (outer.num_fragments, outer.overlap_steps, *codecs) == expected


def test_explicit_keys_win_over_the_preset(tmp_path: Path) -> None:
    outer = load_config(
        write(tmp_path, MINIMAL),
        [
            "outer.preset=streaming",
            "outer.num_fragments=2",
            "outer.overlap_steps=0",
            "outer.downlink_codec=float32",
            "outer.optimizer.lr=0.4",
        ],
    ).outer

    assert (outer.overlap_steps, outer.uplink_codec, outer.downlink_codec) == (0, "int4", "float32")
    assert (outer.optimizer.lr, outer.optimizer.momentum_ramp_rounds) == (0.4, 20)


@pytest.mark.parametrize(
    ("given", "is_on"),
    [
        (["outer.uplink_codec=int4"], False),
        (["outer.uplink_codec=int2"], True),
        (["outer.uplink_codec=topk64"], True),
        (["outer.downlink_codec=int2"], False),
        (["outer.uplink_codec=int2", "outer.error_feedback=false"], False),
        (['outer.codec_by_name=["*=topk64"]'], True),
        (["outer.uplink_codec=int4", 'outer.codec_by_name=["a=float32", "*b*=int2"]'], True),
        (["outer.uplink_codec=int4", 'outer.codec_by_name=["int2=float32"]'], False),
        (['outer.codec_by_name=["*=int2"]', "outer.error_feedback=false"], False),
    ],
)
def test_coarse_uplinks_have_error_feedback_unless_it_is_refused(
    given: list[str], is_on: bool, tmp_path: Path
) -> None:
    assert load_config(write(tmp_path, MINIMAL), given).outer.error_feedback == is_on


@pytest.mark.parametrize("codec", ["topk64", "topk128"])
@pytest.mark.parametrize("preset", ["classic", "streaming", "decoupled"])
def test_a_sparse_uplink_brings_the_outer_step_that_it_needs(
    codec: str, preset: str, tmp_path: Path
) -> None:
    given = [f"outer.preset={preset}", "outer.num_fragments=1", f"outer.uplink_codec={codec}"]

    config = load_config(write(tmp_path, MINIMAL), given)
    again = load_config(write(tmp_path, resolved_toml(config)))

    outer = config.outer
    assert again == config
    assert (outer.optimizer.name, outer.optimizer.lr, outer.optimizer.momentum) == ("sgd", 1.0, 0.0)
    assert (outer.error_feedback, outer.error_feedback_decay) == (True, 0.95)
    assert not outer.sparse_problem


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["outer.optimizer.lr=0.4"], ""),
        (["outer.optimizer.name=nesterov", "outer.optimizer.momentum=0.5"], ""),
        (["outer.optimizer.name=nesterov"], "error feedback: diverges"),
        (["outer.optimizer.momentum=0.9"], "error feedback: diverges"),
        (["outer.error_feedback=false"], "without error feedback learns little"),
        (["outer.optimizer.name=adam"], "was never measured"),
    ],
)
def test_what_does_not_go_with_a_sparse_uplink_is_said_with_the_remedy(
    given: list[str], words: str, tmp_path: Path
) -> None:
    config = load_config(write(tmp_path, MINIMAL), ["outer.uplink_codec=topk64", *given])

    problem = config.outer.sparse_problem
    assert (words in problem and ("set optimizer" in problem or "leave outer" in problem)) == bool(
        words
    )
    assert bool(problem) == bool(words)


def test_a_decay_without_error_feedback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"error_feedback_decay: 0.9: needs error_feedback, and"):
        load_config(write(tmp_path, MINIMAL), ["outer.error_feedback_decay=0.9"])


@pytest.mark.parametrize("name", ["sgd", "adam"])
def test_the_usual_ramp_is_no_word_against_an_optimizer_without_momentum(
    name: str, tmp_path: Path
) -> None:
    streaming = ("outer.preset=streaming", "outer.num_fragments=1", f"outer.optimizer.name={name}")

    config = load_config(write(tmp_path, MINIMAL), streaming)
    again = load_config(write(tmp_path, resolved_toml(config)))

    assert again == config
    assert config.outer.optimizer.momentum_ramp_rounds == 0


def test_ratios_are_taken_where_a_median_is(tmp_path: Path) -> None:
    islands = [f"islands.{i}={{ranks=1, tokens_per_inner_step=64}}" for i in "bc"]

    outer = load_config(write(tmp_path, MINIMAL), [*islands, "outer.clip_norm_ratio=3"]).outer

    assert outer.clip_norm_ratio == 3.0
    assert FEWEST_OF_A_MEDIAN == MIN_JUDGED


def test_a_hand_over_of_less_than_two_steps_is_refused_where_there_are_any(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)
    decoupled = "outer={preset='decoupled', inner_steps_per_round=5, num_fragments=1}"

    message = refusal(path, decoupled, "data.handover_samples=3")

    assert "islands.a draws 2 samples an inner step, and data.handover_samples = 3" in message
    assert "set it to 4 or more" in message
    assert load_config(path, overrides=[decoupled, "data.handover_samples=4"])
    assert load_config(path, overrides=["data.handover_samples=3"])  # nothing is handed over


def test_codecs_by_name_are_a_part_of_both_directions(tmp_path: Path) -> None:
    given = ["outer.uplink_codec=int4", 'outer.codec_by_name=["*norm=float32", "a=b=int8"]']

    outer = load_config(write(tmp_path, MINIMAL), given).outer

    assert outer.uplink == "int4 *norm=float32 a=b=int8"
    assert outer.downlink == "float32 *norm=float32 a=b=int8"


def test_explicit_dimension_wins_over_the_model_preset(tmp_path: Path) -> None:
    model = load_config(write(tmp_path, MINIMAL), ["model.num_layers=3"]).model

    assert (model.num_layers, model.dim) == (3, 32)


def test_later_override_wins_over_earlier_and_file(tmp_path: Path) -> None:
    path = write(tmp_path, MINIMAL)

    config = load_config(path, ["run.inner_steps=20", "run.inner_steps=30"])

    assert (load_config(path).run.inner_steps, config.run.inner_steps) == (10, 30)


@pytest.mark.parametrize(
    ("override", "read", "expected"),
    [
        ("run.name=other", lambda c: c.run.name, "other"),
        ('run.name="2024"', lambda c: c.run.name, "2024"),
        ("run.name=1979-05-27", lambda c: c.run.name, "1979-05-27"),
        ("outer.round_deadline=5min", lambda c: c.outer.round_deadline.seconds, 300.0),
        ("outer.flush=false", lambda c: c.outer.flush, False),
        ("outer.optimizer.lr=1", lambda c: c.outer.optimizer.lr, 1.0),
        ("inner.optimizer.betas=[0.8, 0.9]", lambda c: c.inner.optimizer.betas, (0.8, 0.9)),
        ("coordinator.state_dir=a=b", lambda c: c.coordinator.state_dir, "a=b"),
        ("islands.a.threads=2", lambda c: c.islands["a"].threads, 2),
        ("islands.b={ranks=1, tokens_per_inner_step=32}", lambda c: sorted(c.islands), ["a", "b"]),
        ("evaluation.num_sequences=4", lambda c: c.evaluation.num_sequences, 4),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_override_is_read_as_toml_and_else_as_text(
    override: str, read: object, expected: object, tmp_path: Path
) -> None:
    config = load_config(write(tmp_path, MINIMAL), [override])

    assert callable(read)
    assert read(config) == expected


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("run.sed=1", ["run.sed=1", "unknown key", 'did you mean "seed"?']),
        ("rnu.seed=1", ["unknown key", 'did you mean "run"?']),
        ("zzz=1", ["unknown key; known here: island_id, run, model"]),
        ("run.seed.deep=1", ["unknown key"]),
        ("run.seed", ["write KEY=VALUE"]),
        ("run..seed=1", ["write KEY=VALUE"]),
        ("=1", ["write KEY=VALUE"]),
        ("islands.b.ranks=1", ["b is not an island of this file", "islands: a"]),
        ("islands.a.rank=1", ['did you mean "ranks"?']),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_override_of_an_unknown_path_is_refused(
    override: str, parts: list[str], tmp_path: Path
) -> None:
    message = refusal(write(tmp_path, MINIMAL), override)

    assert all(part in message for part in parts), message


NO_UNIT = "with a unit"
REFUSALS = [
    # override of the minimal file, parts of the answer
    ("run.seed=-1", ["run.seed: -1:", ">= 0"]),
    ("run.seed=1.0", ["run.seed: 1.0: must be an integer"]),
    ("run.seed=true", ["run.seed: true: must be an integer"]),
    ("run.inner_steps=0", ["run.inner_steps: 0:", "allowed: >= 1"]),
    ('run.inner_steps="ten"', ['run.inner_steps: "ten": must be an integer']),
    ("run.name=5", ["run.name: 5: must be a string, in quotes"]),
    ('run.name="a/b"', ['run.name: "a/b": must match']),
    ("run={}", ["run.name: missing", "run.seed: missing", "run.inner_steps: missing"]),
    ("run=5", ["run: 5: must be a table"]),
    ("model.family=hg", ['model.family: "hg"', 'allowed: "llama" or "hf" or "own"']),
    ("model.preset=debgu", ['model.preset: "debgu":', '"debug" or "tiny" or "10M"']),
    ("model.preset=custom", ["model.dim: missing", "model.ffn_dim: missing"]),
    ("model.vocab_size=255", ["model.vocab_size: 255:", ">= 256"]),
    ("model.num_heads=3", ["model.num_heads: 3: 2 x num_heads must divide dim = 32"]),
    ("model.num_kv_heads=3", ["model.num_kv_heads: 3: must divide num_heads = 4"]),
    ("model.rope_theta=0", ["model.rope_theta: 0:", "> 0"]),
    ("model.max_sequence_length=16", ["data.sequence_length: 32:", "max_sequence_length = 16"]),
    ("data.source=web", ['data.source: "web":', 'allowed: "stdlib" or "streams"']),
    ("data.sequence_length=0", ["data.sequence_length: 0:", ">= 1"]),
    (
        "data.sequence_length=48",
        ["islands.a.tokens_per_inner_step: 64: must be a multiple", "= 48"],
    ),
    ("inner.optimizer.lr=nan", ["inner.optimizer.lr: nan: must be a finite number", "> 0"]),
    ("inner.optimizer.lr=inf", ["inner.optimizer.lr: inf: must be a finite number"]),
    ("inner.optimizer.lr=0", ["inner.optimizer.lr: 0:", "> 0"]),
    ("inner.optimizer.name=sgd", ['inner.optimizer.name: "sgd":', 'allowed: "adamw"']),
    ("inner.optimizer.warmup_steps=-1", ["warmup_steps: -1:", ">= 0"]),
    ("inner.optimizer.betas=[0.9]", ["inner.optimizer.betas.1: missing"]),
    ("inner.optimizer.betas=[0.9, 1.0]", ["inner.optimizer.betas.1: 1.0:", "in [0, 1)"]),
    ("inner.optimizer.betas=[nan, 0.9]", ["inner.optimizer.betas.0: nan:", "finite"]),
    ("inner.clip_norm=0.0", ["inner.clip_norm: 0.0:", "> 0"]),
    ("outer.preset=coupled", ['outer.preset: "coupled"', '"streaming" or "decoupled"']),
    ("outer.preset=streaming", ["outer.num_fragments: missing", ">= 1"]),
    ("outer.inner_steps_per_round=0", ["outer.inner_steps_per_round: 0:", ">= 1"]),
    ("outer.overlap_steps=5", ["outer.overlap_steps: 5: must be smaller", "= 5", "0 <= tau < H"]),
    (
        "outer.first_inner_steps_per_round=6",
        ["first_inner_steps_per_round: 6: must be at most", "= 5"],
    ),
    ("outer.first_inner_steps_per_round=-1", ["outer.first_inner_steps_per_round: -1:", ">= 0"]),
    ("outer.overlap_steps=-1", ["outer.overlap_steps: -1:", ">= 0"]),
    ("outer.num_fragments=0", ["outer.num_fragments: 0:", ">= 1"]),
    ("outer.num_fragments=-3", ["outer.num_fragments: -3:", ">= 1"]),
    ("outer.num_lanes=0", ["outer.num_lanes: 0:", ">= 1"]),
    ("outer.local_mix=1.01", ["outer.local_mix: 1.01:", ">= 0 and <= 1"]),
    ("outer.local_mix=-0.5", ["outer.local_mix: -0.5:", ">= 0 and <= 1"]),
    ("outer.local_mix=nan", ["outer.local_mix: nan: must be a number"]),
    ("outer.local_mix=false", ["outer.local_mix: false: must be a number"]),
    ("outer.local_mix=sent", ['outer.local_mix: "sent":', '>= 0 and <= 1, or "since_send"']),
    (
        "outer={preset='streaming',inner_steps_per_round=4,num_fragments=1,local_mix='since_send',"
        "uplink_codec='int2',error_feedback=false}",
        ['outer.local_mix: "since_send": needs error_feedback = true'],
    ),
    ("outer.local_mix=since_send", ['outer.local_mix: "since_send": needs an overlap_steps of 1']),
    ("outer.phases=[1, 2]", ["outer.phases: [1, 2]: 2 phases, but num_fragments = 1"]),
    ("outer.phases=[6]", ["outer.phases: [6]:", "0 to inner_steps_per_round = 5"]),
    ("outer.phases=[-1]", ["outer.phases: [-1]:", "0 to inner_steps_per_round = 5"]),
    ("outer.phases=[1.5]", ["outer.phases.0: 1.5: must be an integer"]),
    ("outer.phases=3", ["outer.phases: 3: must be an array"]),
    ("outer.explicit_fragments=[[1]]", ["outer.explicit_fragments.0.0: 1: must be a string"]),
    ("outer.merge=sometimes", ['outer.merge: "sometimes"', '"scheduled" or "on_arrival"']),
    ("outer.min_contributions=2", ['outer.min_contributions: 2: needs merge = "on_arrival"']),
    ("outer.min_contributions=0", ["outer.min_contributions: 0: must be", '"all"']),
    ("outer.grace=soon", ['outer.grace: "soon"', '"auto" or 0s to 1h']),
    ("outer.on_member_lost=go", ['outer.on_member_lost: "go"', '"stop" or "wait" or "shrink"']),
    ("run.open=true", ["run.open: true: needs max_islands"]),
    ("run.max_islands=1", ['run.max_islands: 1: needs outer.merge = "on_arrival"']),
    ("outer.weighting=equal", ['outer.weighting: "equal":', '"tokens" or "tokens_times_rate"']),
    ("outer.merge_rule=median", ['outer.merge_rule: "median":', '"mean" or "radial_directional"']),
    ("outer.clip_norm_ratio=-1", ["outer.clip_norm_ratio: -1:", ">= 0"]),
    ("outer.clip_norm_ratio=0.5", ["outer.clip_norm_ratio: 0.5: must be at least 1"]),
    ("outer.clip_norm_ratio=nan", ["outer.clip_norm_ratio: nan: must be a finite number"]),
    ("outer.guard=1", ["outer.guard: 1: must be true or false"]),
    ("outer.uplink_codec=int3", ['outer.uplink_codec: "int3":', '"float32" or "float16" or']),
    ('outer.codec_by_name=["*norm"]', ["outer.codec_by_name:", "'*norm' must be PATTERN=CODEC"]),
    ('outer.codec_by_name=["a b=int8"]', ["'a b=int8' must be", "without blanks"]),
    ('outer.codec_by_name=["*=int3"]', ["'*=int3': codec 'int3' is none of float32, float16"]),
    ("outer.flush=1", ["outer.flush: 1: must be true or false"]),
    ("outer.retained_versions=0", ["outer.retained_versions: 0:", ">= 1"]),
    ("outer.snapshot_rounds=0", ["outer.snapshot_rounds: 0:", ">= 1"]),
    ("outer.keep_contributions=some", ["outer.keep_contributions", 'allowed: "retained" or "all"']),
    ("outer.round_deadline=60", ["outer.round_deadline: 60:", NO_UNIT]),
    ('outer.round_deadline="60"', ['outer.round_deadline: "60":', NO_UNIT]),
    ("outer.round_deadline=0s", ['outer.round_deadline: "0s":', "write a number over 0, with a"]),
    ("outer.round_deadline=0", ["outer.round_deadline: 0:", "write a number over 0, with a unit"]),
    ("outer.round_deadline=1e-300s", ['"1e-300s": is out of range', "allowed: 100ms to 168h"]),
    ("outer.round_deadline=infs", ['outer.round_deadline: "infs":', NO_UNIT]),
    ("outer.num_lanes=9999999999999999999999", ["outer.num_lanes:", ">= 1 and <= 65536"]),
    (
        "outer.optimizer={name='sgd', momentum=0.9}",
        ["momentum: 0.9: sgd has no momentum: leave it out"],
    ),
    (
        "outer.optimizer={name='adam', momentum_ramp_rounds=5}",
        ["outer.optimizer.momentum_ramp_rounds: 5: adam has no momentum"],
    ),
    ("outer.plain_mean=['*norm*']", ['plain_mean: ["*norm*"]: needs merge_rule = "radial']),
    ("outer.experts=[]", ["outer.experts: []: needs merge_rule", 'and it is "mean": set that']),
    (
        "outer.clip_norm_ratio=3",
        ["islands:", "1 of them, and outer.clip_norm_ratio = 3 compares 3"],
    ),
    ("islands.a.memory_copies=3", ["islands.a.memory_copies: 3: needs memory_checkpoint_steps"]),
    ("islands.a.heal_wait=5s", ['islands.a.heal_wait: "5s": needs heal_optimizer']),
    (
        "islands.a={ranks=1, tokens_per_inner_step=64, heal_optimizer=true, heal_wait='60s'}",
        ['islands.a.heal_wait: "60s"', "shorter than outer.round_deadline = 60s"],
    ),
    ("run.inner_steps=99999999999999", ["run.inner_steps: 99999999999999:", "<= 1000000000"]),
    ("outer.inner_steps_per_round=9999999999", ["inner_steps_per_round:", "<= 1000000000"]),
    ("transport.rpc_timeout=1us", ['transport.rpc_timeout: "1us": is out of', "100ms to 168h"]),
    ("outer.round_deadline=-1s", ['outer.round_deadline: "-1s":']),
    ("outer.round_deadline=nans", ['outer.round_deadline: "nans":']),
    ("outer.optimizer.lr=0", ["outer.optimizer.lr: 0:", "> 0"]),
    ("outer.optimizer.momentum=1", ["outer.optimizer.momentum: 1:", ">= 0 and < 1"]),
    ("outer.optimizer.momentum=[0.8, 1]", ["momentum: [0.8, 1]:", "or a list of two"]),
    (
        "outer={preset='decoupled', inner_steps_per_round=9, num_fragments=1, "
        "optimizer={momentum=[0.8, 0.5]}}",
        ["optimizer.momentum: [0.8, 0.5]: falls by rounds", "give one number"],
    ),
    ("outer.optimizer.name=rmsprop", ['outer.optimizer.name: "rmsprop":', 'or "adam"']),
    (
        "outer.optimizer={name='adam', momentum=0.9}",
        ["momentum: 0.9: adam has no momentum", "beta"],
    ),
    ("outer.optimizer.eps=1e-3", ['outer.optimizer.eps: 0.001: needs name = "adam"']),
    ("outer.optimizer.betas=[0.9, 0.99]", ["outer.optimizer.betas:", 'needs name = "adam"']),
    ("outer.optimizer={name='adam', betas=[0.9, 1]}", ["betas.1: 1:", "in [0, 1)"]),
    ("outer.optimizer=0.7", ["outer.optimizer: 0.7: must be a table"]),
    ("coordinator.listen=7000", ["coordinator.listen: 7000: must be a string"]),
    ("coordinator.listen=localhost", ['coordinator.listen: "localhost": must be HOST:PORT']),
    ("coordinator.listen=localhost:99999", ["must be HOST:PORT", "0 to 65535"]),
    ("coordinator.listen=0.0.0.0:7000", ["coordinator.listen:", "transport.insecure = true"]),
    ("coordinator.syncer_listen=far:1", ["coordinator.syncer_listen:", "insecure = true"]),
    ("coordinator.num_syncers=0", ["coordinator.num_syncers: 0:"]),
    ("coordinator.num_syncers=9", ["coordinator.num_syncers: 9: each serves whole fragments"]),
    ("coordinator.address=far", ['coordinator.address: "far": must be HOST:PORT']),
    ('coordinator.state_dir=""', ['coordinator.state_dir: "": must not be empty']),
    ("transport.kind=libp2p", ['transport.kind: "libp2p":', 'allowed: "grpc" or "hivemind"']),
    ("transport.hivemind.relayed=true", ["relayed: true: needs initial_peers"]),
    ("transport.hivemind.initial_peers=['/ip4/1.2.3.4/tcp/1']", ["the multiaddr of one peer"]),
    ("transport.link=../x", ['transport.link: "../x": must match']),
    ("coordinator.spool_memory=50", ["coordinator.spool_memory: 50:", NO_UNIT]),
    ("transport.payloads=mail", ['transport.payloads: "mail":', '"direct" or "bucket"']),
    ("transport.rate=50", ["transport.rate: 50:", NO_UNIT]),
    ("transport.rate=0Mbit/s", ['transport.rate: "0Mbit/s":', "write a number over 0"]),
    ("transport.snapshot_rate=1MiB", ['transport.snapshot_rate: "1MiB":', "not a bandwidth"]),
    ("transport.channels=0", ["transport.channels: 0:", "from 1 to 64"]),
    ("transport.channels=many", ['transport.channels: "many":', "auto"]),
    ("transport.unreachable=600", ["transport.unreachable: 600:", NO_UNIT]),
    ("transport.rpc_timeout=0ms", ['transport.rpc_timeout: "0ms":', "write a number over 0"]),
    ("run.state=s3//bucket", ["run.state:", "s3://BUCKET/PREFIX"]),
    ("run.state=file://relative/x", ["run.state:", "file:///PATH"]),
    ("run.state=http://host/x", ["run.state:", "s3://BUCKET/PREFIX"]),
    ("syncers.eu={}", ["syncers.eu: ", "needs run.state"]),
    ("syncers.eu.share=0", ["syncers.eu.share: 0: is out of range"]),
    ("syncers.eu.listen=0.0.0.0:7", ["syncers.eu.listen:", "transport.insecure = true"]),
    ("syncers.eu.address=far", ["syncers.eu.address:", "must be HOST:PORT"]),
    ("evaluation.every_inner_steps=-1", ["evaluation.every_inner_steps: -1:", ">= 0"]),
    ("islands={}", ["islands: {  }: must not be empty"]),
    ("islands={A={}}", ['islands.A: "A": must match ^[a-z0-9-]{1,100}$']),
    ("islands.a.ranks=2", ["islands.a.mesh:", "product of its axes must equal ranks = 2"]),
    ("islands.a.mesh={zp=1}", ["islands.a.mesh.zp: 1: unknown key", "known here: pp, dp_repl"]),
    ("islands.a.mesh={tp=0}", ["islands.a.mesh.tp: 0:", ">= 1"]),
    ("islands.a.mesh={ep=2}", ["mesh.ep: 2: must divide dp_shard x cp = 1; set it to 1"]),
    (
        "islands.a={ranks=2, mesh={dp_shard=2, ep=2}, tokens_per_inner_step=64}",
        ["islands.a.mesh.ep: 2: spreads experts, and model.experts.num_experts = 0 (none)"],
    ),
    (
        "islands.a={ranks=8, mesh={dp_shard=3, tp=2}, tokens_per_inner_step=96}",
        ["dp_shard 3 x tp 2 = 6: set dp_shard = 4 or ranks = 6"],
    ),
    (
        "islands.a={ranks=4, mesh={tp=4}, tokens_per_inner_step=64}",
        ["islands.a.mesh.tp: 4: must divide model.num_kv_heads = 2; set it to 2"],
    ),
    (
        "islands.a={ranks=3, mesh={tp=3}, tokens_per_inner_step=64}",
        ["data.sequence_length = 32, model.num_heads = 4", "set it to 2"],
    ),
    (
        "islands.a={ranks=4, mesh={dp_replicate=2, dp_shard=2}, tokens_per_inner_step=192}",
        ["tokens_per_inner_step: 192:", "dp_replicate x dp_shard", "= 128; set it to 128 or 256"],
    ),
    (
        "islands.a={ranks=2, mesh={pp=2}, tokens_per_inner_step=64}",
        ['islands.a.micro_batches: 1: schedule = "1f1b" with pp = 2 needs at least 2; set it to 2'],
    ),
    (
        'islands.a={ranks=2, mesh={pp=2, schedule="dualpipev", stages_per_rank=2}, '
        "tokens_per_inner_step=96, micro_batches=3}",
        [
            "micro_batches: 3:",
            "needs at least 4; set it to 4",
            "= 4 stages must be at most model",
            "= 2: set",
        ],
    ),
    (
        'islands.a={ranks=2, mesh={pp=2, schedule="interleaved-zb", stages_per_rank=2}, '
        "tokens_per_inner_step=160, micro_batches=5}",
        ["micro_batches: 5:", "rounds, micro_batches / pp = 2; set it to 4 or 6"],
    ),
    (
        "islands.a={ranks=3, mesh={pp=3}, tokens_per_inner_step=96, micro_batches=3}",
        ["mesh.pp: 3: pp x stages_per_rank = 3 stages must be at most", "= 2: set pp to 2"],
    ),
    (
        'islands.a={ranks=2, mesh={pp=2, schedule="zbv"}, tokens_per_inner_step=64}',
        ['schedule = "zbv" with stages_per_rank = 1: it has two stages a rank; set stages_per_r'],
    ),
    (
        "islands.a={ranks=2, mesh={pp=2, stages_per_rank=2}, tokens_per_inner_step=64}",
        ['"1f1b" with stages_per_rank = 2: it has one stage a rank; set stages_per_rank = 1 or'],
    ),
    ("islands.a.mesh.schedule=bfs", ["is for pp above 1, and pp = 1: leave both out"]),
    (
        "islands.a={ranks=4, mesh={pp=2, dp_shard=2, reshard='always'}, tokens_per_inner_step=64}",
        ['reshard = "always" is not for pp = 2', "leave it out"],
    ),
    ("islands.a.micro_batches=3", ["tokens_per_inner_step: 64:", "= 96; set it to 96"]),
    ("islands.a.mesh.reshard=always", ['reshard = "always" is for', "dp_shard x cp = 1: leave"]),
    ("islands.a.mesh.fsdp_unit=block", ['fsdp_unit = "block" is for data parallelism']),
    ("islands.a.mesh.loss_parallel=true", ["is for tp above 1, and tp = 1: leave it out"]),
    ("islands.a.mesh.async_tp=true", ["islands.a.mesh.async_tp: true: goes with mesh.tp above 1"]),
    (
        "islands.a={ranks=3, mesh={cp=3}, tokens_per_inner_step=64}",
        ["islands.a.mesh.cp: 3: data.sequence_length = 32 must be a multiple of 6", "to 30 or 36"],
    ),
    (
        'islands.a={ranks=4, mesh={cp=4, context="ulysses"}, tokens_per_inner_step=64}',
        ["mesh.context:", "deals 2 key and value heads", 'set it to 2, or context = "ring"'],
    ),
    ("islands.a.mesh.context=ulysses", ['context = "ulysses" is for cp above 1: leave it out']),
    ("inner.optimizer.decay_ratio=0.5", ['decay_ratio: 0.5: needs schedule = "wsd"']),
    (
        'inner.optimizer={lr=1e-3, schedule="wsd", warmup_steps=90000}',
        ["inner.optimizer.warmup_steps: 90000: the decay of decay_ratio = 0.2 begins after"],
    ),
    ("islands.a.device=tpu", ['islands.a.device: "tpu":', '"auto" or "cpu" or "cuda"']),
    ("islands.a.tokens_per_inner_step=65", ["tokens_per_inner_step: 65: must be a multiple"]),
    ("islands.a.threads=0", ["islands.a.threads: 0:", ">= 1"]),
    ("island_id=b", ['island_id: "b": is not an island of this file; islands: a']),
]


@pytest.mark.parametrize(("override", "parts"), REFUSALS, ids=[row[0] for row in REFUSALS])
def test_wrong_value_is_refused_with_path_value_range_and_hint(
    override: str, parts: list[str], tmp_path: Path
) -> None:
    message = refusal(write(tmp_path, MINIMAL), override)

    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    "section", ["run", "model", "data", "inner.optimizer", "outer", "coordinator"]
)
def test_missing_section_is_named(section: str, tmp_path: Path) -> None:
    lines = MINIMAL.splitlines()
    start = lines.index(f"[{section}]")
    end = next(i for i in range(start + 1, len(lines)) if lines[i].startswith("["))

    message = refusal(write(tmp_path, "\n".join(lines[:start] + lines[end:])))

    name = section.split(".")[0]
    assert f"{name}: missing; add a section [{name}]" in message


def test_all_problems_of_a_file_are_listed_one_a_line(tmp_path: Path) -> None:
    text = MINIMAL.replace("seed = 7", "sed = 7").replace("lr = 1e-3", "lr = nan")
    text = text.replace("inner_steps_per_round = 5", "inner_steps_per_round = 5\noverlap_steps = 5")
    text = text.replace("tokens_per_inner_step = 64", "tokens_per_inner_step = 65")

    first, *lines = refusal(write(tmp_path, text + "\n[extra]\n")).splitlines()

    assert first.endswith("run.toml: 6 problems")
    assert [line.split(":")[0].strip() for line in lines] == [
        "run.seed",
        "run.sed",
        "inner.optimizer.lr",
        "outer.overlap_steps",
        "islands.a.tokens_per_inner_step",
        "extra",
    ]


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("[run]\nname = demo\n", ["run.toml is not valid TOML", "line 2"]),
        ("[run]\nname = 'a'\nname = 'b'\n", ["run.toml is not valid TOML"]),
        ("[run]\n[run]\n", ["run.toml is not valid TOML", "line 2"]),
        (f"a = {'[' * 100_000}", ["run.toml is not valid TOML"]),
        (f"a = {'9' * 5000}", ["run.toml is not valid TOML"]),
        (f"[{'.'.join('a' * 50_000)}]", ["nested too deep to be shown"]),
        ('[islands."\\u001b[2J"]\nx = 1', ['"islands.\\u001b[2J.x": ']),
    ],
    ids=["bare word", "key twice", "section twice", "deep", "long number", "tables", "escape"],
)
def test_broken_toml_is_refused_with_file_and_line(
    text: str, parts: list[str], tmp_path: Path
) -> None:
    message = refusal(write(tmp_path, text))

    assert all(part in message for part in parts), message


def test_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")

    for name in ("demo", "other"):
        (tmp_path / f"{name}.toml").write_text(MINIMAL)
    (tmp_path / "dmeo-project.toml").write_text("[project]\nname = 'no run file'\n")
    absent = refusal(tmp_path / "dmeo.toml")
    assert "dmeo.toml: No such file" in absent
    assert f"counted from {Path.cwd()}; near it: {tmp_path / 'demo.toml'} or {tmp_path}" in absent
    assert "project" not in absent
    assert "absent.toml: No such file" in refusal(tmp_path / "nowhere" / "absent.toml")
    assert f"{tmp_path}: Is a directory" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe.toml")
    assert "pipe.toml: it is no regular file" in refusal(tmp_path / "pipe.toml")
    assert "bytes.toml is not valid TOML" in refusal(tmp_path / "bytes.toml")


def test_ranks_that_do_not_divide_the_experts_are_refused_with_those_that_would(
    tmp_path: Path,
) -> None:
    message = refusal(
        write(tmp_path, MINIMAL),
        "model.experts={num_experts=6, experts_per_token=2, expert_dim=16}",
        "islands.a={ranks=4, mesh={dp_shard=4, ep=4}, tokens_per_inner_step=128}",
    )

    assert "mesh.ep: 4: must divide model.experts.num_experts = 6; set it to 2" in message


def test_unknown_island_is_refused_with_the_names_there_are() -> None:
    message = refusal(DEMO, island="asia")

    assert 'island_id: "asia": is not an island of this file; islands: eu-west, us-east' in message


def test_local_part_without_a_selected_island_is_refused() -> None:
    config = load_config(DEMO)

    with pytest.raises(ConfigError, match="choose --island eu-west or us-east"):
        _ = config.island


def test_bind_beyond_loopback_is_accepted_when_declared_insecure(tmp_path: Path) -> None:
    config = load_config(
        write(tmp_path, MINIMAL),
        [
            "transport.insecure=true",
            "coordinator.listen=0.0.0.0:7000",
            "coordinator.syncer_listen=0.0.0.0:0",
        ],
    )

    assert config.coordinator.listen == "0.0.0.0:7000"


def test_syncer_that_other_sites_cannot_reach_is_refused(tmp_path: Path) -> None:
    overrides = ["transport.insecure=true", "coordinator.listen=0.0.0.0:7000"]

    with pytest.raises(ConfigError, match=r"syncer_listen.*only this machine reaches it"):
        load_config(write(tmp_path, MINIMAL), overrides)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (
            [f"coordinator.syncer_address=/ip4/10.0.0.5/tcp/1/p2p/{'Qm' + 44 * 'a'}"],
            "names one peer, and each of 2 syncers is another: give HOST:PORT",
        ),
        (["coordinator.syncer_listen=127.0.0.1:65535"], "the last of 2 syncers has port 65536"),
        (["coordinator.syncer_address=host:65535"], "the last of 2 syncers has port 65536"),
        (["telemetry.syncer_metrics=127.0.0.1:65535"], "syncer_metrics.*has port 65536"),
        (
            ["coordinator.listen=127.0.0.1:4712", "coordinator.syncer_listen=127.0.0.1:4711"],
            r"syncer_listen.*4711 to 4712; port 4712 is coordinator\.listen's too",
        ),
        (
            [
                "telemetry.coordinator_metrics=127.0.0.1:9101",
                "telemetry.syncer_metrics=127.0.0.1:9100",
            ],
            r"syncer_metrics.*port 9101 is telemetry\.coordinator_metrics's too",
        ),
        (
            [
                "coordinator.syncer_listen=0.0.0.0:4711",
                "telemetry.syncer_metrics=127.0.0.1:4712",
                "transport.insecure=true",
            ],
            r"syncer_metrics.*port 4712 is coordinator\.syncer_listen's too",
        ),
    ],
)
def test_several_syncers_that_cannot_be_are_refused(
    tmp_path: Path, overrides: list[str], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        load_config(
            write(tmp_path, MINIMAL),
            ["outer.num_fragments=4", "coordinator.num_syncers=2", *overrides],
        )


@pytest.mark.parametrize("address", ["[::1]:0", "localhost:0", "127.8.8.8:65535"])
def test_loopback_addresses_are_recognised(address: str, tmp_path: Path) -> None:
    config = load_config(write(tmp_path, MINIMAL), [f"coordinator.listen='{address}'"])

    assert config.coordinator.listen == address


@pytest.mark.parametrize(
    ("chosen", "expected"), [("", "runs/minimal/telemetry"), ("elsewhere", "elsewhere")]
)
def test_telemetry_goes_below_state_dir_unless_chosen(
    chosen: str, expected: str, tmp_path: Path
) -> None:
    config = load_config(write(tmp_path, MINIMAL), [f'telemetry.dir="{chosen}"'])

    assert config.telemetry_dir == Path(expected)


def test_a_loop_of_ones_own_may_leave_the_mesh_of_several_ranks_out(tmp_path: Path) -> None:
    text = MINIMAL.replace('preset = "tiny"', 'family = "own"')
    two = "islands.a={ranks=2, tokens_per_inner_step=64}"
    assert load_config(write(tmp_path, text), [two]).islands["a"].ranks == 2
    wrong = "islands.a={ranks=2, tokens_per_inner_step=64, mesh={tp=4}}"
    assert "must equal ranks = 2" in refusal(write(tmp_path, text), wrong)
    assert "must equal ranks = 2" in refusal(write(tmp_path, MINIMAL), two)


def test_configuration_is_frozen() -> None:
    config = load_config(DEMO)

    with pytest.raises(ValueError, match="frozen"):
        config.run.seed = 1


def test_configuration_imports_no_torch() -> None:
    code = "import sys, diloco.config.load; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_config_is_exported_with_the_sections_that_components_read() -> None:
    assert {"run", "model", "data", "inner", "outer", "coordinator", "transport"} < set(
        Config.model_fields
    )


def test_syncers_of_their_own_have_the_place_of_those_that_the_coordinator_starts() -> None:
    placed = ["run.state=file:///tmp/objects", "syncers.us={share=3.0}", "syncers.eu={}"]

    config = load_config(DEMO, placed)

    assert config.syncer_shares == {"syncer-eu": 1.0, "syncer-us": 3.0}
    assert config.own_syncers == ()
    assert fingerprint(config) == fingerprint(load_config(DEMO)), "islands need not name them"
    for key, value in (
        ("num_syncers", "2"),
        ("syncer_listen", "127.0.0.1:7"),
        ("syncer_address", "h:7"),
    ):
        with pytest.raises(ConfigError, match=f"coordinator.{key}: .* starts no syncer"):
            load_config(DEMO, [*placed, f"coordinator.{key}={value}"])
