"""README.md as a program: its Python runs, its commands exist.

Python blocks run in order, as one program, at the repository root. A block that cannot run on any
machine (it needs a GPU, or a checkpoint of many GB) has the HTML comment `<!-- not run: reason -->`
on the line above its fence; it must still compile. Of shell commands the tests check that targets,
files, extras, modules, sub-commands and options exist, without running them.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Commands that belong to the reader's machine and not to this project.
OUTSIDE = {"cd", "git", "source", "export", "curl", "ls", "mkdir"}
SHELLS = ("bash", "sh", "shell", "console")


class Block(NamedTuple):
    """One fenced block of README.md."""

    language: str
    text: str
    line: int
    is_run: bool


def read_blocks(text: str) -> list[Block]:
    """All fenced blocks, in order."""
    pattern = re.compile(
        r"^(?P<mark><!-- not run: [^\n]+ -->\n\s*)?(?P<indent>[ ]*)```(?P<language>\w*)[^\n]*\n"
        r"(?P<body>.*?)^[ ]*```[ ]*$",
        flags=re.MULTILINE | re.DOTALL,
    )
    return [
        Block(
            match["language"],
            textwrap.dedent(match["body"]),
            text[: match.start("body")].count("\n") + 1,
            match["mark"] is None,
        )
        for match in pattern.finditer(text)
    ]


README = ROOT / "README.md"
BLOCKS = read_blocks(README.read_text(encoding="utf-8")) if README.exists() else []


def read_commands(block: Block) -> list[list[str]]:
    """The words of each command of a shell block, prompts, comments and assignments removed."""
    commands = []
    for line in block.text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if block.language == "console":
            if not line.startswith("$ "):
                continue  # output
            line = line[2:]
        for part in re.split(r"&&|\|\||[;|]", line):
            words = shlex.split(part, comments=True)
            while words and re.fullmatch(r"\w+=.*", words[0]):
                words.pop(0)
            if words:
                commands.append(words)
    return commands


COMMANDS = [
    pytest.param(words, id=f"line{block.line}-{' '.join(words)}")
    for block in BLOCKS
    if block.language in SHELLS
    for words in read_commands(block)
]


@functools.cache
def help_of(command: str, sub_command: str | None = None) -> str:
    """What `command [sub_command] --help` prints."""
    module, function = PROJECT["scripts"][command].split(":")
    arguments = [command, *([sub_command] if sub_command else []), "--help"]
    code = f"import sys; sys.argv = {arguments!r}; from {module} import {function} as m; m()"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{shlex.join(arguments)} failed:\n{done.stderr}"
    return done.stdout


def check_options(words: list[str], text: str) -> None:
    for word in words:
        if word.startswith("--"):
            option = word.split("=")[0]
            assert re.search(rf"{re.escape(option)}(?![\w-])", text), f"no option {option}"


def check_make(words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for word in words[1:]:
        if "=" not in word and not word.startswith("-"):
            assert re.search(rf"^{re.escape(word)}:", makefile, flags=re.MULTILINE), word


def check_pip(words: list[str]) -> None:
    assert words[1] == "install"
    for group in re.findall(r"\[([\w,-]+)\]", " ".join(words)):
        known = {*PROJECT["optional-dependencies"], "cuda12", "cuda13"}
        assert set(group.split(",")) <= known, f"no extra {group}"


def check_python(words: list[str]) -> None:
    if words[1] == "-m" and words[2] == "pip":
        check_pip(words[2:])
    elif words[1] == "-m" and words[2] == "venv":
        pass
    elif words[1] == "-m":
        assert importlib.util.find_spec(words[2]) is not None, f"no module {words[2]}"
        if words[2] == "convert":
            check_options(words[3:], help_of("herald-convert"))
    elif words[1] == "-c":
        compile(words[2], "README.md", "exec")
    else:
        assert (ROOT / words[1]).is_file(), f"no file {words[1]}"
        source = (ROOT / words[1]).read_text(encoding="utf-8")
        check_options(words[2:], source)


def check_project_command(words: list[str]) -> None:
    command, arguments = words[0], words[1:]
    sub_command = arguments[0] if arguments and not arguments[0].startswith("-") else None
    if command == "herald" and sub_command is not None:
        assert re.search(rf"\b{re.escape(sub_command)}\b", help_of(command)), sub_command
        check_options(arguments, help_of(command, sub_command))
    else:
        check_options(arguments, help_of(command))


def test_readme_has_examples():
    assert README.exists()
    assert any(block.language == "python" and block.is_run for block in BLOCKS)
    assert any(words.values[0][:2] == ["make", "test"] for words in COMMANDS)


def test_every_fence_is_read():
    """An odd number of fences would swallow text; an unknown language would skip a check."""
    fences = re.findall(r"^ *```", README.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert len(fences) == 2 * len(BLOCKS)
    known = {"python", "text", "json", "toml", "mermaid", "bibtex", *SHELLS}
    assert {block.language for block in BLOCKS} <= known


def test_python_blocks_run(run_python):
    blocks = [block for block in BLOCKS if block.language == "python"]
    for block in blocks:
        compile(block.text, f"README.md:{block.line}", "exec")
    printed = run_python("\n".join(block.text for block in blocks if block.is_run), timeout=600)
    assert printed.count("50713") >= 1, printed  # the first answer that a reader sees is right


@pytest.mark.parametrize("words", COMMANDS)
def test_command_exists(words):
    command = Path(words[0]).name
    if command == "make":
        check_make(words)
    elif command in ("pip", "uv"):
        check_pip(words[1:] if command == "uv" else words)
    elif re.fullmatch(r"python[\d.]*", command):
        check_python(words)
    elif command in PROJECT["scripts"]:
        check_project_command([command, *words[1:]])
    elif words[0].startswith(".") or "/" in words[0]:
        assert (ROOT / words[0]).exists(), f"no file {words[0]}"
    else:
        assert command in OUTSIDE, f"unknown command {command}"


def test_files_that_the_text_links_to_exist():
    text = re.sub(r"```.*?```", "", README.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"\w+:", target):
            assert (ROOT / target).exists(), f"no file {target}"
