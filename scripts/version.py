"""Writes a release's version into pyproject.toml and CHANGELOG.md, for scripts/release.

    python3 scripts/version.py VERSION DATE      in the root of the repository

Runs before anything is installed, so it uses only the standard library. Commits and builds nothing.
"""

import re
import sys
from pathlib import Path

FORM = re.compile(r"\d+\.\d+\.\d+(?:rc\d+)?")
VERSION_LINE = re.compile(r'^version = ".*"$', re.MULTILINE)  # the only one, of [project]
UNRELEASED = "## [Unreleased]"


class Refused(Exception):
    """The message says why this version cannot be released."""


def main(version: str, date: str) -> None:
    """Changes both files, or neither: raises Refused before it writes."""
    if not FORM.fullmatch(version):
        raise Refused(f"{version} is not a version such as 0.2.0 or 0.2.0rc1")
    project, changelog = Path("pyproject.toml"), Path("CHANGELOG.md")
    new_project = with_version(project.read_text(encoding="utf-8"), version)
    new_changelog = with_release(changelog.read_text(encoding="utf-8"), version, date)
    project.write_text(new_project, encoding="utf-8")
    changelog.write_text(new_changelog, encoding="utf-8")


def with_version(project: str, version: str) -> str:
    """The text of pyproject.toml with another version."""
    text, num_lines = VERSION_LINE.subn(f'version = "{version}"', project)
    if num_lines != 1:
        raise Refused(f"pyproject.toml has {num_lines} lines `version = …`, not one")
    return text


def with_release(changelog: str, version: str, date: str) -> str:
    """The text of CHANGELOG.md with the unreleased changes under a version, and none unreleased."""
    if f"## [{version}]" in changelog:
        raise Refused(f"CHANGELOG.md has a part for {version} already")
    before, heading, after = changelog.partition(f"{UNRELEASED}\n")
    if not heading:
        raise Refused(f"CHANGELOG.md has no part {UNRELEASED}")
    changes = after.partition("\n## [")[0]
    if not changes.strip():
        raise Refused("CHANGELOG.md names no unreleased change")
    return f"{before}{heading}\n## [{version}] - {date}\n{after}"


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except Refused as reason:
        sys.exit(f"scripts/release: {reason}")
