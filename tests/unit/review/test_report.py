import json
import math
import re
from contextlib import closing
from html.parser import HTMLParser
from pathlib import Path

import pytest
from journals import JournalMaker

from headrace.errors import UserError
from headrace.observe.charts import BINS, close_up, read_activity
from headrace.observe.spans import RunClock, Timeline, TimeSpan
from headrace.review.summary import templates, values, write_report

VOID = {"meta", "br", "link", "img"}


class Page(HTMLParser):
    """Checks that tags are balanced and collects the text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data + "\n"


def read(run_dir: Path) -> tuple[str, Page]:
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    html = path.read_text(encoding="utf-8")
    return html, Page(html)


def test_a_whole_run_shows_its_figures(finished_run: JournalMaker):
    with closing(Timeline(finished_run.run_dir / "timeline.json", RunClock(wall=90.0, monotonic=0.0))) as timeline:
        timeline.add("engine-0", [TimeSpan("decode & sample", i * 0.5, i * 0.5 + 0.4) for i in range(70)])
        timeline.add("trainer-0", [TimeSpan("step", 10.0 + i, 10.8 + i) for i in range(20)])
        timeline.add("trainer-0", [TimeSpan("wait for batch", 29.8, 30.0, False)])
    html, page = read(finished_run.run_dir)
    for part in (
        "tiny",
        "finished",
        "0.250",
        "0.750",
        "0.35",
        "bound 2",
        "balanced",
        "too old",
        "staged digest differs",
    ):
        assert part in page.text, part
    for part in ("decode & sample", "engine-0", "trainer-0", "training begins", "lag 2: 10 tokens (5.0%)"):
        assert part in page.text, part
    assert "A close look: 3.2 s from 18.4 s on" in page.text
    assert html.count("<svg") == 3 + 2 + 1 + 2 + 3


def test_the_page_is_one_file_that_fetches_and_runs_nothing(finished_run: JournalMaker):
    html, page = read(finished_run.run_dir)
    assert not page.seen & {"script", "link", "img", "iframe", "i b"}
    assert not re.search(r"""(src|href)\s*=|url\(|@import|https?://""", html)
    assert "prefers-color-scheme: dark" in html


def test_what_models_and_users_wrote_is_text(finished_run: JournalMaker):
    finished_run.add("samples", moment="after", prompt="h2", answer="<script>alert(1)</script>", reward=None)
    finished_run.db.execute("UPDATE meta SET value = '\"<b>name</b>\"' WHERE key = 'name'")
    _, page = read(finished_run.run_dir)
    assert "script" not in page.seen
    assert "<script>alert(1)</script>" in page.text
    assert "<i>before</i>" in page.text
    assert '[run]\nname = "tiny" # <&>' in page.text
    assert "<b>name</b>" in page.text
    assert "reward raised <Error>" in page.text
    assert "no answer recorded" in page.text


def test_samples_stand_side_by_side(finished_run: JournalMaker):
    html, _ = read(finished_run.run_dir)
    row = re.search(r'<table class="samples">.*?<tbody>\s*<tr>(.*?)</tr>', html, re.S)
    assert row is not None
    cells = re.findall(r"<td>(.*?)</td>", row[1], re.S)
    assert ["1 &lt; 2?" in cells[0], "before" in cells[1], "after" in cells[2]] == [True, True, True]
    assert ["reward 0" in cells[1], "reward 1" in cells[2]] == [True, True]


def test_an_empty_run_says_what_is_missing(journal: JournalMaker):
    _, page = read(journal.run_dir)
    for part in (
        "still going, or it was cut short",
        "not evaluated",
        "No policy step was recorded.",
        "This run left no timeline.",
        "No delivery was recorded.",
        "No samples were recorded.",
        "This run left no config.toml.",
    ):
        assert part in page.text, part


def test_a_run_cut_after_one_step_is_drawn(journal: JournalMaker):
    journal.meta(train_started=100.0, lag_bound=0)
    journal.add("steps", step=1, lag_histogram='{"2": 10}', reward_mean=0.5, loss=None, seconds=None)
    (journal.run_dir / "timeline.json").write_text('[\n{"ph": "i"')
    _, page = read(journal.run_dir)
    assert "bound 0: broken" in page.text
    assert "This run left no timeline." in page.text


def test_without_a_journal_there_is_one_clear_line(tmp_path: Path):
    with pytest.raises(UserError, match=r"is not a run directory: it has no journal\.db"):
        write_report(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_busy_fractions_by_hand(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, RunClock(wall=0.0, monotonic=0.0))) as timeline:
        # Two threads overlap from 30 to 60 s of 240: a moment that is busy twice is busy once.
        timeline.add(
            "trainer-0",
            [TimeSpan("step", 0.0, 60.0), TimeSpan("publish", 30.0, 90.5), TimeSpan("wait", 90.5, 240.0, False)],
        )
        timeline.add("engine-0", [TimeSpan("decode", 150.0, 160.0), TimeSpan("serve", 120.0, 240.0)])
    activity = read_activity(path, (80.0, 100.0))
    assert activity is not None
    assert list(activity.busy) == ["engine-0", "trainer-0"]
    assert activity.busy["trainer-0"] == pytest.approx([1.0] * 90 + [0.5] + [0.0] * (BINS - 91))
    assert activity.busy["engine-0"] == pytest.approx([0.0] * 120 + [1.0] * 120)
    assert [span.name for _, span in activity.spans] == ["publish", "wait"]


def test_what_a_role_does_most_has_its_colour(tmp_path: Path):
    path = tmp_path / "timeline.json"
    with closing(Timeline(path, RunClock(wall=0.0, monotonic=0.0))) as timeline:
        timeline.add("trainer-0", [TimeSpan("train", 0.0, 4.0), TimeSpan("publish", 4.0, 4.5)])
        timeline.add("engine-0", [TimeSpan("prefill", 0.0, 0.5), TimeSpan("decode", 0.5, 3.0)])
        timeline.add("scorer-0", [TimeSpan(f"judge {i}", i * 0.1, i * 0.1 + 0.1) for i in range(10)])
    activity = read_activity(path, (0.0, 4.5))
    assert activity is not None
    drawing = close_up(activity)
    found = dict(re.findall(r'<rect class="span (\w+)"[^>]*><title>\S+ · (\w+):', drawing.svg))
    assert (found["a"], found["b"]) == ("decode", "train")
    assert ("other", "other work") in drawing.keys
    assert "wait" not in dict(drawing.keys)
    assert "waiting" not in drawing.svg


def test_another_page_can_extend_the_report(journal: JournalMaker):
    """The template's macros and values reach the blocks of a page that extends it, and escaping stays on."""
    page = templates().from_string(
        '{% extends "report.html.jinja" %}'
        "{% block head %}<script></script>{% endblock %}"
        "{% block tiles %}{% call tile(name, 'now') %}{{ summary.steps | thousands }}{% endcall %}{% endblock %}"
    )
    journal.meta(name="a & b")
    html = page.render(values(journal.run_dir))
    assert "<script></script>" in html.partition("</head>")[0]
    assert '<span class="what">a &amp; b</span><b>0</b><small>now</small>' in html
    assert "Trained tokens per second" not in html
    assert "No delivery was recorded." in html


def test_curves_and_advice_are_shown(journal: JournalMaker):
    for step in range(1, 4):
        numbers = {"zero_variance": 0.5, "score/<right>": 0.1 * step, "score/short": 1.0, "kl_k3": None, "unknown": 3.0}
        journal.add("steps", step=step, version=step - 1, metrics=json.dumps(numbers))
    told = {"cause": "truncated", "step": 3, "line": "90% of the answers <were> cut off"}
    journal.meta(**{"advice truncated": told})
    shown = values(journal.run_dir)
    assert [title for title, _ in shown["curves"]] == ["Scores", "Groups with equal rewards"]
    assert [key for _, key in shown["curves"][0][1].keys] == ["<right>", "short"]
    page = write_report(journal.run_dir).read_text()
    assert "90% of the answers &lt;were&gt; cut off" in page
    assert "<right>" not in page and "&lt;right&gt;" in page


def test_short_times_have_one_unit_and_zeros_are_a_sentence(journal: JournalMaker):
    for version in range(3):
        journal.add("deliveries", version=version, stage_seconds=0.0125, canary_error=0.0)
    [canary, stage, _] = values(journal.run_dir)["deliveries"]
    assert canary == ("Canary error · 0 in all 3 deliveries", None)
    assert stage[0] == "Time to stage · at most 12.5 ms"
    assert ">ms</text>" in stage[1].svg and ": 12.5</title>" in stage[1].svg


def test_the_titles_of_deliveries_leave_no_engine_and_no_failure_out(journal: JournalMaker):
    for number in range(12):
        swap, error = 0.5 if number == 9 else 0.1, math.inf if number == 8 else 0.0
        journal.add("deliveries", version=1, engine=f"engine-{number}", swap_seconds=swap, canary_error=error)
    [canary, _, swaps] = values(journal.run_dir)["deliveries"]
    assert canary == ("Canary error · 0 in 11 of 12 deliveries, not finite in 1", None)
    assert swaps[0] == "Time to swap · at most 500.0 ms, 7 of 12 engines drawn"
    assert [label for _, label in swaps[1].keys] == [f"engine-{number}" for number in range(7)]
