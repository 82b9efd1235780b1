"""Files and directories that appear whole or not at all. They are never written through a link that somebody left in
their place."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields the name of a file that the block makes (mode "x"). The file replaces `path` when the block ends without
    an error, and is removed otherwise.

    Raises ValueError, naming `path`, if it lies in no folder, if the disk is full or the folder takes no file.
    """
    _check_parent(path)
    partial = partial_of(path)
    with _explained(path):
        partial.unlink(missing_ok=True)  # a run that was killed may have left one
        try:
            yield partial
            os.replace(partial, path)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise


@contextlib.contextmanager
def atomic_directory(out: Path) -> Iterator[Path]:
    """Yields a folder next to `out` to write into. The folder becomes `out` when the block ends without an error, and
    is removed otherwise.

    If the process is killed, the folder stays as `.NAME.partial`, and the next run empties and uses it. Raises
    ValueError if `out` exists already or its parent does not, if another process is writing it, or if the disk is full.
    """
    if out.exists() or out.is_symlink():
        raise ValueError(f"{out}: exists already; choose another name for the output, or remove it first")
    _check_parent(out)
    partial = partial_of(out.absolute())
    with _explained(out):
        folder = _own_folder(partial)
        try:
            if not _locked(folder, partial):
                raise ValueError(f"{out}: another process is writing it; wait for it, or choose another name")
            try:
                _empty(folder)
                yield partial
                os.rename(partial, out.absolute())
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
        finally:
            os.close(folder)


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial")


def check_writable(path: Path) -> None:
    """Raises OSError if `atomic_file` could not make its file. It tries: permissions mislead for root and in /proc."""
    partial = partial_of(path)
    partial.unlink(missing_ok=True)
    partial.open("xb").close()
    partial.unlink()


def _check_parent(path: Path) -> None:
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{path}: lies in no folder that exists; make {path.absolute().parent} first")


def _own_folder(partial: Path) -> int:
    """Opens the folder `partial`, and makes it first if it is missing; raises ValueError for a link or a folder that
    another user owns."""
    with contextlib.suppress(FileExistsError):
        partial.mkdir()
    in_the_way = f"{partial}: is in the way and not a folder of yours; remove it, or choose another name for the output"
    try:
        folder = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as error:
        raise ValueError(in_the_way) from error
    if os.fstat(folder).st_uid != os.geteuid():
        os.close(folder)
        raise ValueError(in_the_way)
    return folder


def _locked(folder: int, partial: Path) -> bool:
    """Whether this process has the lock on the folder, and `partial` still names it: another process may just have
    finished and renamed it."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(folder), os.lstat(partial))
    except OSError:
        return False


def _empty(folder: int) -> None:
    with os.scandir(folder) as left:
        for entry in left:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.name, dir_fd=folder)
            else:
                os.unlink(entry.name, dir_fd=folder)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turns an error of the system, such as a full disk, into a sentence. torch.save hides it as the cause of its own
    error."""
    try:
        yield
    except Exception as error:
        cause = error
        while cause is not None and not isinstance(cause, OSError):
            cause = None if isinstance(cause, ValueError) else cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise ValueError(
            f"{path}: cannot be written ({cause.strerror or cause}), and nothing of it is kept; make room on the disk, "
            "or choose another place"
        ) from error
