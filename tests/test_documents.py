"""What the documents promise: the README's example runs, and links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NAMES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")
FOLDERS = ("csrc", "examples")
DOCUMENTS = [
    *(ROOT / name for name in NAMES),
    *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md")),
]


def test_example_of_the_readme() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(example, names)
    assert names["out"].shape == names["q"].shape
    assert names["softmax_lse"].isfinite().all()


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links(document: Path) -> None:
    links = re.findall(r"\]\(([^)#:]+)\)", document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []
