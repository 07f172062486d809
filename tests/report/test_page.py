"""The report's page: whole, self-contained, safe, small."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from logs import eventful_run, health, start, steps, write_run

from megaparcae.report.chart import Chart, Line, nice_ticks, render, short, smoothed, thinned
from megaparcae.report.history import read_history
from megaparcae.report.page import render_page, write_report

VOID = {"meta", "link", "br"}


class Outline(HTMLParser):
    """Open elements, headings, everything that points elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes.append((tag, dict(attrs)))
        self.links += [v or "" for k, v in attrs if k in ("src", "href")]
        self.ids += [v or "" for k, v in attrs if k == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, (tag, self.getpos())

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2", "h3"):
            self.headings.append(f"{self.open[-1]} {data}")


def outline(page: str) -> Outline:
    found = Outline()
    found.feed(page)
    assert found.open == []
    return found


def test_the_page_has_every_section(tmp_path):
    found = outline(render_page(read_history(eventful_run(tmp_path))))
    assert [h for h in found.headings if h[:2] in ("h1", "h2")] == [
        "h1 sea", "h2 Loss", "h2 Depth", "h2 Loop health", "h2 Optimizer", "h2 Speed",
        "h2 Where it goes", "h2 Events", "h2 Configuration",
    ]  # fmt: skip
    for title in (
        "Training and validation", "Validation at fixed depths", "Training loss by depth drawn",
        "State norm", "Throughput", "FLOPs by part", "Time",
    ):  # fmt: skip
        assert f"h3 {title}" in found.headings


def test_nothing_is_loaded_from_elsewhere_and_it_is_made_for_phones_and_both_themes(tmp_path):
    page = render_page(read_history(eventful_run(tmp_path)))
    assert outline(page).links == ["data:,"]
    assert not re.search(r"https?:|url\(|@import|\bfetch\b", page)
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page


def test_pictures_are_told_in_words_and_ids_are_unique(tmp_path):
    found = outline(render_page(read_history(eventful_run(tmp_path))))
    plots = [a for _, a in found.attributes if a.get("role") == "img"]
    assert len(plots) >= 12
    assert all(plot["aria-label"] and plot["tabindex"] == "0" for plot in plots)
    assert "training, smoothed: 4.9" in (plots[0]["aria-label"] or "")
    assert len(found.ids) == len(set(found.ids))
    labels = [a["aria-labelledby"] for _, a in found.attributes if "aria-labelledby" in a]
    assert set(labels) <= set(found.ids)


def test_what_the_run_says_is_text_and_no_markup(tmp_path):
    run = eventful_run(tmp_path)
    evil = {**start(50, 1200), "host": "</script><script>alert(1)</script>"}
    with (run / "log.jsonl").open("a") as file:
        file.write("\n" + json.dumps(evil) + "\n")
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(text.replace("name: sea", "name: '<img src=x>'"))
    page = render_page(read_history(run))
    assert "<b>no space" not in page and "&lt;b&gt;no space" in page
    assert "<script>alert" not in page and "<img" not in page
    outline(page)


def test_the_data_under_the_pointer_is_json(tmp_path):
    page = render_page(read_history(eventful_run(tmp_path)))
    found = re.findall(r'<script type="application/json">(.*?)</script>', page)
    losses = json.loads(found[0])
    assert [line["name"] for line in losses["lines"]] == [
        "training, each step", "training, smoothed", "validation, T = 8",
    ]  # fmt: skip
    assert losses["lines"][2]["points"][1][:2] == [50, 3.1]
    assert [what for _, what in losses["marks"]] == [
        "resumed (step 20)", "skipped (step 31)", "loss spike (step 32)", "rolled back (step 32)",
    ]  # fmt: skip


@pytest.mark.parametrize(
    "records",
    [
        [start(0, 10)],
        steps(1, 1, 10),
        [{"kind": "validation", "step": 0, "loss": {"1": None}}],
        [health(3, 10)],
        steps(1, 40, 10, loss=None, grad_norm=None),
        [{"kind": "checkpoint", "step": 3}, {"kind": "stop", "step": 3}],
        steps(1, 5, 1e30),
        steps(1, 5, 0, loss=1e-30, grad_norm=0.0, seconds=0, tokens_per_second=-1),
    ],
    ids=["start", "one step", "no number", "health", "no loss", "events", "far future", "tiny"],
)
def test_little_or_odd_content_still_makes_a_page(tmp_path, records):
    outline(render_page(read_history(write_run(tmp_path, records))))


def test_a_transformer_has_a_page_too(tmp_path):
    model = {"architecture": "transformer", "num_layers": 2}
    run = write_run(tmp_path, steps(1, 20, 0, loop_work=0, mean_loops=0.0), model=model)
    page = render_page(read_history(run))
    assert "Transformer of 2 blocks" in page and "FLOPs by part" in page


def test_traced_steps_are_shown(tmp_path):
    run = eventful_run(tmp_path)
    assert "Traced steps" not in render_page(read_history(run))
    (run / "profile").mkdir()
    (run / "profile" / "summary.txt").write_text("prelude  1.00 <ms>")
    page = render_page(read_history(run))
    outline(page)
    assert "Traced steps" in page and "prelude  1.00 &lt;ms&gt;" in page


def test_flops_are_those_of_the_log(tmp_path):
    page = render_page(read_history(write_run(tmp_path, [start(0, 0), *steps(1, 5, 0)])))
    assert "75.0%</td><td>3M FLOP per token" in page and "25.0%</td><td>1M FLOP" in page
    assert "10.0% more is computed a second time" in page
    assert "loops without gradient" not in page
    assert "<dd>99.0%<small>FLOPs needed of executed; rank 0 even to 1.6%" in page


def test_a_long_run_makes_a_small_page(tmp_path):
    run = write_run(tmp_path, steps(1, 8_000, 0), train={"num_steps": 100_000})
    started = time.monotonic()
    page = render_page(read_history(run))
    assert len(page) < 1_000_000
    assert time.monotonic() - started < 20


def test_the_tool_writes_where_it_is_told_and_names_the_users_mistake(tmp_path):
    tool = Path(__file__).resolve().parents[2] / "tools" / "report.py"
    run = eventful_run(tmp_path / "run")
    done = subprocess.run([sys.executable, tool, run], capture_output=True, text=True)
    assert done.returncode == 0 and (run / "report.html").is_file(), done.stderr
    done = subprocess.run([sys.executable, tool, tmp_path], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and "checkpoint.dir" in done.stderr


@pytest.mark.parametrize("theme", [0, 1], ids=["dark", "light"])
def test_a_browser_draws_it_without_a_complaint(tmp_path, theme):
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if browser is None:
        pytest.skip("no Chromium is installed")
    page = tmp_path / "report.html"
    write_report(eventful_run(tmp_path), page)
    # The console is asked as a user would: move over a chart, read what appears.
    check = """<script>onload = () => {
      const plot = document.querySelector(".plot"), box = plot.getBoundingClientRect();
      plot.dispatchEvent(new PointerEvent("pointermove", {clientX: box.left + box.width / 2}));
      const tip = document.querySelector(".tip");
      const fits = document.documentElement.scrollWidth <= innerWidth;
      const dark = getComputedStyle(document.body).backgroundColor;
      document.title = ["tip", tip && tip.textContent, "fits", fits, dark].join(" ");
    }</script>"""
    page.write_text(page.read_text().replace("</body>", f"{check}</body>"))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
         f"--user-data-dir={tmp_path / 'profile'}", "--window-size=500,900",
         f"--blink-settings=preferredColorScheme={theme}", "--dump-dom", page.as_uri()],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search("<title>(.*?)</title>", done.stdout)
    assert title is not None, done.stderr
    assert re.search(r"tip step \d+.*training, smoothed: 3\.\d", title[1]), title[1]
    assert "fits true" in title[1]
    assert title[1].endswith("rgb(245, 246, 248)" if theme else "rgb(14, 17, 21)"), title[1]


def test_ticks_are_round_and_within():
    assert nice_ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert nice_ticks(3.1, 4.4) == pytest.approx([3.5, 4.0])
    assert nice_ticks(5, 5) == [5]


def test_numbers_are_short():
    shown = [short(x) for x in (0, 0.03125, 12.3456, 4339, 614_400, 1.41e6, 2e9, 1e-7, -3000)]
    assert shown == ["0", "0.03125", "12.35", "4,339", "614.4k", "1.41M", "2G", "1.0e-07", "-3,000"]


def test_thinning_keeps_the_ends_and_the_mean():
    points = [(float(i), float(i % 10)) for i in range(10_002)]
    few = thinned(points, 102)
    assert len(few) == 102 and few[0] == points[0] and few[-1] == points[-1]
    assert sum(y for _, y in few[1:-1]) / 100 == pytest.approx(4.5, abs=0.01)


def test_smoothing_follows_a_steep_start_and_leaves_a_line_as_it_is():
    falling = [(float(i), 10.0 / (i + 1)) for i in range(100)]
    assert smoothed(falling)[0] == falling[0]
    line = [(float(i), 2.0 * i) for i in range(100)]
    assert smoothed(line)[50] == pytest.approx(line[50])


def test_a_chart_without_points_is_left_out():
    assert render(Chart(title="a", unit="b", lines=[Line("c", [])])) == ""
