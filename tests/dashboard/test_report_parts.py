import re
from html.parser import HTMLParser

from hypothesis import given
from hypothesis import strategies as st

from bftrainer.dashboard import html
from bftrainer.dashboard.html import Markup

NASTY = "<script>alert(1)</script>&\"'"


class Texts(HTMLParser):
    """Collects the text of a page and its tags, and refuses tags that are not closed in order."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_text_is_escaped_in_every_part_and_markup_is_not() -> None:
    parts = [
        html.tiles([(NASTY, NASTY, NASTY)]),
        html.table((NASTY, "n"), [(NASTY, "1")], numbers=(1,), total=(NASTY, "1")),
        html.fold(NASTY, ""),
    ]
    page = html.page(NASTY, html.escape(NASTY), [html.section(NASTY, NASTY, part) for part in parts])
    found = Texts(page)
    assert "script" not in found.tags
    assert found.text.count(NASTY) == 3 + 3 + 1 + 3 + 3
    assert Texts(html.table(("a",), [(Markup("<b>x</b>"),)])).tags.count("b") == 1


def test_a_page_has_code_only_if_there_is_something_to_draw() -> None:
    plain, drawn = html.page("t", "", []), html.page("t", "", [], {"text": NASTY})
    assert Texts(plain).tags.count("script") == 0
    assert Texts(drawn).tags.count("script") == 2
    assert "script-src" not in plain
    assert re.search(r"script-src 'sha256-[A-Za-z0-9+/]{43}='", drawn)
    assert not any(re.search(r"https?://|src=|href=|@import|url\(", page) for page in (plain, drawn))


def test_numbers_are_aligned_to_the_right_and_empty_heads_are_left_out() -> None:
    table = html.table(("", ""), [("a", "1")], numbers=(1,))
    assert '<td>a</td><td class="n">1</td>' in table
    assert "<thead>" not in table
    assert "<tfoot>" not in table


@given(st.text())
def test_no_control_character_reaches_a_page(text: str) -> None:
    assert not re.search(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f<>]", html.escape(text))


def test_amounts_are_readable() -> None:
    assert [html.amount(n) for n in (None, 0.0, 1234.0, 1.5e6, -2e9, 3e12)] == [
        *("", "0", "1,234"),
        *("1.50 million", "-2.00 billion", "3.00 trillion"),
    ]
