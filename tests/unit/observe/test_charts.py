import math
from itertools import pairwise
from xml.etree import ElementTree

from hypothesis import given
from hypothesis import strategies as st

from headrace.observe.charts import Series, finite, lag_chart, line_chart, moving_mean, nice_ticks, thin


@given(st.floats(-1000, 1000), st.floats(1e-5, 1e6), st.integers(2, 10))
def test_ticks_are_round_inside_and_about_as_many_as_asked(start: float, width: float, count: int):
    low = start * width  # far from zero, but not beyond what a float resolves
    ticks = nice_ticks(low, low + width, count)
    step = (width / count) if len(ticks) < 2 else ticks[1] - ticks[0]
    slack = 1e-5 * step + 1e-9 * abs(low)
    assert all(low - slack <= tick <= low + width + slack for tick in ticks)
    assert 1 <= len(ticks) <= 2 * count + 2 if len(ticks) else width < 10 * step
    if len(ticks) > 1:
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-6)
        assert min(abs(mantissa - round_one) for round_one in (1, 2, 5)) < 1e-2
        assert all(math.isclose(b - a, step, rel_tol=1e-3) for a, b in pairwise(ticks))


def test_ticks_by_hand():
    assert nice_ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(0.0, 300.0, 6) == [0, 50, 100, 150, 200, 250, 300]
    assert nice_ticks(0.0, 4e-6, 4) == [0.0, 1e-6, 2e-6, 3e-6, 4e-6]
    assert nice_ticks(3.0, 3.0) == [3.0]


@given(st.lists(st.floats(-100, 100), min_size=1, max_size=500), st.integers(1, 60))
def test_thinning_keeps_order_and_range(values: list[float], limit: int):
    points = [(float(i), value) for i, value in enumerate(values)]
    thinned = thin(points, limit)
    assert len(thinned) == min(limit, len(points))
    assert [x for x, _ in thinned] == sorted(x for x, _ in thinned)
    assert all(min(values) - 1e-9 <= y <= max(values) + 1e-9 for _, y in thinned)


def test_moving_mean_by_hand():
    points = [(0.0, 1.0), (1.0, 3.0), (2.0, 5.0), (3.0, 1.0)]
    assert moving_mean(points, 2) == [(0.0, 1.0), (1.0, 2.0), (2.0, 4.0), (3.0, 3.0)]
    assert finite([(0, None), (1, math.inf), (2, math.nan), (3, 1.5)]) == [(3, 1.5)]


def test_a_line_goes_where_the_axes_say():
    series = Series(label="a < b", points=[(0.0, 0.0), (10.0, 1.0)])
    chart = ElementTree.fromstring(line_chart([series], name="n", x_label="x", y_range=(0.0, 1.0)))
    path = next(node for node in chart.iter("path"))
    (left, bottom), (right, top) = (tuple(map(float, p[1:].split(","))) for p in path.attrib["d"].split())
    labels = {node.text: node for node in chart.iter("text")}
    assert float(labels["10"].attrib["x"]) == right
    assert float(labels["0"].attrib["x"]) in (left, left - 8)
    ticks = {t.text: float(t.attrib["y"]) - 4 for t in chart.iter("text") if "end" in t.attrib["class"]}
    assert (ticks["0"], ticks["1"]) == (bottom, top)
    assert [node.text for node in chart.iter("title")] == ["a < b at 0: 0", "a < b at 10: 1"]


def test_one_point_and_equal_points_are_drawn():
    for points in ([(3.0, 0.0)], [(1.0, 2.0), (2.0, 2.0)]):
        markup = line_chart([Series(label="s", points=points)], name="n", x_label="x")
        assert "nan" not in markup
        assert len(list(ElementTree.fromstring(markup).iter("circle"))) == len(points)


def test_the_bound_separates_good_from_bad_bars():
    drawing = lag_chart({0: 2000, 1: 1000, 3: 1000}, bound=1)
    assert drawing is not None and lag_chart({}, bound=1) is None
    chart = ElementTree.fromstring(drawing.svg)
    bars = {bar.find("title").text: bar for bar in chart.iter("rect")}  # type: ignore[union-attr]
    zero, one, three = "lag 0: 2,000 tokens (50.0%)", "lag 1: 1,000 tokens (25.0%)", "lag 3: 1,000 tokens (25.0%)"
    assert [bars[tip].attrib["class"] for tip in (zero, one, three)] == ["bar a", "bar a", "bar bad"]
    heights = {tip: float(bar.attrib["height"]) for tip, bar in bars.items()}
    assert math.isclose(heights[zero], 2 * heights[one], rel_tol=0.01)
    line = next(node for node in chart.iter("line") if node.attrib["class"] == "bound")
    assert float(bars[one].attrib["x"]) < float(line.attrib["x1"]) < float(bars[three].attrib["x"])
