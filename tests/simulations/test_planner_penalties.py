"""What settings cost in loss: fitted to data, never made up."""

import json
import math
from pathlib import Path

import pytest

from diloco.errors import ConfigError
from diloco.simulations.planner.penalties import Study, TrainedPoint, fit, load_penalties
from diloco.simulations.planner.setting import OuterSetting

PLAIN = OuterSetting(30, 4, 0, "float32", "float32", 16)


def point(
    loss: float, h: int = 30, m: int = 2, codec: str = "float32", tau: int = 0
) -> TrainedPoint:
    return TrainedPoint(h=h, m=m, codec=codec, tau=tau, loss=loss)  # type: ignore[arg-type]


def test_known_effects_are_found_again_whatever_the_levels_of_studies() -> None:
    def loss(level: float, h: int, tau: int, int4: bool) -> float:
        return level * math.exp(0.01 * math.log(h / 20) + 0.002 * tau + 0.003 * int4)

    settings = [(20, 0, False), (200, 0, False), (20, 5, False), (60, 2, True)]
    studies = [
        Study(
            name,
            tuple(
                point(loss(level, h, tau, int4), h=h, tau=tau, codec="int4" if int4 else "float32")
                for h, tau, int4 in settings
            ),
        )
        for name, level in (("small", 3.5), ("large", 2.2))
    ]

    penalties = fit(studies, "them")

    assert {name: effect.cost for name, effect in penalties.effects.items()} == pytest.approx(
        {"h": 0.01, "tau": 0.002, "int4": 0.003}
    )
    assert (penalties.least_h, penalties.most_h, penalties.most_tau) == (20, 200, 5)
    # H = 20 e: one e-fold; tau = 3; int4 both ways.
    both = OuterSetting(round(20 * math.e), 4, 3, "int4", "int4", 16)
    assert penalties.penalty(both) == pytest.approx(math.expm1(0.01 + 0.006 + 0.006), rel=0.01)
    assert penalties.penalty(OuterSetting(10, 4, 0, "float32", "float32", 16)) == 0


def test_what_was_not_measured_is_not_known() -> None:
    penalties = load_penalties()

    assert penalties.knows(PLAIN)
    for unknown in (
        OuterSetting(2000, 4, 0, "float32", "float32", 16),
        OuterSetting(30, 4, 11, "float32", "float32", 16),
        OuterSetting(30, 4, 0, "int2", "float32", 16),
    ):
        assert not penalties.knows(unknown)


def test_published_studies_say_what_their_papers_do() -> None:
    effects = load_penalties().effects

    # Decoupled DiLoCo alone varies these: 0.09 % each.
    assert effects["int4"].cost == pytest.approx(math.log(1.0009))
    assert effects["bfloat16"].cost == pytest.approx(math.log(1.0009))
    # Streaming's tables: 30 to 100, 1.2 e-folds, costs 0.3 to 1.2 %; DiLoCo's 50 to 1000, 3.0
    # e-folds, about 1.1 %: between 0.36 and 1 % an e-fold.
    assert 0.0036 < effects["h"].cost < 0.0100
    # "Less than 0.2 %" for 10 steps.
    assert effects["tau"].cost == pytest.approx(0.0002, rel=0.2)
    assert all("arXiv" in source for effect in effects.values() for source in effect.sources)


def test_a_gain_is_not_promised() -> None:
    studies = [Study("lucky", (point(2.0), point(1.9, codec="e3m0")))]

    assert fit(studies, "it").effects["e3m0"].cost == 0


def test_effects_that_only_change_together_are_refused() -> None:
    studies = [Study("one", (point(2.0), point(2.1, h=100, codec="int4")))]

    with pytest.raises(ConfigError, match="cannot tell h, int4 apart"):
        fit(studies, "the laboratory")
    with pytest.raises(ConfigError, match="no two points of one study"):
        fit([Study("one", (point(2.0), point(2.1)))], "the laboratory")


def test_the_laboratory_goes_before_papers_in_what_it_measured(tmp_path: Path) -> None:
    result = tmp_path / "lab.json"
    # Seeds differ by more than tau costs: each is a study of its own.
    points = [
        {"h": 30, "m": 2, "codec": "int4", "tau": tau, "loss": loss, "seed": seed, "tokens": 9}
        for seed, level in ((1, 2.0), (2, 2.5))
        for tau, loss in ((0, level), (20, 1.02 * level))
    ]
    result.write_text(json.dumps({"points": [*points, {**points[0], "loss": None}]}))
    published, own = load_penalties(), load_penalties([result])

    assert own.effects["tau"].cost == pytest.approx(math.log(1.02) / 20)
    assert (own.most_tau, own.effects["tau"].sources) == (20, (str(result),))
    assert own.effects["h"] == published.effects["h"]
    assert own.most_h == published.most_h


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "KeyError: 'points'"),
        ('{"points": [{"h": 0, "m": 2, "codec": "int4", "tau": 0, "loss": 2}]}', "points.0.h = 0"),
        ('{"points": [{"h": 9, "m": 2, "codec": "int9", "tau": 0, "loss": 2}]}', "points.0.codec"),
        ("nothing", "JSONDecodeError"),
    ],
    ids=["no-points", "no-h", "no-codec", "no-json"],
)
def test_a_result_that_is_none_is_refused(tmp_path: Path, text: str, words: str) -> None:
    result = tmp_path / "lab.json"
    result.write_text(text)

    with pytest.raises(ConfigError, match=words):
        load_penalties([result])
