"""The settings of the outer loop that `--suggest` chooses, and which of them it tries."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from diloco.config.outer import OWN_CODECS, OuterConfig
from diloco.errors import ConfigError


@dataclass(frozen=True, slots=True)
class OuterSetting:
    """What is chosen: H, P, tau, codecs, lanes."""

    inner_steps_per_round: int
    num_fragments: int
    overlap_steps: int
    uplink_codec: str
    downlink_codec: str
    num_lanes: int

    @classmethod
    def of(cls, outer: OuterConfig) -> OuterSetting:
        """Read it from a run."""
        return cls(*(getattr(outer, name) for name in cls.__dataclass_fields__))

    def overrides(self, besides: OuterSetting | None = None) -> tuple[str, ...]:
        """Write it as values of --set; only those that another setting has not, if one is given."""
        return tuple(
            f"outer.{name}={getattr(self, name)}"
            for name in self.__dataclass_fields__
            if besides is None or getattr(self, name) != getattr(besides, name)
        )


@dataclass(frozen=True, slots=True)
class Grid:
    """Values that are tried; every codec both ways."""

    inner_steps_per_round: tuple[int, ...] = (10, 20, 30, 50, 100, 200, 500, 1000)
    num_fragments: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    overlap_steps: tuple[int, ...] = (0, 1, 2, 5, 10)
    codecs: tuple[str, ...] = ("float32", "bfloat16", "int8", "int4")
    num_lanes: tuple[int, ...] = (4, 16, 64)

    @classmethod
    def read(cls, h: str, p: str, tau: str, codecs: str, lanes: str) -> Grid:
        """Read lists such as "30,100" from what options say; empty: those of the grid.

        Raises:
            ConfigError: Naming the option that cannot be read.
        """
        usual = cls()
        names = tuple(name.strip() for name in codecs.split(",")) if codecs else usual.codecs
        if unknown := [name for name in names if name not in OWN_CODECS]:
            raise ConfigError(
                f"--codecs {codecs}: {unknown[0]!r} is none; there are {', '.join(OWN_CODECS)}"
            )
        return cls(
            _numbers("--inner-steps-per-round", h, 1) or usual.inner_steps_per_round,
            _numbers("--num-fragments", p, 1) or usual.num_fragments,
            _numbers("--overlap-steps", tau, 0) or usual.overlap_steps,
            names,
            _numbers("--num-lanes", lanes, 1) or usual.num_lanes,
        )

    def settings(self, num_lanes: int) -> Iterator[OuterSetting]:
        """Give all that make sense: tau < H, at most one fragment an inner step."""
        for h, p, tau, codec in product(
            self.inner_steps_per_round, self.num_fragments, self.overlap_steps, self.codecs
        ):
            if tau < h and p <= h:
                yield OuterSetting(h, p, tau, codec, codec, num_lanes)

    def with_lanes(self, setting: OuterSetting) -> Iterator[OuterSetting]:
        """Give a setting with every other number of lanes."""
        for number in self.num_lanes:
            if number != setting.num_lanes:
                yield replace(setting, num_lanes=number)

    def neighbours(self, setting: OuterSetting) -> Iterator[OuterSetting]:
        """Give the settings that differ from one in a single value, by one place of its list."""
        for value in _neighbours(self.inner_steps_per_round, setting.inner_steps_per_round):
            yield replace(setting, inner_steps_per_round=value)
        for value in _neighbours(self.num_fragments, setting.num_fragments):
            yield replace(setting, num_fragments=value)
        for value in _neighbours(self.overlap_steps, setting.overlap_steps):
            yield replace(setting, overlap_steps=value)
        for codec in self.codecs:
            if codec != setting.uplink_codec:
                yield replace(setting, uplink_codec=codec, downlink_codec=codec)


def _neighbours(values: tuple[int, ...], value: int) -> list[int]:
    """Give the largest of some values below one, and the smallest above it."""
    below = [each for each in values if each < value]
    above = [each for each in values if each > value]
    return [*sorted(below)[-1:], *sorted(above)[:1]]


def _numbers(option: str, text: str, least: int) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")] if text else []
    if not all(word.isdecimal() and int(word) >= least for word in words):
        raise ConfigError(
            f"{option} {text}: give whole numbers from {least} on with commas, such as 30,100"
        )
    return tuple(map(int, words))
