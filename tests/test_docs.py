"""The README and docs: every code block is run, or says why not; every link leads somewhere."""

from __future__ import annotations

import doctest
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docblocks import ROOT, Block, broken_links, documents, parse

PAGES = {page.relative_to(ROOT).as_posix(): page for page in documents()}
BLOCKS = {name: parse(page.read_text(encoding="utf-8"), name) for name, page in PAGES.items()}
SECONDS = 180  # for one shell block


def run_python(block: Block, path: Path, namespace: dict[str, Any]) -> None:
    if block.code.lstrip().startswith(">>>"):
        test = doctest.DocTestParser().get_doctest(block.code, namespace, block.where, str(path), block.line)
        runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
        report: list[str] = []
        failed = runner.run(test, out=report.append, clear_globs=False).failed
        namespace.update(test.globs)  # the doctest worked on a copy
        assert not failed, "".join(report)
        return
    # blank lines in front, so that a traceback shows the line of the page
    exec(compile("\n" * block.line + block.code, str(path), "exec"), namespace)


def run_shell(block: Block, folder: Path) -> None:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", block.code],
        cwd=folder,
        env={**os.environ, "PATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{block.where}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"


def run_page(blocks: list[Block], path: Path, folder: Path) -> None:
    """Run the blocks of a page one after another, in one namespace and one folder."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in blocks:
        if block.runs and block.language == "python":
            run_python(block, path, namespace)
        elif block.runs:
            run_shell(block, folder)


@pytest.mark.parametrize("name", [name for name, blocks in BLOCKS.items() if any(block.runs for block in blocks)])
def test_page_runs(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_page(BLOCKS[name], PAGES[name], tmp_path)


@pytest.mark.parametrize("block", [b for bs in BLOCKS.values() for b in bs if b.no_ci], ids=lambda block: block.where)
def test_not_run_here(block: Block) -> None:
    pytest.skip(f"{block.where}: no-ci: {block.no_ci}")


def test_every_block_says_what_it_is() -> None:
    assert [f"{b.where}: {b.fault}" for bs in BLOCKS.values() for b in bs if b.fault] == []


@pytest.mark.parametrize("name", list(PAGES))
def test_links_lead_somewhere(name: str) -> None:
    assert list(broken_links(PAGES[name].read_text(encoding="utf-8"), PAGES[name])) == []


def test_the_readme_shows_both_commands() -> None:
    shell = "\n".join(block.code for block in BLOCKS["README.md"] if block.language in ("bash", "sh"))
    assert "make reproduce" in shell
    assert "make test" in shell


# ---- the runner itself -------------------------------------------------------------------------------------------

PAGE = """
```python
a = 1
```

1. in a list

   ```python
   a += 1
   open("file.txt", "w").write(str(a))
   ```

```bash
test "$(cat file.txt)" = 2
python -c 'import gigamlp'
false | true && exit 9 || true
```

```python
>>> a
2
>>> b = 3
```

```python
assert b == 3
```

```bash no-ci: installs packages
exit 1
```

```text
anything
```
"""


def test_blocks_share_namespace_and_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = parse(PAGE, "page.md")
    assert [b.language for b in blocks] == ["python", "python", "bash", "python", "python", "bash", "text"]
    assert [b.where for b in blocks][:3] == ["page.md:2", "page.md:8", "page.md:13"]
    assert [b.no_ci for b in blocks if b.no_ci] == ["installs packages"]
    assert not any(b.fault for b in blocks)
    run_page(blocks, tmp_path / "page.md", tmp_path)


@pytest.mark.parametrize(
    "page",
    [
        "```python\nassert 1 == 2\n```",
        "```python\n>>> 1\n2\n```",
        "```bash\nfalse\ntrue\n```",
        "```bash\nfalse | true\n```",
        "```sh\necho $UNSET_VARIABLE\n```",
    ],
)
def test_what_fails_is_seen(page: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        run_page(parse(page, "page.md"), tmp_path / "page.md", tmp_path)


@pytest.mark.parametrize(
    ("page", "fault"),
    [
        ("```\nx\n```", "language '' is not one of"),
        ("```pyhton\nx\n```", "language 'pyhton' is not one of"),
        ("```python skip\nx\n```", "not 'skip'"),
        ("```bash no-ci:\nx\n```", "not 'no-ci:'"),
        ("    indented", "use a fence"),
    ],
)
def test_faulty_info_strings(page: str, fault: str) -> None:
    (block,) = parse(page, "page.md")
    assert fault in str(block.fault)
    assert not block.runs


def test_broken_links_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One *more* Thing!\n[a](page.md) [b](absent.md) [c](#one-more-thing) [d](#no) <https://x.y>\n")
    assert list(broken_links(page.read_text(), page)) == ["absent.md", "#no"]
