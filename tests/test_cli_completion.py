"""`gigamlp completion`, asked by a real bash."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from gigamlp.cli import main
from gigamlp.cli.app import _COMMANDS

BASH = shutil.which("bash")


def script(capsys, shell):
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_each_shell_gets_a_script_with_all_commands(capsys, shell):
    text = script(capsys, shell)
    assert all(command in text for command in _COMMANDS)


@pytest.mark.skipif(BASH is None, reason="there is no bash here")
@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (("gigamlp", "be"), {"bench"}),
        (("gigamlp", "re"), {"reproduce", "report"}),
        (("gigamlp", "bench", "--resi"), {"--residence"}),
        (("gigamlp", "train", "--dist"), set()),
    ],
)
def test_bash_completes(capsys, tmp_path, words, wanted):
    file = tmp_path / "completion.bash"
    file.write_text(script(capsys, "bash"))
    line = " ".join(words)
    code = (
        f'source "{file}"; COMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; COMP_LINE="{line}"; '
        f'_gigamlp gigamlp "{words[-1]}" "{words[-2]}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
    )
    done = subprocess.run([BASH, "--norc", "-c", code], capture_output=True, text=True, check=True, timeout=30)
    assert {word.strip() for word in done.stdout.splitlines() if word.strip()} == wanted


def test_json_and_a_shell_that_is_not_known(capsys):
    assert main(["completion", "fish", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shell"] == "fish"
    assert "gigamlp" in found["script"]
    assert main(["completion", "tcsh"]) == 2
    assert "tcsh" in capsys.readouterr().err
