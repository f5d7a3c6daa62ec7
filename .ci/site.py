"""Hooks of mkdocs: what pages link to outside ``docs/`` becomes part of the site, and fences lose their test tags."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
FENCE = re.compile(r"^(\s*`{3,}\w+) no-ci:.*$", re.MULTILINE)


def on_files(files: Files, config: Any) -> Files:
    """Add the files of the repository that pages link to; Markdown of the root is not a page of the site."""
    wanted = set()
    for page in Path(config["docs_dir"]).glob("**/*.md"):
        wanted |= {found.group(1) for found in LINK.finditer(page.read_text(encoding="utf-8"))}
    for name in sorted(wanted):
        path = ROOT / name
        if not path.is_file():
            raise SystemExit(f"a page of docs/ links to {name}, which is no file")
        files.append(
            File.generated(
                config,
                f"repository/{name}.txt" if path.suffix == ".md" else f"repository/{name}",
                abs_src_path=str(path),
            )
        )
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point such links at the copies, and leave out of a fence's first line what tells the tests not to run it."""

    def there(found: re.Match[str]) -> str:
        name = found.group(1)
        depth = page.file.src_uri.count("/")
        return f"]({'../' * depth}repository/{name}{'.txt' if name.endswith('.md') else ''})"

    return FENCE.sub(r"\1", LINK.sub(there, markdown))
