"""Paths and writing: every path is usable or one message, nothing half-written, nothing of the user's replaced."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cmexam_tune.core import files
from cmexam_tune.core.errors import UserError


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    """What can lie at a path."""
    found = {name: tmp_path / name for name in ("file", "folder", "pipe", "loop", "dangling", "link", "empty")}
    found["file"].write_text("mine")
    found["folder"].mkdir()
    (found["folder"] / "letter").write_text("mine")
    os.mkfifo(found["pipe"])
    found["loop"].symlink_to(found["loop"])
    found["dangling"].symlink_to(tmp_path / "nowhere")
    found["link"].symlink_to(found["file"])
    found["empty"].touch()
    found["null"] = Path("/dev/null")
    found["below a device"] = Path("/dev/null/x")
    found["below a file"] = found["file"] / "x"
    found["below a loop"] = found["loop"] / "x"
    found["long"] = tmp_path / ("x" * 300)
    found["long folder"] = tmp_path / ("x" * 300) / "y"
    found["very long"] = tmp_path / "/".join(["x" * 200] * 30)
    found["nul"] = Path(f"{tmp_path}/a\0b")
    found["not UTF-8"] = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    return found


GOOD_INPUTS = {"file", "link"}
NO_OUTPUTS = {"file", "folder", "empty", "link"}


def test_inputs(places: dict[str, Path]) -> None:
    for name, path in places.items():
        if name in GOOD_INPUTS:
            assert files.check_input(path) == path
            continue
        with pytest.raises(UserError) as caught:
            files.check_input(path)
        assert len(str(caught.value)) < 600 and str(caught.value).encode(), name


def test_outputs(places: dict[str, Path], tmp_path: Path) -> None:
    for name, path in places.items():
        for overwrite in (False, True):
            if overwrite and name in ("file", "empty"):
                assert files.check_output(path, overwrite) == path
                continue
            with pytest.raises(UserError) as caught:
                files.check_output(path, overwrite)
            assert len(str(caught.value)) < 600 and str(caught.value).encode(), name
    with pytest.raises(UserError, match="its own input"):
        files.check_output(places["file"], True, [places["link"]])
    assert files.check_output(tmp_path / "a/b/c.json") == tmp_path / "a/b/c.json"
    assert places["file"].read_text() == "mine" and not (tmp_path / "a").exists()


def test_folders(places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, path in {**places, "working": Path(), "above": Path(".."), "root": Path("/")}.items():
        monkeypatch.chdir(places["folder"])
        with pytest.raises(UserError) as caught:
            files.check_folder(path, "export", overwrite=True)
        assert len(str(caught.value)) < 600, name
    assert (places["folder"] / "letter").read_text() == "mine"
    for text in ("first", "second"):
        with files.new_folder(tmp_path / "out", "export", overwrite=True) as folder:
            (folder / "weights").write_text(text)
    assert (tmp_path / "out" / "weights").read_text() == "second" and files.written_by(tmp_path / "out") == "export"
    for refused in (dict(program="tiny", overwrite=True), dict(program="export"),
                    dict(program="export", overwrite=True, keep=[tmp_path / "out" / "weights"])):  # fmt: skip
        with pytest.raises(UserError):
            files.check_folder(tmp_path / "out", **refused)  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError), files.new_folder(tmp_path / "out", "export", True):
        raise ZeroDivisionError
    assert (tmp_path / "out" / "weights").read_text() == "second"
    assert not list(tmp_path.glob(f"*{files.PART}"))


KILLED_IN_BETWEEN = """
import os, sys
from pathlib import Path
from cmexam_tune.core import files
rename = Path.rename
def killed(path, target):
    rename(path, target) if path == Path(sys.argv[1]) else os.kill(os.getpid(), 9)
Path.rename = killed
with files.new_folder(sys.argv[1], "tiny", overwrite=True) as folder:
    (folder / "weights").write_text("second")
"""


def test_a_folder_is_there_again_when_its_replacing_was_killed(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with files.new_folder(out, "tiny") as folder:
        (folder / "weights").write_text("first")
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", KILLED_IN_BETWEEN, str(out)], env=environment, check=False)
    assert done.returncode == -9 and not out.exists()
    with pytest.raises(UserError, match="exists"), files.new_folder(out, "tiny"):
        pass
    assert (out / "weights").read_text() == "first" and [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED = """
import os, sys
from pathlib import Path
from cmexam_tune.core import files
with files.atomic_write(sys.argv[1]) as handle:
    handle.write("half")
    handle.flush()
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), 9)
    print("open", flush=True)
    sys.stdin.read()
"""


def test_what_the_killed_leave_is_swept_and_what_is_open_or_the_user_s_stays(tmp_path: Path) -> None:
    path = tmp_path / "文件.json"
    own = [
        tmp_path / f".{path.name}.part",
        tmp_path / f".{path.name}.12345678.part",
        tmp_path / f".{path.name}.x{files.PART}",
    ]
    for mine in own:
        mine.write_text("mine")
    command = [sys.executable, "-c", KILLED, str(path)]
    environment = {**os.environ, "PYTHONPATH": str(Path(files.__file__).parents[2])}
    subprocess.run([*command, "kill"], env=environment, check=False)
    assert len(list(tmp_path.iterdir())) == 4 and not path.exists()
    with subprocess.Popen([*command, "wait"], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        with files.atomic_write(path) as handle:
            handle.write("first")
        assert len(list(tmp_path.iterdir())) == 5, "the other's file is not swept"
        other.stdin.close()
    assert path.read_text() == "half" and sorted([*own, path]) == sorted(tmp_path.iterdir())
    assert all(mine.read_text() == "mine" for mine in own)


def test_long_names_can_be_written(tmp_path: Path) -> None:
    for name in ("x" * 255, "汉" * 85):
        path = files.check_output(tmp_path / name)
        with files.atomic_write(path) as handle:
            handle.write("x")
        assert path.read_text() == "x"


def test_two_at_once_write_one_folder(tmp_path: Path) -> None:
    with files.new_folder(tmp_path / "out", "tiny") as folder:
        (folder / "weights").write_text("first")
        with pytest.raises(UserError, match="another process is writing"), files.new_folder(tmp_path / "out", "tiny"):
            pass
    with pytest.raises(UserError, match="exists"), files.new_folder(tmp_path / "out", "tiny"):
        pass
    assert (tmp_path / "out" / "weights").read_text() == "first" and [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_full_disk_of_a_library_is_one_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space left") as full, files.new_folder(tmp_path / "model", "tiny"):
        raise RuntimeError("Error while serializing: I/O error: Kein Platz mehr (os error 28)")
    assert "Free some space" in str(files.explain(full.value))
    assert list(tmp_path.iterdir()) == []
