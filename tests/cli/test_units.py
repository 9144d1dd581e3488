from __future__ import annotations

import pytest

from kvkeep.cli import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90), ("90s", 90), ("30min", 1800), ("30m", 1800), ("1.5h", 5400), ("7 d", 604800)],
)
def test_durations_are_read(text: str, seconds: float) -> None:
    assert units.parse_duration(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "-1h", "1y", "1h30"])
def test_other_text_is_no_duration(text: str) -> None:
    with pytest.raises(ValueError, match="is not a duration"):
        units.parse_duration(text)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 ms"),
        (0.0123, "12 ms"),
        (0.41, "0.41 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (38.2, "38 s"),
        (59.6, "1 min 0 s"),
        (95, "1 min 35 s"),
        (34_860, "9 h 41 min"),
        (90_000, "1 d 1 h"),
    ],
)
def test_durations_are_written(seconds: float, text: str) -> None:
    assert units.duration(seconds) == text


def test_counts_totals_and_shares() -> None:
    assert units.count(41208) == "41,208"
    assert [units.magnitude(x) for x in (1204, 9999, 10_000, 999_960, 31_400_000)] == [
        "1,204",
        "9,999",
        "10.0 k",
        "1.0 M",
        "31.4 M",
    ]
    assert units.share(92, 100) == "92.0 %"
    assert units.share(0, 0) == "–"
    assert [units.age(x) for x in (0.2, 59, 60, 3599, 86400)] == [
        "0 s",
        "59 s",
        "1 min",
        "59 min",
        "1 d",
    ]
    assert units.clock(51.4) == "0:00:51"
    assert units.clock(3661) == "1:01:01"
