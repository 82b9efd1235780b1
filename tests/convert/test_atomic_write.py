"""Outputs appear whole or not at all, on a full disk and where a link has the name of the output."""

import resource
from contextlib import contextmanager

import pytest
import torch
from attnpack.atomic_write import atomic_directory, atomic_file, check_writable
from attnpack.checkpoints.writer import SafetensorsWriter, write_json
from attnpack.convert.uptrain import command as uptrain
from attnpack.tools import plot
from processes import run_python
from uptrain_cases import arguments, convert_tiny

TARGET = "what somebody else wrote"


@pytest.fixture
def theirs(tmp_path):
    """A folder with a file that no output may touch."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "file").write_text(TARGET)
    yield folder
    assert [path.name for path in folder.iterdir()] == ["file"] and (folder / "file").read_text() == TARGET


def test_a_link_in_the_place_of_a_partial_directory_is_refused(theirs, tmp_path):
    (tmp_path / ".out.partial").symlink_to(theirs)
    with pytest.raises(ValueError, match=r"\.out\.partial: is in the way and not a folder of yours"):
        with atomic_directory(tmp_path / "out"):
            pytest.fail("it wrote")
    assert not (tmp_path / "out").exists() and not (tmp_path / "out").is_symlink()


def test_a_file_in_the_place_of_a_partial_directory_is_refused(tmp_path):
    (tmp_path / ".out.partial").touch()
    with pytest.raises(ValueError, match="is in the way"), atomic_directory(tmp_path / "out"):
        pytest.fail("it wrote")


def test_what_a_killed_run_left_goes_and_what_its_links_name_stays(theirs, tmp_path):
    partial = tmp_path / ".out.partial"
    (partial / "folder").mkdir(parents=True)
    (partial / "folder" / "link").symlink_to(theirs)
    (partial / "link").symlink_to(theirs)
    (partial / "file").touch()
    with atomic_directory(tmp_path / "out") as folder:
        (folder / "new").touch()
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["new"] and not partial.exists()


def test_what_another_run_has_just_finished_stays(tmp_path, monkeypatch):
    """Another run renames the folder after this run has opened it, and before this run locks it."""

    def finish(folder, how):
        (tmp_path / ".out.partial" / "file").touch()
        (tmp_path / ".out.partial").rename(tmp_path / "out")

    monkeypatch.setattr("attnpack.atomic_write.fcntl.flock", finish)
    with pytest.raises(ValueError, match="out: another process is writing it"), atomic_directory(tmp_path / "out"):
        pytest.fail("it wrote")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["file"]


def test_a_failed_directory_leaves_nothing(tmp_path):
    with pytest.raises(KeyError), atomic_directory(tmp_path / "out") as folder:
        (folder / "new").touch()
        raise KeyError
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["out.pt", ".out.pt.partial"])
def test_a_link_in_the_place_of_a_file_is_replaced(name, theirs, tmp_path):
    (tmp_path / name).symlink_to(theirs / "file")
    with atomic_file(tmp_path / "out.pt") as partial, partial.open("x") as file:
        file.write("ours")
    assert (tmp_path / "out.pt").read_text() == "ours" and not (tmp_path / "out.pt").is_symlink()
    assert not (tmp_path / ".out.pt.partial").is_symlink()


@pytest.mark.parametrize("write", [
    lambda path: SafetensorsWriter(path, {}), lambda path: write_json(path, {}),
])  # fmt: skip
def test_a_checkpoints_files_are_new_ones(write, theirs, tmp_path):
    (tmp_path / "link").symlink_to(theirs / "file")
    with pytest.raises(FileExistsError):
        write(tmp_path / "link")


@pytest.mark.parametrize("name", ["memory.png", ".memory.png.partial"])
def test_a_picture_replaces_a_link(name, theirs, tmp_path):
    (tmp_path / name).symlink_to(theirs / "file")
    plot.plot_kv_memory(tmp_path / "memory.png", contexts=[1024, 2048])
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG") and not (tmp_path / "memory.png").is_symlink()


def test_a_link_to_nothing_stays_one_while_a_picture_is_checked(tmp_path):
    (tmp_path / "memory.png").symlink_to(tmp_path / "nothing")
    plot.check_picture(tmp_path / "memory.png")
    assert [path.name for path in tmp_path.iterdir()] == ["memory.png"]
    with pytest.raises(OSError):
        check_writable(tmp_path / "no folder" / "memory.png")


class Trained:
    """The part of a training that `uptrain._save_state` needs."""

    def state(self):
        return {"weights": torch.zeros(100_000)}


def test_a_state_of_training_replaces_links(theirs, tmp_path):
    (tmp_path / f".{uptrain.STATE}.partial").symlink_to(theirs / "file")
    uptrain._save_state(Trained(), tmp_path / uptrain.STATE, {}, {})
    assert torch.load(tmp_path / uptrain.STATE)["work"]["weights"].shape == (100_000,)


@contextmanager
def full_disk():
    """Files of more than 20,000 bytes are refused inside, as every file on a full disk; pytest writes outside of it."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(path) -> str:
    return rf"{path}: cannot be written \(File too large\), and nothing of it is kept; make room on the disk"


def test_a_full_disk_leaves_no_state_of_training(tmp_path):
    path = tmp_path / uptrain.STATE
    with full_disk(), pytest.raises(ValueError, match=full(path)):
        uptrain._save_state(Trained(), path, {}, {})
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_the_last_state_of_training(tmp_path):
    path = tmp_path / uptrain.STATE
    path.write_text("the last one")
    with full_disk(), pytest.raises(ValueError, match=full(path)):
        uptrain._save_state(Trained(), path, {}, {})
    assert path.read_text() == "the last one" and len(list(tmp_path.iterdir())) == 1


def test_a_full_disk_leaves_no_picture(tmp_path):
    path = tmp_path / "memory.png"
    with full_disk(), pytest.raises(ValueError, match=full(path)):
        plot.plot_kv_memory(path)
    assert not list(tmp_path.iterdir())


def test_commands_on_a_full_disk_say_one_sentence_and_leave_nothing(tmp_path):
    """Runs in its own process: the limit is on the size of files, and pytest writes files too."""
    converted = convert_tiny(tmp_path)

    def there():
        return {path: path.is_file() and path.stat().st_mtime_ns for path in tmp_path.rglob("*")}

    before = there()
    convert = ["convert", str(tmp_path / "in"), str(tmp_path / "new"), "--kv-heads", "2", "--tokens", "0"]
    for command, name in ((convert, tmp_path / "new"), (arguments(converted), converted / uptrain.STATE)):
        # The training ends at once, and keeps its state, which is larger than the limit.
        ended = run_python(f"""
import resource, sys
from attnpack.tools import cli
from attnpack.convert.uptrain import command as uptrain
uptrain._SAVE_EVERY = 0
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, -1))
sys.exit(cli.main({command!r}))
""")
        assert ended.returncode == 2, ended.text
        assert f"attnpack {command[0]}: {name}: cannot be written (File too large)" in ended.stderr
        assert ended.stderr.count("\n") == 1 + ended.stderr.count("\r"), ended.stderr
        assert there() == before
