"""The documentation is true: links lead somewhere, pictures are what the product draws, recipes and commands work."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from digenrl.cli.main import app

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "AGENTS.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_to_a_file(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_digenrl_command_in_the_text_exists(page: Path) -> None:
    verbs = set(re.findall(r"(?:^|`)digenrl ([a-z-]+)", page.read_text(encoding="utf-8"), flags=re.MULTILINE))
    known = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
    assert verbs <= known | {group.name for group in app.registered_groups}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_named_in_the_text_exists(page: Path) -> None:
    named = set(
        re.findall(r"`((?:digenrl|benchmarks|examples|tools|tests|recipes)/[\w./-]+\.(?:py|yaml|json))`", page.read_text())
    )
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_timelines_are_what_the_product_draws_now(tmp_path: Path) -> None:
    tool = runpy.run_path(str(ROOT / "tools" / "docs" / "draw_timelines.py"))
    tool["draw"](tmp_path)
    for name in tool["PICTURES"]:
        shipped = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
        assert (tmp_path / f"{name}.svg").read_text(encoding="utf-8") == shipped, "run: python tools/docs/draw_timelines.py"
