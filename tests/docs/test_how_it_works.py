"""docs/how_it_works.md shows a real dump: its excerpts are lines of the files that its own code writes."""

import re
from pathlib import Path

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "how_it_works.md"


def test_excerpts_are_in_the_dump(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = DOCUMENT.read_text()
    code = re.search(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    exec(compile("\n" * text[: code.start(1)].count("\n") + code.group(1), DOCUMENT, "exec"), {"__name__": "document"})
    dumped = [re.sub(r"\s+", " ", line) for file in sorted(Path("out").rglob("*.*")) for line in file.read_text().splitlines()]
    excerpts = [
        line for block in re.findall(r"^```(?:text|diff)\n(.*?)^```", text, re.MULTILINE | re.DOTALL) for line in block.splitlines()
    ]
    assert len(excerpts) > 25
    for line in excerpts:
        assert any(found.startswith(re.sub(r"\s+", " ", line)) for found in dumped), line
