"""The file of a link profile: shipped ones, where they are found, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from diloco.config.links import find_profile
from diloco.errors import ConfigError
from diloco.transport.shaping.link import Link
from diloco.transport.units import parse_bandwidth, parse_duration

PROFILES = Path(__file__).resolve().parents[2] / "configs" / "links"


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_name_of_a_profile_states_bandwidth_and_round_trip(path: Path) -> None:
    profile = find_profile(path.stem, path.parent)
    match = re.fullmatch(r"[a-z]+-(\d+)([MG])-(\d+ms)", path.stem)
    assert match

    assert profile.name == path.stem
    assert profile.source
    bandwidth_bps = parse_bandwidth(f"{match[1]}{match[2]}bit/s")
    for link in (profile.up, profile.down):
        assert link.bandwidth_bps == bandwidth_bps
        assert 2 * link.delay_s == pytest.approx(parse_duration(match[3]))


def test_the_named_profiles_exist() -> None:
    names = {path.stem for path in PROFILES.glob("*.toml")}

    assert names >= {
        "thin-5M-60ms", "metro-1G-5ms", "continent-200M-40ms", "ocean-100M-150ms",
        "lossy-50M-100ms",
    }  # fmt: skip
    assert find_profile("lossy-50M-100ms", PROFILES).up.loss == 0.001


def test_profiles_are_found_from_the_current_directory_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_profile("thin-5M-60ms").up.bandwidth_bps == 5e6

    own = tmp_path / "configs" / "links"
    own.mkdir(parents=True)
    text = (PROFILES / "thin-5M-60ms.toml").read_text().replace("5Mbit/s", "7Mbit/s")
    (own / "thin-5M-60ms.toml").write_text(text)
    assert find_profile("thin-5M-60ms").up.bandwidth_bps == 7e6
    assert find_profile("metro-1G-5ms").up.bandwidth_bps == 1e9


def test_an_unknown_profile_lists_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no link profile 'fat'.*thin-5M-60ms"):
        find_profile("fat", PROFILES)
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}; there are []")):
        find_profile("fat", tmp_path)


GOOD = """
source = "a test"
[up]
bandwidth = "1Mbit/s"
delay = "1ms"
jitter = "2ms"
loss = 0.5
[down]
bandwidth = "2Mbit/s"
delay = "3ms"
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('source = "a test"', "", "source: missing"),
        ('source = "a test"', 'source = "a test"\nrtt = "5ms"', "rtt: .*unknown key"),
        ("[down]", "[sideways]", "sideways: .*unknown key"),
        ('"1Mbit/s"', "50", "up.bandwidth: 50: 50 is not a bandwidth"),
        ('bandwidth = "2Mbit/s"', "", "down.bandwidth: missing"),
        ('"3ms"', '"-3ms"', "down.delay: .* '-3ms' is not a duration"),
        ("loss = 0.5", "loss = 1.5", "up.loss: 1.5: is out of range; allowed: >= 0 and < 1"),
        ("loss = 0.5", 'loss = "1%"', 'up.loss: "1%": must be a number'),
        ("jitter", "jiter", 'up.jiter: .*did you mean "jitter"'),
        ("[up]", "[up", "is not valid TOML"),
    ],
)
def test_a_broken_profile_is_refused_by_file_and_key(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / "broken.toml"
    assert old in GOOD
    path.write_text(GOOD.replace(old, new))

    with pytest.raises(ConfigError, match=message) as caught:
        find_profile(path.stem, path.parent)
    assert str(path) in str(caught.value)


def test_every_value_of_a_profile_arrives(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(GOOD)

    profile = find_profile(path.stem, path.parent)

    assert profile.up == Link(1e6, 0.001, 0.002, 0.5)
    assert profile.down == Link(2e6, 0.003)
    assert (profile.name, profile.source) == ("mine", "a test")
