"""Tests that all processes must see one folder."""

import contextlib

import pytest

from pipejax.checkpoint._shared_folder import check_shared

from ..core.executors.group import Group


def test_single_process_makes_no_folder(tmp_path):
    check_shared(str(tmp_path / "missing"))
    assert not (tmp_path / "missing").exists()


@pytest.mark.full
def test_folder_of_one_host_alone_is_refused(tmp_path):
    with contextlib.closing(Group(2)) as group:
        said = group.ask("opened_apart", tmp_path)
    rule = "`folder` must be one that all processes see, got "
    assert [text.startswith(rule) for text in said] == [True, True]
