"""The code blocks of the README and docs: which are run, and why others are not.

``python -m tests.docblocks`` lists them. A block's info string is a language, and after it nothing or
``no-ci: reason``. ``python``, ``bash`` and ``sh`` blocks are run by ``tests/test_docs.py`` unless they are tagged;
blocks of the other known languages are only shown.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import unquote

from markdown_it import MarkdownIt
from markdown_it.token import Token

__all__ = ["ROOT", "RUN", "SHOWN", "Block", "broken_links", "documents", "parse"]

ROOT = Path(__file__).resolve().parent.parent
RUN = ("python", "bash", "sh")
SHOWN = ("text", "console", "json", "toml", "yaml", "html", "c", "make")


@dataclass(frozen=True)
class Block:
    """One code block.

    Attributes
    ----------
    where : str
        ``docs/index.md:12``, the line of the opening fence.
    language : str
    code : str
    line : int
        Of the opening fence, from 1.
    no_ci : str or None
        Why the block is not run.
    fault : str or None
        What is wrong with its info string.
    """

    where: str
    language: str
    code: str
    line: int
    no_ci: str | None = None
    fault: str | None = None

    @property
    def runs(self) -> bool:
        return self.language in RUN and self.no_ci is None and self.fault is None


def documents() -> list[Path]:
    """Return the README, its siblings and all pages of docs."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def parse(text: str, name: str) -> list[Block]:
    """Return the code blocks of the Markdown `text`."""
    return [
        _block(token, name) for token in MarkdownIt("commonmark").parse(text) if token.type in ("fence", "code_block")
    ]


def _block(token: Token, name: str) -> Block:
    line = (token.map or [0])[0] + 1
    language, _, rest = token.info.strip().partition(" ")
    no_ci = fault = None
    if token.type == "code_block":
        fault = "an indented block has no language; use a fence"
    elif language not in (*RUN, *SHOWN):
        fault = f"language {language!r} is not one of {', '.join((*RUN, *SHOWN))}"
    elif rest.startswith("no-ci:") and rest.removeprefix("no-ci:").strip():
        no_ci = rest.removeprefix("no-ci:").strip()
    elif rest:
        fault = f"after the language comes nothing or 'no-ci: reason', not {rest!r}"
    return Block(f"{name}:{line}", language, token.content, line, no_ci, fault)


def broken_links(text: str, page: Path) -> Iterator[str]:
    """Yield the relative links of the Markdown `text` of `page` that lead to no file, and anchors to no heading."""
    for token in MarkdownIt("commonmark").parse(text):
        for child in token.children or []:
            target = str(child.attrGet("href") or child.attrGet("src") or "")
            if not target or "://" in target or target.startswith("mailto:"):
                continue
            path, _, anchor = unquote(target).partition("#")
            file = (page.parent / path).resolve() if path else page
            wants_heading = anchor and file.suffix == ".md"
            if not file.exists() or (wants_heading and anchor not in _anchors(file.read_text(encoding="utf-8"))):
                yield target


def _anchors(text: str) -> set[str]:
    """Return the anchors that GitHub makes of the headings."""
    tokens = MarkdownIt("commonmark").parse(text)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens) if token.type == "heading_open"]
    kept = ["".join(c for c in heading.lower() if c.isalnum() or c in " -_") for heading in headings]
    return {heading.replace(" ", "-") for heading in kept}


def main() -> int:
    faults = 0
    for page in documents():
        name = page.relative_to(ROOT).as_posix()
        text = page.read_text(encoding="utf-8")
        for block in parse(text, name):
            state = "runs" if block.runs else f"no-ci: {block.no_ci}" if block.no_ci else "shown"
            print(f"{block.where:32} {block.language:8} {block.fault or state}")
            faults += block.fault is not None
        for link in broken_links(text, page):
            print(f"{name:32} link     leads nowhere: {link}")
            faults += 1
    print(f"{faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
