"""What people are shown of a prompt: in the terminal and as a page."""

import dataclasses
import re
from html.parser import HTMLParser

import numpy as np
from jaxtyping import Float
from rich.console import Console

from specprefill_jax.engine import Scored, Timings
from specprefill_jax.policy import Status
from specprefill_jax.report.heat import levels, runs
from specprefill_jax.report.html import heat_map
from specprefill_jax.report.terminal import kept_text, phases_table, selection_line, summary
from specprefill_jax.scoring import Window
from specprefill_jax.selection import Selection

PIECES = ("If", " a", "<b>", " &", " then", "\n", " else", ' "x"')


def scored(importance: Float[np.ndarray, "8"] | None = None) -> Scored:
    """Eight tokens in chunks of 2, of which the first and the third chunk are kept."""
    return Scored(
        tokens=np.arange(8, dtype=np.int32),
        pieces=PIECES,
        importance=np.array([4, 4, 0, 0, 4, 1, 0, 0], np.float32) if importance is None else importance,
        chunk=2,
        selection=Selection(
            kept=np.array([0, 1, 4, 5], np.int32),
            prompt=8,
            forced=2,
            pinned=0,
            mode="chunk",
            budget=4,
            edges=np.array([0, 2, 4, 6, 8]),
            chunk_scores=np.array([1.0, 0.0, 0.625, 0.0]),
        ),
        scoring="windows",
        windows=(Window(0, 6, 3), Window(3, 8, 8)),
        phases={"score": 12.345, "select": 0.5},
    )


class Page(HTMLParser):
    """The text of a page's spans with their classes and titles, and every address that it would load."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.spans: list[tuple[str, str, str]] = []
        self.loads: list[str] = []
        self._open: tuple[str, str] | None = None
        self.feed(source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.loads += [found[name] for name in ("src", "href") if name in found]
        if tag == "span" and "title" in found:
            self._open = (found["class"], found["title"])

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.spans.append((data, *self._open))

    def handle_endtag(self, tag: str) -> None:
        self._open = None


def shown(renderable: object) -> str:
    console = Console(width=100, force_terminal=False)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


def test_levels_follow_the_square_root_of_importance():
    # sqrt(0, 1/4, 1/2, 1) = 0, 0.5, 0.707, 1 of ten levels, the last one closed
    assert levels(np.array([1, 2, 3, 5], np.float32)).tolist() == [0, 5, 7, 9]


def test_equal_importance_is_one_level():
    assert levels(np.full(3, 0.5, np.float32)).tolist() == [0, 0, 0]


def test_runs_are_the_longest_spans_of_one_mark():
    assert runs(np.array([1, 1, 0, 2, 2, 2])) == [(0, 2), (2, 3), (3, 6)]
    assert runs(np.array([7])) == [(0, 1)]


def test_in_color_all_of_the_prompt_is_there_and_what_is_dropped_is_dim():
    text = kept_text(scored(), color=True)
    assert text.plain == "".join(PIECES)
    styles = {text.plain[span.start : span.end]: str(span.style) for span in text.spans}
    assert styles["<b> &"] == "dim"
    assert styles[' else "x"'] == "dim"
    assert "white on" in styles["If a"]
    assert styles[" then"] == styles["If a"] != styles["\n"]


def test_without_color_what_is_dropped_is_counted():
    text = kept_text(scored(), color=False)
    assert text.plain == "If a [... 2 tokens ...]  then\n [... 2 tokens ...] "
    assert text.spans == []


def test_a_prompt_with_brackets_is_no_markup():
    prompt = scored()
    marked = Scored(**{**vars(prompt), "pieces": ("[bold]", *PIECES[1:])})
    assert shown(kept_text(marked, color=False)).startswith("[bold] a")


def test_counts_are_told_in_one_line():
    assert selection_line(scored().selection) == "kept 4 of 8 tokens (50%), 2 of them forced, by chunk"


def test_the_table_of_phases_ends_in_their_sum():
    rows = shown(phases_table({"score": 12.34, "select": 0.5}))
    assert re.findall(r"(\w+) +[│┃] +([\d.]+)", rows) == [
        ("score", "12.3"),
        ("select", "0.5"),
        ("sum", "12.8"),
    ]


def test_the_summary_tells_status_reason_and_time_to_first_token():
    timings = Timings(
        status=Status.ACTIVE,
        reason="long enough",
        prompt=400,
        kept=100,
        forced=36,
        pinned=4,
        reused=0,
        draft_read=400,
        looked_ahead=2,
        remembered=False,
        mode="mass",
        scoring="continuous",
        phases={},
        first_token=81.25,
        decode=3.0,
    )
    lines = shown(summary(timings))
    assert "active: long enough" in lines
    assert "100 of 400 tokens (25%), 36 forced, 4 of them pinned" in lines
    assert "read 400 tokens, and 2 steps ahead" in lines
    assert "81.2 ms to the first token" in lines
    later = shown(summary(dataclasses.replace(timings, reused=300, draft_read=0, remembered=True)))
    assert "300 done with in earlier turns" in later
    assert "knew this prompt" in later
    dense = shown(summary(dataclasses.replace(timings, scoring=None, forced=0, pinned=0)))
    assert "draft" not in dense
    assert "(25%)\n" in dense


# --- the page


def test_the_page_shows_every_token_once_escaped_and_in_order():
    page = Page(heat_map(scored()))
    assert "".join(text for text, _, _ in page.spans) == "".join(PIECES)


def test_the_page_tells_kept_from_dropped_and_how_important_each_token_is():
    spans = Page(heat_map(scored())).spans
    assert spans == [
        ("If a", "kept h9", "tokens 0-1, chunk 0, score 1.000"),
        ("<b> &", "dropped h0", "tokens 2-3, chunk 1, score 0.000"),
        (" then", "kept h9", "token 4, chunk 2, score 0.625"),
        ("\n", "kept h5", "token 5, chunk 2, score 0.625"),
        (' else "x"', "dropped h0", "tokens 6-7, chunk 3, score 0.000"),
    ]


def test_the_page_needs_nothing_from_elsewhere_and_has_light_and_dark():
    source = heat_map(scored())
    assert Page(source).loads == []
    assert "url(" not in source
    assert "@import" not in source
    assert "color-scheme: light dark" in source
    assert "prefers-color-scheme: dark" in source


def test_the_page_tells_counts_windows_and_times():
    source = heat_map(scored())
    assert "kept 4 of 8 tokens (50%)" in source
    assert "by 2 windows" in source
    assert "<tr><td>score</td><td>12.3 ms</td></tr>" in source


def test_a_prompt_that_is_kept_whole_has_no_chunk_scores_to_show():
    whole = scored()
    all_kept = Selection(
        np.arange(8, dtype=np.int32), 8, 2, 0, "chunk", 8, whole.selection.edges, np.zeros(0)
    )
    spans = Page(heat_map(Scored(**{**vars(whole), "selection": all_kept}))).spans
    assert spans[0] == ("If a", "kept h9", "tokens 0-1, chunk 0")
