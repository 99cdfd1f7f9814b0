"""Write a checkpoint part by part, so that an interrupted run looks unfinished, loses nothing and can be resumed."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from rotaquant.errors import RotaquantError
from rotaquant.integrations.headers import read_headers

_FINGERPRINT = "run.json"


def _read_umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


_UMASK = _read_umask()  # at import: reading it means setting it, which other threads should not see


class PartialFolder:
    """The folder `OUTPUT.partial` of a run in progress; it becomes OUTPUT by one rename when all parts are there.

    Part i is one safetensors shard with a record (JSON) of what was found while it was made. A partial folder of the
    same fingerprint is taken up where it ended; one of another run is an error, never overwritten.
    """

    def __init__(self, output: Path, parts: int, fingerprint: dict[str, Any]) -> None:
        self.output = output
        self.parts = parts
        self.path = partial_path(output)
        with _telling_of_disk(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
            for unfinished in self.path.glob("*.tmp"):
                unfinished.unlink()
            marker = self.path / _FINGERPRINT
            if marker.is_file():
                if _read_record(marker) != fingerprint:
                    raise RotaquantError(
                        f"{self.path} holds an interrupted run with other settings: repeat that run's command to "
                        "finish it, or delete the folder"
                    )
            elif any(self.path.iterdir()):
                raise RotaquantError(f"{self.path} is in the way: it is needed as a working folder; move it")
            else:
                _write_atomically(marker, lambda path: path.write_text(json.dumps(fingerprint)))

    def shard(self, part: int) -> str:
        """File name of a part's shard."""
        return f"model-{part + 1:05d}-of-{self.parts:05d}.safetensors"

    def record(self, part: int) -> dict[str, Any] | None:
        """The record of a part that is complete and readable, else `None`: the part is made again."""
        record = _read_record(self._record_path(part))
        if record is None:
            return None
        try:
            read_headers([self.path / self.shard(part)])
        except RotaquantError:
            return None
        return record

    def read(self, part: int) -> dict[str, Tensor]:
        """The tensors of a complete part."""
        return load_file(self.path / self.shard(part))

    def write(self, part: int, tensors: dict[str, Tensor], record: dict[str, Any]) -> None:
        """Store one part; its record is written last and marks it complete."""
        stored = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
        with _telling_of_disk(self.path):
            _write_atomically(
                self.path / self.shard(part), lambda path: save_file(stored, path, metadata={"format": "pt"})
            )
            _write_atomically(self._record_path(part), lambda path: path.write_text(json.dumps(record)))

    def finish(self, write_rest: Callable[[Path], None]) -> None:
        """Write the index, let `write_rest` add the remaining files, and rename the folder to OUTPUT."""
        with _telling_of_disk(self.path):
            self._write_index()
            write_rest(self.path)
            if self.output.is_dir():
                self.output.rmdir()  # empty: checked before the run, and refused here if it no longer is
            os.replace(self.path, self.output)
            # After the rename: until then they are what a repeated command resumes from.
            for part in range(self.parts):
                (self.output / self._record_path(part).name).unlink()
            (self.output / _FINGERPRINT).unlink()

    def _record_path(self, part: int) -> Path:
        return self.path / f"part-{part + 1:05d}.json"

    def _write_index(self) -> None:
        weight_map: dict[str, str] = {}
        total = 0
        for part in range(self.parts):
            shard = self.path / self.shard(part)
            for name in read_headers([shard]):
                weight_map[name] = shard.name
            total += shard.stat().st_size
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        text = json.dumps(index, indent=2) + "\n"
        _write_atomically(self.path / "model.safetensors.index.json", lambda path: path.write_text(text))


def require_usable_output(output: Path) -> None:
    """Raise `RotaquantError` unless `output` is a new or empty folder in a place that can be written."""
    try:
        if output.is_file():
            raise RotaquantError(f"output {output} is a file; choose the name of a new folder")
        if output.exists() and (not output.is_dir() or any(output.iterdir())):
            raise RotaquantError(f"output {output} exists and is not empty; choose another folder or remove it")
    except OSError as error:
        raise RotaquantError(f"output {output} cannot be used: {error.strerror}; choose another folder") from error
    if output.is_symlink() or os.path.ismount(output) or (output.exists() and output.samefile(Path.cwd())):
        raise RotaquantError(
            f"output {output} is a link, a mount point or the current directory, which the finished folder cannot "
            "replace; name a new folder inside it"
        )
    parent = _nearest_existing(output)
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise RotaquantError(f"no permission to write in {parent}; choose another output folder")


def require_space(output: Path, needed: int) -> None:
    """Raise `RotaquantError` when the disk that holds `output` has less free than is still to be written, in bytes."""
    parent = _nearest_existing(output)
    partial = partial_path(output)
    written = sum(file.stat().st_size for file in partial.glob("*.safetensors")) if partial.is_dir() else 0
    missing = max(0, needed - written)
    free = shutil.disk_usage(parent).free
    if free < missing:
        raise RotaquantError(
            f"the output needs about {missing / 1e6:.1f} MB more and {parent} has {free / 1e6:.1f} MB free; "
            "free some space or choose another output folder"
        )


def partial_path(output: Path) -> Path:
    """The working folder beside `output`."""
    return output.absolute().with_name(f"{output.absolute().name}.partial")


def _nearest_existing(output: Path) -> Path:
    parent = output.absolute().parent
    while not parent.exists():
        parent = parent.parent
    return parent


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):  # not there, or cut short by a power failure
        return None
    return record if isinstance(record, dict) else None


def _write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    temporary = path.with_name(path.name + ".tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as written:
            os.fsync(written.fileno())
        # safetensors makes its files readable by their owner alone; a model is shared like any other file.
        os.chmod(temporary, 0o666 & ~_UMASK)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def _telling_of_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except PermissionError as error:
        raise RotaquantError(
            f"no permission to write {error.filename or path}; choose another output folder"
        ) from error
    except Exception as error:
        # safetensors reports a full disk in words of its own, without an errno.
        full = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        words = ("No space left", "File too large", "Disk quota exceeded")
        if getattr(error, "errno", None) in full or any(text in str(error) for text in words):
            raise RotaquantError(
                f"the disk is full, or a quota or file-size limit is reached; what is finished is kept in {path}: "
                "free some space and repeat the command to go on from there, or delete that folder"
            ) from error
        raise
