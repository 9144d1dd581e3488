"""The charts, as figures of plotly.js. Colours are names that the page's style sheet resolves.

``"@a"`` stands for the value of the CSS variable ``--a``, in light and in dark. No chart says
anything by colour alone: lines differ in dashes, bars in patterns, points in shape.
"""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvkeep.cli.page.icicle import Box
from kvkeep.cli.units import count
from kvkeep.prefixstore.sizes import format_size

if TYPE_CHECKING:
    from kvkeep.cli.page.collect import Restored, Slice

Figure = dict[str, Any]

LEAST = 0.001
"""Milliseconds that a point has at least: a logarithmic axis has no zero."""


def hit_rate(slices: Sequence[Slice], width: int) -> Figure:
    """Share of the tokens, and of the lookups, that were resumed."""
    x = [moment(s.start + width / 2) for s in slices]
    tokens = [100 * s.resumed / s.prompt if s.prompt else 0.0 for s in slices]
    lookups = [100 * s.hits / s.lookups for s in slices]
    lines = {"type": "scatter", "mode": "lines+markers", "x": x, "hovertemplate": "%{y:.1f} %"}
    return _figure(
        [
            {
                **lines,
                "name": "tokens",
                "y": tokens,
                "line": {"color": "@a", "width": 2},
                "marker": {"symbol": "circle", "size": 5},
            },
            {
                **lines,
                "name": "lookups",
                "y": lookups,
                "line": {"color": "@b", "width": 2, "dash": "dot"},
                "marker": {"symbol": "diamond-open", "size": 6},
            },
        ],
        x=_times(slices, width),
        y={"range": [0, 102], "ticksuffix": " %", "title": {"text": "resumed"}},
        hovermode="x unified",
    )


def tokens(slices: Sequence[Slice], width: int) -> Figure:
    """Tokens that were resumed, and that had to be read."""
    x = [moment(s.start + width / 2) for s in slices]
    bars = {"type": "bar", "x": x, "width": [width * 1000 * 0.9] * len(slices)}
    return _figure(
        [
            {
                **bars,
                "name": "resumed",
                "y": [s.resumed for s in slices],
                "marker": {"color": "@a"},
            },
            {
                **bars,
                "name": "read",
                "y": [s.prompt - s.resumed for s in slices],
                "marker": {
                    "color": "@b",
                    "pattern": {"shape": "/", "fillmode": "overlay", "fgcolor": "@card"},
                },
            },
        ],
        x=_times(slices, width),
        y={"title": {"text": "tokens"}, "rangemode": "tozero"},
        barmode="stack",
        hovermode="x unified",
    )


def lost(by_reason: Mapping[str, int]) -> Figure:
    """Tokens that were not resumed, by reason, the most first."""
    ordered = sorted(by_reason.items(), key=lambda item: item[1])
    return _figure(
        [
            {
                "type": "bar",
                "orientation": "h",
                "y": [safe(reason) for reason, _ in ordered],
                "x": [n for _, n in ordered],
                "text": [count(n) for _, n in ordered],
                "textposition": "auto",
                "cliponaxis": False,
                "marker": {"color": "@b"},
                "hovertemplate": "%{y}: %{x:,} tokens<extra></extra>",
            }
        ],
        x={"title": {"text": "tokens"}, "rangemode": "tozero"},
        y={"automargin": True, "type": "category"},
        height=max(220, 90 + 34 * len(ordered)),
    )


def restores(points: Sequence[Restored]) -> Figure:
    """What a restore takes, by tokens; both axes are logarithmic."""
    marks = {"store": ("circle", "@a"), "memory": ("diamond-open", "@b")}
    traces = []
    for tier, (symbol, colour) in marks.items():
        mine = [p for p in points if p.tier == tier]
        if mine:
            traces.append(
                {
                    "type": "scatter",
                    "mode": "markers",
                    "name": f"from {'the store' if tier == 'store' else tier}",
                    "x": [p.tokens for p in mine],
                    "y": [max(1000 * p.seconds, LEAST) for p in mine],
                    "marker": {"symbol": symbol, "color": colour, "size": 7, "opacity": 0.7},
                    "hovertemplate": "%{x:,} tokens in %{y:.3~g} ms<extra></extra>",
                }
            )
    return _figure(
        traces,
        x={**_decades([p.tokens for p in points]), "title": {"text": "tokens resumed"}},
        y={
            **_decades([max(1000 * p.seconds, LEAST) for p in points]),
            "exponentformat": "none",
            "title": {"text": "milliseconds"},
        },
    )


def stored(boxes: Sequence[Box]) -> Figure:
    """What is stored: width is bytes, and the colour scale says how many share it."""
    shared = [box.conversations for box in boxes]
    most = max([2, *(box.conversations for box in boxes if "/" in box.id)])
    return _figure(
        [
            {
                "type": "icicle",
                "ids": [box.id for box in boxes],
                "parents": [box.parent for box in boxes],
                "labels": [safe(box.label) for box in boxes],
                "values": [box.bytes for box in boxes],
                "branchvalues": "total",
                "text": [_shared(box.conversations) for box in boxes],
                "customdata": [
                    [format_size(box.bytes), box.conversations, box.tokens, box.points]
                    for box in boxes
                ],
                "hovertemplate": (
                    "%{label}<br>%{customdata[0]} with all below<br>"
                    "shared by %{customdata[1]:,}<br>"
                    "%{customdata[2]:,} tokens, %{customdata[3]} resume points<extra></extra>"
                ),
                "textinfo": "label+text",
                "tiling": {"orientation": "v"},
                "pathbar": {"visible": True, "textfont": {"color": "@ink"}},
                "marker": {
                    "colors": shared,
                    "cmin": 1,
                    "cmax": most,
                    "colorscale": [[0, "@low"], [1, "@high"]],
                    "colorbar": {
                        "title": {"text": "conversations"},
                        "thickness": 12,
                        "tick0": 1,
                        "dtick": max(1, (most - 1) // 5),
                    },
                    "line": {"color": "@paper", "width": 1},
                },
            }
        ],
        height=460,
        uniformtext={"minsize": 10, "mode": "hide"},
        margin={"l": 8, "r": 8, "t": 8, "b": 8},
    )


def moment(seconds: float) -> str:
    """A local time as plotly.js reads it."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def safe(text: str) -> str:
    """Text for a label: plotly.js reads labels as a little HTML."""
    return html.escape(text, quote=False)


def _times(slices: Sequence[Slice], width: int) -> dict[str, Any]:
    """The axis from the first slice to the end of the last."""
    ends = [moment(slices[0].start), moment(slices[-1].start + width)]
    return {"type": "date", "range": ends}


def _decades(values: Sequence[float]) -> dict[str, Any]:
    """A logarithmic axis; where it spans few decades, what lies between is named as well."""
    spread = max(values) / min(values) if values else 1.0
    return {"type": "log", "dtick": 1 if spread >= 100 else "D2" if spread >= 10 else "D1"}


def _shared(conversations: int) -> str:
    return f"shared by {count(conversations)}" if conversations > 1 else ""


def _figure(
    data: list[dict[str, Any]],
    x: dict[str, Any] | None = None,
    y: dict[str, Any] | None = None,
    **layout: Any,
) -> Figure:
    axis = {"gridcolor": "@line", "linecolor": "@line", "zerolinecolor": "@line"}
    return {
        "data": data,
        "layout": {
            "height": 320,
            "margin": {"l": 64, "r": 16, "t": 16, "b": 48},
            "paper_bgcolor": "@card",
            "plot_bgcolor": "@card",
            "font": {"color": "@ink", "size": 13},
            "legend": {"orientation": "h", "y": 1.12, "x": 0},
            "hoverlabel": {"bgcolor": "@paper", "font": {"color": "@ink"}},
            "xaxis": {**axis, **(x or {})},
            "yaxis": {**axis, **(y or {})},
            **layout,
        },
    }
