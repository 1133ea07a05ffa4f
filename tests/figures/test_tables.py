"""Tests that the documents have the tables that their result files give."""

import pytest

from experiments.tables import TABLES, _documents
from experiments.tables import __main__ as tables


def test_documents_have_the_tables_of_the_result_files(capsys):
    """If this fails, run `python -m experiments.tables`."""
    status = tables.main(tables.Config(check=True))
    assert (status, capsys.readouterr().out) == (0, "")


def test_every_table_is_in_a_document():
    paths = [tables.ROOT / "README.md", *(tables.ROOT / "docs").rglob("*.md")]
    text = "".join(path.read_text() for path in paths)
    assert [name for name in TABLES if f"<!-- table: {name} -->" not in text] == []


def test_table_with_difference_is_named_and_written(tmp_path, capsys):
    (tmp_path / "docs").mkdir()
    readme, page = tmp_path / "README.md", tmp_path / "docs/x.md"
    readme.write_text("Nothing.\n")
    page.write_text("A\n<!-- table: levels -->\n| old |\n<!-- end -->\nB\n")
    check = tables.Config(check=True, root=tmp_path)
    assert tables.main(check) == 1
    said = "docs/x.md, table levels: differs from its result file; run python -m"
    assert said in capsys.readouterr().out
    assert "| old |" in page.read_text()
    assert tables.main(tables.Config(root=tmp_path)) == tables.main(check) == 0
    table = _documents.markdown(TABLES["levels"]())
    assert page.read_text() == f"A\n<!-- table: levels -->\n{table}<!-- end -->\nB\n"
    assert readme.read_text() == "Nothing.\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- table: levels -->\n| a |\n\nB\n", "followed by a table.*1 beg.*0 of"),
        ("<!-- table: x -->\n<!-- end -->\n", "`NAME` must be one of .*: got x"),
    ],
)
def test_markers_without_end_or_known_name_are_refused(text, message):
    with pytest.raises(ValueError, match=message):
        _documents.with_tables(text)
