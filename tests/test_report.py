"""The report: one page, nothing loaded, everything escaped; and it opens in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cachegen_rag import charts
from cachegen_rag.errors import ConfigError
from cachegen_rag.report import Runs, load_runs, render

EVIL = "<script>alert('x')</script>&\"'"
VOID = {"meta", "br", "link", "img", "input", "hr"}
SHAPES = {"rect", "line", "circle", "polyline"}


def record(n: int, hit: bool = True, **changes: Any) -> dict[str, Any]:
    document = {"kind": "document", "tokens": 500, "source": "store" if hit else "text", "doc_id": EVIL,
                "level": 2 if hit else None, "bytes": 90_000 * hit, "fetch_ms": 3.0, "decode_ms": 20.0,
                "splice_ms": 1.0, "recompute_ms": 5.0, "reason": None if hit else f"{EVIL} {n}"}  # fmt: skip
    base = {"model": "m", "started_at": 1.7e9 + n, "wait_ms": 5.0, "ttft_ms": 150.0 if hit else 4000.0,
            "total_ms": 5000.0, "prompt_tokens": 520, "completion_tokens": 20, "spliced_tokens": 480 * hit,
            "recomputed_tokens": 20 * hit, "bytes_fetched": 90_000 * hit, "finish_reason": "stop",
            "segments": [{"kind": "text", "tokens": 20, "source": "text"}, document]}  # fmt: skip
    return base | changes


BENCH = {
    "benchmark": EVIL,
    "environment": {"model": EVIL, "versions": {"numpy": "2"}},
    "summary": {"bits": 1.23456, "missing": None, "peers": {"q4_0": 4.5}},
    "rows": [{"codec": c, "bits_per_element": b, "kl": k * f, "note": EVIL}
             for c, f in (("ours", 1), (EVIL, 3)) for b, k in ((1, 0.1), (2, 0.03), (4, 0.0))],
}  # fmt: skip


class Checker(HTMLParser):
    """Every tag is closed, in order, and nothing refers to anything outside the page."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        for name, value in attrs:
            assert name not in {"src", "href", "xlink:href", "srcset", "action", "data"} and not name.startswith("on")
            assert "url(" not in (value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(page: str) -> Checker:
    checker = Checker()
    checker.feed(page)
    assert not checker.open
    assert "script" not in checker.seen and "link" not in checker.seen and "img" not in checker.seen
    assert "@import" not in page and "url(" not in page
    return checker


@pytest.fixture(scope="module")
def page() -> str:
    requests = [record(n, hit=n % 4 != 0) for n in range(20)]
    return render(Runs(requests, [BENCH], [EVIL]))


def test_the_page_is_whole_and_loads_nothing(page: str) -> None:
    checker = check(page)
    assert checker.text.count(EVIL) >= 5, "what was given is shown as text"
    assert set(checker.seen) >= SHAPES
    for heading in ("Requests", "Timeline", "Time to first token", "Documents", "Sizes", "Rate and distortion"):
        assert f">{heading}<" in page


def test_the_figures_are_right(page: str) -> None:
    assert "<b>75%</b>" in page and "<b>20</b>" in page and "<b>150 ms</b>" in page and "<b>7,200</b>" in page
    assert re.search(r"<td>2</td><td>15</td><td>7,500</td><td>1\.3 MiB</td><td>180</td>", page)
    assert "<td>1.235</td>" in page and "<td>q4_0: 4.5</td>" in page


def test_numbers_in_reasons_are_one_reason(page: str) -> None:
    assert len(re.findall(r"miss: ", page)) == 2, "a bar and its tooltip"


@pytest.mark.parametrize(
    "runs",
    [
        Runs(),
        Runs([record(0, completion_tokens=0)]),
        Runs([record(0, segments=[])]),
        Runs([record(0, started_at=0.0), record(1, started_at=0.0)]),
        Runs([], [{"benchmark": "b"}]),
        Runs([], [{"benchmark": "b", "rows": [{"bits_per_element": 0, "kl": 0}, {"bits_per_element": 1, "kl": 0}]}]),
        Runs([], [{"benchmark": "b", "rows": [{"bits_per_element": 1, "kl": 0.1}] * 2, "summary": {}}]),
    ],
)
def test_pages_of_little(runs: Runs) -> None:
    check(render(runs))


def test_charts_of_one_point_and_of_none() -> None:
    assert "<circle" in charts.lines([("a", [(1.0, 2.0)])], "l", "x", "y")
    assert charts.lines([("a", [(0.0, 2.0)])], "l", "x", "y") == ""
    assert charts.bars([], "l").endswith("</svg>") and charts.bars([("a", 0.0, "0")], "l").endswith("</svg>")
    assert charts.timeline([("a", 5.0, [(0.0, "s0")])], "l").endswith("</svg>")


def write(path: Path, value: Any) -> Path:
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_what_can_be_read(tmp_path: Path) -> None:
    files = [
        write(tmp_path / "bench.json", BENCH),
        write(tmp_path / "ask.json", {"answer": "a", "record": record(0)}),
        write(tmp_path / "list.json", [record(1), record(2)]),
        write(tmp_path / "log.jsonl", "\n".join(json.dumps(record(n)) for n in range(3)) + "\n\n"),
        write(tmp_path / "requests.json", {"requests": [record(4)]}),
    ]
    runs = load_runs(files)
    assert (len(runs.requests), len(runs.benchmarks)) == (7, 1)
    assert runs.sources == [f.name for f in files]


@pytest.mark.parametrize("text", ["", "no json", "[]", "{}", "3", '{"benchmark": 1, "rows": 3}', "[" * 100_000])
def test_what_cannot_be_read(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=r"run\.json"):
        load_runs([write(tmp_path / "run.json", text)])
    with pytest.raises(ConfigError, match=r"none\.json"):
        load_runs([tmp_path / "none.json"])


def test_it_opens_in_a_browser(page: str, tmp_path: Path) -> None:
    browser = next((b for b in map(shutil.which, ("chromium", "chromium-browser", "google-chrome")) if b), None)
    if browser is None:
        pytest.skip("no Chromium is installed here")
    file, picture = write(tmp_path / "report.html", page), tmp_path / "report.png"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    dumped = subprocess.run(
        [*command, "--dump-dom", file.as_uri()], capture_output=True, text=True, timeout=60, check=True
    )
    check_text = "Time to first token"
    assert check_text in dumped.stdout and dumped.stdout.count("<svg") >= 4
    shot = [*command, "--enable-logging=stderr", "--window-size=900,2000", f"--screenshot={picture}", file.as_uri()]
    drawn = subprocess.run(shot, capture_output=True, text=True, timeout=60, check=True)
    assert "CONSOLE" not in drawn.stderr, "the page complains about nothing"
    assert picture.stat().st_size > 20_000
