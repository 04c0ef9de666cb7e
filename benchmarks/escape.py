"""What records say, as the text that it is: in Markdown, in plots, on terminals.

Records may come from anybody. A device's name or a reason that holds a link, a table's bar, a formula or a terminal's
escape sequence is shown as these characters.
"""

from __future__ import annotations

import re

# What begins something in Markdown, GitHub's formulas or HTML; but for the underscore, which only slants.
_MARKDOWN = re.compile(r"[\\|<>\[\]`$&*#~]")
_RUN_OF_BACKTICKS = re.compile("`+")


def visible(text: str) -> str:
    r"""For terminals: control characters, line breaks and what else can't be seen, as in `\x1b`."""
    return "".join(each if each.isprintable() else repr(each)[1:-1] for each in text)


def markdown(text: str) -> str:
    """For a line or a table's cell of Markdown."""
    return _MARKDOWN.sub(r"\\\g<0>", visible(text))


def code(text: str) -> str:
    """A code span of Markdown, outside tables: fenced by more backticks than the text has in a row."""
    text = visible(text)
    longest = max(map(len, _RUN_OF_BACKTICKS.findall(text)), default=0)
    return f"{'`' * (longest + 1)} {text} {'`' * (longest + 1)}" if longest else f"`{text}`"


def plot(text: str) -> str:
    """For matplotlib, where text between dollars is a formula."""
    return visible(text).replace("$", r"\$")
