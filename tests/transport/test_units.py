import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diloco.transport.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    parse_bandwidth,
    parse_bytes,
    parse_duration,
)


@pytest.mark.parametrize(
    ("text", "bandwidth_bps"),
    [
        ("200Mbit/s", 2e8),
        ("5 Mbit/s", 5e6),
        (" 1.5 Gbit/s ", 1.5e9),
        ("64kbit/s", 64e3),
        ("1e3bit/s", 1000.0),
    ],
)
def test_bandwidths_are_bits_per_second(text: str, bandwidth_bps: float) -> None:
    assert parse_bandwidth(text) == bandwidth_bps


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("80ms", 0.08), ("60s", 60.0), ("5min", 300.0), ("2h", 7200.0), ("10us", 1e-5), ("0s", 0.0)],
)
def test_durations_are_seconds(text: str, duration_s: float) -> None:
    assert parse_duration(text) == pytest.approx(duration_s, rel=1e-15)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("1MiB", 1 << 20), ("500kB", 500_000), ("1.5KiB", 1536), ("0B", 0), ("2 TB", 2 * 10**12)],
)
def test_sizes_are_whole_bytes(text: str, num_bytes: int) -> None:
    result = parse_bytes(text)

    assert (result, type(result)) == (num_bytes, int)


BAD = ["", "50", "nan", "nan s", "-5s", "-1MiB", "inf", "s", "1 2s", "5 parsec", "5S", "1e999s"]


@pytest.mark.parametrize("text", [*BAD, 50, 50.0, math.nan, None, True, ["5s"]])
@pytest.mark.parametrize(
    ("parse", "units", "example"),
    [
        (parse_bandwidth, "bit/s, kbit/s, Mbit/s, Gbit/s, Tbit/s", "200Mbit/s"),
        (parse_duration, "us, ms, s, min, h", "80ms"),
        (parse_bytes, "B, KiB, MiB, GiB, TiB, kB, MB, GB, TB", "1MiB"),
    ],
    ids=["bandwidth", "duration", "bytes"],
)
def test_anything_else_is_refused_with_the_units_and_an_example(
    parse, units: str, example: str, text: object
) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)

    assert repr(text) in str(caught.value)
    assert units in str(caught.value)
    assert example in str(caught.value)


@pytest.mark.parametrize("text", ["0bit/s", "0.0Mbit/s"])
def test_a_bandwidth_of_zero_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="over 0"):
        parse_bandwidth(text)


def test_a_part_of_a_byte_is_refused() -> None:
    with pytest.raises(ValueError, match="not a whole number"):
        parse_bytes("0.3B")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (format_bandwidth(5e6), "5 Mbit/s"),
        (format_bandwidth(1234.5e6), "1.234 Gbit/s"),
        (format_duration(0.08), "80 ms"),
        (format_duration(90.0), "1.5 min"),
        (format_duration(0.0), "0 s"),
        (format_bytes(0), "0 B"),
        (format_bytes(1536), "1.5 KiB"),
        (format_bytes(1 << 20), "1 MiB"),
    ],
)
def test_quantities_are_written_with_the_largest_unit_that_fits(text: str, expected: str) -> None:
    assert text == expected


@given(st.floats(1e-6, 1e15))
def test_what_is_written_can_be_read_back(value: float) -> None:
    # Four digits are kept: at most 5e-4 of the value is lost.
    assert parse_bandwidth(format_bandwidth(value)) == pytest.approx(value, rel=5.1e-4)
    assert parse_duration(format_duration(value)) == pytest.approx(value, rel=5.1e-4)
