"""`diloco plan`: what is shown is what will be done; no torch parameter is allocated."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from diloco.cli.main import app
from diloco.errors import ConfigError

RUN = """
[run]
name = "small"
seed = 1
inner_steps = 20

[model]
preset = "tiny"

[data]
sequence_length = 32

[inner.optimizer]
lr = 2e-3

[outer]
preset = "streaming"
inner_steps_per_round = 4
num_fragments = 2

[coordinator]
state_dir = "runs/small"

[transport]
link = "thin-5M-60ms"

[islands.east]
ranks = 1
tokens_per_inner_step = 128

[islands.west]
ranks = 1
tokens_per_inner_step = 256
"""


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.toml"
    path.write_text(RUN)
    return path


def plan(*arguments: object) -> str:
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_json_has_fragments_schedule_bytes_and_tokens(run_file: Path) -> None:
    planned = json.loads(plan(run_file, "--json", "-"))

    # tiny: embedding and head 256 x 32; a layer has 2 x 32 x 32 + 2 x 32 x 16 in its attention,
    # 3 x 32 x 96 in its feed-forward, 2 norms; one last norm.
    layer = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96 + 2 * 32
    assert planned["parameters"] == 2 * 256 * 32 + 2 * layer + 32
    assert [fragment["fragment_id"] for fragment in planned["fragments"]] == [0, 1]
    assert planned["tokens"] == {"east": 20 * 128, "west": 20 * 256}
    assert planned["round_bytes_up"] == sum(f["bytes_up"] for f in planned["fragments"])
    for fragment in planned["fragments"]:
        # int4 in blocks of 128: 64 bytes and a 2-byte scale.
        blocks = fragment["float32_bytes"] // (4 * 128)
        assert fragment["bytes_up"] == fragment["bytes_down"]
        assert abs(fragment["bytes_up"] - 66 * blocks) <= 16


def test_schedule_lists_the_first_two_periods_and_the_last(run_file: Path) -> None:
    planned = json.loads(plan(run_file, "--json", "-"))

    steps = [(send["inner_step"], send["merge_step"]) for send in planned["sends"]]
    # H = 4, P = 2, tau = 1: due at 2, 4, 6, ...; the flush takes what would merge at 20 or later.
    assert steps == [(2, 3), (4, 5), (6, 7), (8, 9), (16, 17), (18, 19)]
    assert planned["num_sends"] == 9
    assert planned["is_flushed"]


def test_a_run_of_any_length_is_planned_at_once(run_file: Path) -> None:
    changes = ("--set", "run.inner_steps=1000000000")

    planned = json.loads(plan(run_file, "--json", "-", *changes))

    steps = [send["inner_step"] for send in planned["sends"]]
    # What would merge at 10^9 or later is left to the flush.
    assert steps == [2, 4, 6, 8, 10**9 - 4, 10**9 - 2]
    assert planned["num_sends"] == 10**9 // 2 - 1
    assert planned["directions"][0]["transfers"] == planned["num_sends"] + 2


def test_alternatives_are_multiples_of_the_run(run_file: Path) -> None:
    own, dense, parallel = json.loads(plan(run_file, "--json", "-"))["directions"]

    assert (own["name"], own["times"]) == ("this run", 1.0)
    assert own["transfers"] == 9 + 2
    assert parallel["bytes_up"] == parallel["bytes_down"] == 4 * 41120 * 20
    assert 1.0 < dense["times"] < parallel["times"]
    # 5 Mbit/s each way, 60 ms round trip a transfer.
    expected_s = 8 * parallel["bytes_up"] / 5e6 + 20 * 0.060
    assert parallel["transfer_s"] == pytest.approx(expected_s, rel=1e-12)


def test_tables_name_every_fragment_and_the_flush(run_file: Path) -> None:
    text = plan(run_file)

    assert "41,120 parameters in 2 fragments; 20 inner steps, 9 sends" in text
    assert "all (flush, published in float32)" in text
    assert "thin-5M-60ms" in text


def test_disk_is_forecast(run_file: Path) -> None:
    planned = json.loads(plan(run_file, "--json", "-"))

    # 16 B a parameter and an int4 payload; two complete ones, one not yet, one being written.
    assert planned["disk"]["checkpoint_bytes"] == round(41120 * (16 + 0.5 + 2 / 128))
    assert planned["disk"]["num_checkpoints"] == 4
    assert "On disk, at most: 2.591 MiB an island (4 checkpoints of 663.2 KiB)" in plan(run_file)


def test_host_memory_is_forecast_where_copies_are_kept(run_file: Path) -> None:
    setting = ("--set", "islands.west.memory_checkpoint_steps=5")
    planned = json.loads(plan(run_file, "--json", "-", *setting))

    # Two moments of 4 B, two slots.
    assert planned["kept_bytes"] == {"west": 16 * 41120}
    assert "In the memory of island west's hosts: 642.5 KiB for each of" in plan(run_file, *setting)
    assert "In the memory of island" not in plan(run_file)
    (syncer,) = planned["syncers"]
    assert syncer["merge_bytes"] < syncer["memory_bytes"]
    assert "In the memory of a syncer's host, at most: " in plan(run_file)


def test_without_a_link_no_time_is_claimed(run_file: Path) -> None:
    text = plan(run_file, "--set", "transport.link=")

    assert "no transport.link, so no times" in text
    planned = json.loads(plan(run_file, "--set", "transport.link=", "--json", "-"))
    assert {each["transfer_s"] for each in planned["directions"]} == {None}


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('bandwidth = "50"', "'50' is not a bandwidth: write a number over 0, with a unit"),
        ('bandwidth = "0Mbit/s"', "'0Mbit/s' is not a bandwidth: write a number over 0"),
        ('bandwidth = "nanMbit/s"', "'nanMbit/s' is not a bandwidth"),
        ("bandwidth = 50", "50 is not a bandwidth: write a number over 0, with a unit"),
        ('delay = "-1ms"', "'-1ms' is not a duration: write a number, 0 or more, with a unit"),
        ("delay = -1", "-1 is not a duration"),
        ("delay = nan", "nan is not a duration"),
        ('jitter = "5"', "'5' is not a duration"),
        ("loss = nan", "must be a finite number; allowed: >= 0 and < 1"),
        ("loss = -0.1", "is out of range; allowed: >= 0 and < 1"),
    ],
)
def test_a_link_profile_with_nonsense_is_refused(
    run_file: Path, line: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    up = {"bandwidth": '"5Mbit/s"', "delay": '"30ms"'}
    key, _, value = line.partition(" = ")
    sides = {"up": {**up, key: value}, "down": up}
    text = 'source = "test"\n' + "".join(
        f"[{side}]\n" + "".join(f"{name} = {shown}\n" for name, shown in table.items())
        for side, table in sides.items()
    )
    profile = run_file.parent / "configs" / "links" / "odd.toml"
    profile.parent.mkdir(parents=True)
    profile.write_text(text)
    monkeypatch.chdir(run_file.parent)

    with pytest.raises(ConfigError) as refused:
        plan(run_file, "--set", "transport.link=odd")

    assert refused.value.exit_code == 2
    told = str(refused.value)
    assert "transport.link = 'odd'" in told and str(profile) in told and f"up.{key}: " in told
    assert words in told


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("outer.num_fragments=99999", "outer.num_fragments = 99999 is outside"),
        ("transport.link=none-such", "transport.link = 'none-such'.*thin-5M-60ms"),
        ("coordinator.state_dir=/dev/null/x", "state_dir = /dev/null/x cannot be .*: /dev/null is"),
        ("telemetry.dir=/dev/null", "telemetry.dir = /dev/null cannot be a directory"),
    ],
    ids=["more-fragments-than-rows", "unknown-link", "below-a-file", "a-file"],
)
def test_impossible_run_is_refused_with_its_field(
    run_file: Path, override: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(run_file, "--set", override)


def test_text_that_is_not_there_is_an_error_below_the_plan(run_file: Path) -> None:
    arguments = ["plan", str(run_file), "--set", 'data.sources.web.files="gone.jsonl"']
    arguments += ["--set", "data.source=streams"]

    refused = CliRunner().invoke(app, arguments)

    assert isinstance(refused.exception, ConfigError)
    assert 'data.sources.web.files: "gone.jsonl" matches no file' in str(refused.exception)
    assert "Fingerprints: " in refused.stdout


def test_plan_names_text_and_what_it_did_not_look_at(run_file: Path) -> None:
    text = plan(run_file, "--set", "run.warm_start=owner/model")

    assert 'run.warm_start = "owner/model": on the hub, not looked at until the run starts' in text
    assert "\ntext: digest " in text


@pytest.mark.parametrize(
    "shipped", sorted(Path(__file__).parents[2].glob("configs/runs/*.toml")), ids=lambda p: p.stem
)
def test_every_shipped_run_file_can_be_planned(shipped: Path) -> None:
    planned = json.loads(plan(shipped, "--json", "-"))

    assert planned["fragments"]
    assert planned["parameters"] > 0


def test_a_run_on_arrival_shows_tokens_for_a_schedule_and_where_its_grace_is_0(
    run_file: Path,
) -> None:
    changes = ("--set", "outer.preset=decoupled")
    text = plan(run_file, *changes)
    planned = json.loads(plan(run_file, "--json", "-", *changes))

    assert "until 7,680 tokens are merged, then a flush" in text
    assert "inner step" not in text.split("There is no schedule")[0].split("A round of")[0]
    assert "merged after" not in text and planned["sends"] == []
    arrival = planned["arrival"]
    assert (arrival["total_tokens"], arrival["rounds"]) == (20 * (128 + 256), 5)
    # The largest fragment up and down at 5 Mbit/s, and two round trips of 60 ms.
    largest = max(f["bytes_up"] + f["bytes_down"] for f in planned["fragments"])
    assert arrival["exchange_s"] == pytest.approx(8 * largest / 5e6 + 0.120)
    assert arrival["least_step_s"] == pytest.approx(arrival["exchange_s"] / 2)
    assert "Warning: outer.grace = auto is 0 where tau = 2 inner steps" in text
    assert "Set outer.grace to a time" in text

    fixed = plan(run_file, *changes, "--set", "outer.grace=1s")
    assert "There is no schedule" in fixed and "Warning" not in fixed
    unlinked = plan(run_file, *changes, "--set", "transport.link=")
    assert "Warning: outer.grace = auto" in unlinked and "inner steps under" not in unlinked


KNOWN = ("--step-time", "50ms")


def test_prediction_stands_besides_all_reduces_on_the_same_link(
    run_file: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "plan.png"
    text = plan(run_file, *KNOWN, "--plot", picture)
    planned = json.loads(plan(run_file, *KNOWN, "--json", "-"))

    assert picture.read_bytes().startswith(b"\x89PNG")
    assert "inner step, east, west: 50 ms, told" in text
    assert "Predicted: " in text and "hierarchical, bfloat16" in text
    # A terminal of 80 columns, and nothing is cut.
    assert "\u2026" not in text
    assert all(len(line) <= 80 for line in text.splitlines() if line.endswith(" "))
    predicted = planned["prediction"]
    assert predicted["islands"].keys() == {"east", "west"}
    # At least the inner steps, at most these and every exchange waited for.
    assert (
        20 * 0.05
        < predicted["wall_s"]
        < 20 * 0.05 + planned["directions"][0]["transfer_s"] + 11 * 0.2
    )
    names = [each["name"] for each in planned["alternatives"]]
    assert names == ["flat, float32", "hierarchical, float32", "hierarchical, bfloat16"]
    assert planned["not_predicted"] == ""


def test_what_is_not_known_is_not_predicted(run_file: Path) -> None:
    text = plan(run_file, "--set", "transport.link=")

    assert "No time is predicted: transport.link names no profile" in text
    assert "estimated: " in text and "1 thread of 20 Gflop/s (--step-time or" in text
    with pytest.raises(ConfigError, match="--suggest would change nothing: no time is predicted"):
        plan(run_file, "--set", "transport.link=", "--suggest")
    told = json.loads(
        plan(run_file, "--set", "transport.link=", *KNOWN, "--bandwidth", "1Gbit/s", "--json", "-")
    )
    assert told["assumptions"]["links"]["west"]["up"]["bandwidth_bps"] == 1e9


def test_what_is_suggested_can_be_typed_and_takes_what_was_said(
    run_file: Path, tmp_path: Path
) -> None:
    longer = ("--set", "run.inner_steps=2000", *KNOWN)
    tried = ("--inner-steps-per-round", "20,40", "--num-fragments", "2", "--codecs", "int4,float32")
    more = ("--overlap-steps", "1,5", "--num-lanes", "16", "--max-loss", "0.4%")
    report = tmp_path / "plan.json"

    text = plan(run_file, *longer, "--suggest", *tried, *more, "--json", report)

    planned = json.loads(report.read_text())
    chosen = planned["suggestion"]["chosen"]
    assert chosen["wall_s"] < planned["prediction"]["wall_s"]
    assert chosen["penalty"] <= 0.004
    assert " decides:\n  20 % " in text or "the time depends most on this one:\n  20 % " in text
    (typed,) = (line for line in text.splitlines() if line.startswith(f"diloco plan {run_file}"))
    overrides = typed.removeprefix(f"diloco plan {run_file} ").split()
    again = json.loads(plan(run_file, *longer, *overrides, "--json", "-"))
    assert again["prediction"]["wall_s"] == pytest.approx(chosen["wall_s"], rel=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--probe", "127.0.0.1:1"), "--probe: of --measure, without which nothing changes"),
        (("--plot", "plan.txt"), r"--plot plan\.txt: give a path that ends with \.png"),
        (("--suggest", "--max-loss", "1"), "--max-loss 1: give a percentage over 0, such as 0.5%"),
        (("--suggest", "--codecs", "int5"), "--codecs int5: 'int5' is none"),
        (("--suggest", "--overlap-steps", "1;2"), "--overlap-steps 1;2: give whole numbers fr"),
        (("--suggest", "--lab", "gone.json"), "gone.json"),
        (("--measure", "--probe", "here"), "--probe: 'here' must be HOST:PORT"),
        (("--device", "H100", "--mfu", "2"), r"--mfu 2 is outside \(0, 1\]"),
        (("--codecs", "int4", "--num-lanes", "4"), "--codecs, --num-lanes: of --suggest, without"),
        (("--syncer-memory", "lots"), "--syncer-memory: 'lots' is not a size"),
    ],
    ids=["probe", "plot", "loss", "codec", "tau", "lab", "address", "share", "suggest", "memory"],
)
def test_options_that_cannot_be_are_refused(
    run_file: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(run_file, *arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*KNOWN, "--mfu", "0.3"), "--mfu 0.3 .* no inner step is estimated from the peak of"),
        (("--mfu", "0.3"), "--mfu 0.3 .* give --device"),
        ((*KNOWN, "--device", "H100"), "--device H100 would change nothing: no inner step is est"),
        ((*KNOWN, "--measure"), "--measure would change nothing: every inner step is told"),
        ((*KNOWN, "--step-time", "1s"), "--step-time 1s: 50ms was said of east, too"),
        (("--rtt", "0s", "--tcp-window", "4MiB"), "--tcp-window .* without a round trip it bounds"),
        (("--inside-bandwidth", "1Gbit/s"), "no island has several ranks"),
        (("--measure", "--probe", "h:1", "--bandwidth", "1Gbit/s"), "--bandwidth .* give no --pro"),
        (("--set", "transport.link=", "--rtt", "80ms"), "--rtt .* no time is predicted, as transp"),
        (("--set", "transport.link=", "--syncer-cores", "4"), "--syncer-cores .* no time is pred"),
    ],
    ids=["mfu", "cpu", "device", "measure", "twice", "tcp", "inside", "probe", "rtt", "syncers"],
)
def test_options_that_would_change_nothing_are_refused_by_name(
    run_file: Path, arguments: tuple[str, ...], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        plan(run_file, *arguments)


@pytest.mark.slow
def test_real_inner_steps_are_measured(run_file: Path) -> None:
    planned = json.loads(plan(run_file, "--step-time", "west=1s", "--measure", "--json", "-"))

    steps = planned["assumptions"]["step_s"]
    assert steps["west"] == 1.0 and 1e-4 < steps["east"] < 30.0
    assert any("measured on this machine (c" in line for line in planned["assumptions"]["origins"])
