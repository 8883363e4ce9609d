"""Files on disks of all kinds: what is flushed, named, read and left behind."""

import errno
import os

import pytest

from jaxrl_mini.machine import files


def refuse(code):
    def refusing(*_, **__):
        raise OSError(code, os.strerror(code))

    return refusing


def test_a_folder_that_cannot_be_flushed_will_do_and_a_file_will_not(tmp_path, monkeypatch):
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    files.flush(tmp_path)
    with pytest.raises(OSError, match="Invalid argument"):
        files.flush(file)
    monkeypatch.setattr(os, "fsync", refuse(errno.ENOSPC))
    with pytest.raises(OSError, match="No space left"):
        files.flush(tmp_path)


def test_what_is_locked_is_made_but_not_through_a_link(tmp_path):
    (tmp_path / "link").symlink_to("elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        files.open_to_lock(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
    files.open_to_lock(tmp_path / "new").close()
    assert (tmp_path / "new").exists()


@pytest.mark.parametrize("links", [True, False], ids=["with hard links", "without"])
def test_a_name_that_something_has_is_not_given_again(tmp_path, monkeypatch, links):
    if not links:
        monkeypatch.setattr(os, "link", refuse(errno.EPERM))
    part, other, path = (tmp_path / name for name in ("part", "other", "path"))
    part.write_text("one")
    other.write_text("two")
    assert files.link_new(part, path) and path.read_text() == "one"
    assert not files.link_new(other, path) and path.read_text() == "one" and other.read_text() == "two"


def test_a_file_may_be_as_large_as_its_limit(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    assert files.read(tmp_path / "file", 3) == b"123"
    with pytest.raises(OSError, match="larger than 2 bytes"):
        files.read(tmp_path / "file", 2)


def test_folders_made_for_an_output_go_where_nothing_was_written(tmp_path):
    with files.Output(tmp_path / "a/b/c/r.json"):
        assert (tmp_path / "a/b/c").is_dir()
    assert list(tmp_path.iterdir()) == []
