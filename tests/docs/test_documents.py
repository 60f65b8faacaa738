"""What the documents say holds: their Python runs, their links lead somewhere, and no option or command is missing or invented."""

import re
from pathlib import Path

import pytest
from dsi.ir.options import Options

ROOT = Path(__file__).resolve().parent.parent.parent
DOCUMENTS = sorted(p.relative_to(ROOT).as_posix() for p in [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("bench/*.md")])
PYTHON = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(document: str) -> list[tuple[int, str]]:
    """The document's Python blocks with the number of their first lines."""
    text = (ROOT / document).read_text()
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in PYTHON.finditer(text)]


@pytest.mark.parametrize("document", [d for d in DOCUMENTS if blocks(d)])
def test_python_of_a_document_runs(document, tmp_path, monkeypatch):
    """A document's blocks run in order, in one namespace, as a reader would type them."""
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {"__name__": "document"}
    for line, code in blocks(document):
        exec(compile("\n" * line + code, ROOT / document, "exec"), namespace)


def test_the_documents_for_users_have_python():
    assert {
        *("README.md", "docs/quickstart.md", "docs/how_it_works.md", "docs/rules.md"),
        *("docs/options.md", "docs/limits.md", "docs/troubleshooting.md", "docs/engine.md", "docs/int8.md"),
    } <= {d for d in DOCUMENTS if blocks(d)}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_to_files(document):
    prose = re.sub(r"^```.*?^```", "", (ROOT / document).read_text(), flags=re.MULTILINE | re.DOTALL)
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", prose)
    missing = [t for t in targets if "://" not in t and not ((ROOT / document).parent / t).exists()]
    assert not missing


@pytest.mark.parametrize("document", ["README.md", "docs/options.md"])
def test_every_option_has_its_row(document):
    rows = set(re.findall(r"^\| `(\w+)` \|", (ROOT / document).read_text(), re.MULTILINE))
    assert rows & set(Options.model_fields) == rows, "a row is no option"
    if document == "docs/options.md":
        assert rows == set(Options.model_fields)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_make_commands_exist(document):
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|^)make ([a-z][a-z-]*)(?=`|\s|$)", (ROOT / document).read_text(), re.MULTILINE))
    assert named <= targets
