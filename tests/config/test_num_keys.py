"""How many keys each kind of file has: the numbers may only shrink."""

from __future__ import annotations

import pytest

from diloco.chaos.plan import PlanConfig
from diloco.config.classes import Section, section_of
from diloco.config.links import LinkConfig
from diloco.config.schema import Config
from diloco.simulations.emulate.config import WanConfig
from diloco.simulations.goodput.config import GoodputConfig
from diloco.simulations.lab.config import LabConfig
from diloco.simulations.lab.experiment import ExperimentConfig
from diloco.simulations.scenarios.scenario import ScenarioFile


def num_keys(section: type[Section]) -> int:
    """Count the keys below a section; those of a table of named sections once."""
    held = [section_of(field) for field in section.model_fields.values()]
    return sum(1 if inner is None else num_keys(inner) for inner in held)


@pytest.mark.parametrize(
    ("root", "most"),
    [
        (Config, 200),
        (LabConfig, 32),
        (ExperimentConfig, 12),
        (ScenarioFile, 29),
        (GoodputConfig, 31),
        (WanConfig, 32),
        (PlanConfig, 27),
        (LinkConfig, 9),
    ],
)
def test_no_kind_of_file_gets_more_keys(root: type[Section], most: int) -> None:
    """A key that comes takes the place of one that goes; one that goes lowers the number here."""
    assert num_keys(root) <= most
