"""A target is there as a whole or not at all."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest

from convert import ConversionError, convert_checkpoint
from herald_jax.checkpoint import CheckpointError, CheckpointWriter, load_config, load_params


def convert(source, target, **options):
    return convert_checkpoint(source, target, progress=False, **options)


def snapshot(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def fail_after(monkeypatch, count, error):
    """Makes the writer fail at the given tensor."""
    original, calls = CheckpointWriter.write, iter(range(10**6))

    def write(self, path, array):
        if next(calls) == count:
            raise error
        original(self, path, array)

    monkeypatch.setattr(CheckpointWriter, "write", write)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("count", [0, 7])
def test_failure_leaves_nothing(make_source, tmp_path, monkeypatch, error, count):
    source = make_source().write()
    fail_after(monkeypatch, count, error)
    with pytest.raises(type(error)):
        convert(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_failure_keeps_the_old_target(make_source, tmp_path, monkeypatch):
    """With force the old checkpoint goes only once the new one is complete."""
    source = make_source().write()
    convert(source, tmp_path / "dst")
    before = snapshot(tmp_path / "dst")
    fail_after(monkeypatch, 7, OSError("gone"))
    with pytest.raises(OSError, match="gone"):
        convert(source, tmp_path / "dst", force=True)
    assert snapshot(tmp_path / "dst") == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_failing_rename_brings_the_old_target_back(make_source, tmp_path, monkeypatch):
    source = make_source().write()
    convert(source, tmp_path / "dst")
    before = snapshot(tmp_path / "dst")
    original, calls = os.replace, iter(range(10**6))

    def replace(src, dst):
        if str(dst) == str(tmp_path / "dst") and next(calls) == 0:
            raise OSError("no rename")
        original(src, dst)

    monkeypatch.setattr("herald_jax.checkpoint.writer.os.replace", replace)
    with pytest.raises(OSError, match="no rename"):
        convert(source, tmp_path / "dst", force=True)
    assert snapshot(tmp_path / "dst") == before


def test_existing_target_needs_force(make_source, tmp_path):
    """Kind of fault: a second save silently replaces or mixes with the first."""
    first = make_source(name="first", dtype=np.float32)
    second = make_source(name="second", dtype=np.float32)
    second.tensors = {key: value + 1 for key, value in second.tensors.items()}
    convert(first.write(), tmp_path / "dst", dtype="float32")
    with pytest.raises(ConversionError, match="--force"):
        convert(second.write(), tmp_path / "dst")
    gain = np.asarray(load_params(tmp_path / "dst")["norm"]["scale"])
    np.testing.assert_array_equal(gain, first.tensors["model.norm.weight"])
    convert(second.folder, tmp_path / "dst", dtype="float32", force=True)
    gain = np.asarray(load_params(tmp_path / "dst")["norm"]["scale"])
    np.testing.assert_array_equal(gain, second.tensors["model.norm.weight"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "first", "second"]


def test_force_removes_only_checkpoints(make_source, tmp_path):
    source = make_source().write()
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "thesis.tex").write_text("years")
    for force in (False, True):
        with pytest.raises(ConversionError, match="no herald_jax checkpoint"):
            convert(source, tmp_path / "dst", force=force)
    assert (tmp_path / "dst" / "thesis.tex").read_text() == "years"


@pytest.mark.parametrize("force", [False, True])
def test_target_that_appears_during_the_write(make_source, tmp_path, monkeypatch, force):
    """What was not there at the start is not removed at the end."""
    source = make_source().write()
    original = CheckpointWriter.seal

    def seal(self):
        (tmp_path / "dst").mkdir()
        (tmp_path / "dst" / "precious.txt").write_text("years")
        return original(self)

    monkeypatch.setattr(CheckpointWriter, "seal", seal)
    with pytest.raises(ConversionError, match="not replaced") as caught:
        convert(source, tmp_path / "dst", force=force)
    assert isinstance(caught.value.__cause__, CheckpointError)
    assert snapshot(tmp_path / "dst") == {"precious.txt": b"years"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


@pytest.mark.parametrize("is_folder", [True, False])
def test_target_that_appears_at_the_last_moment(make_source, tmp_path, monkeypatch, is_folder):
    """After the last look at the target, the rename itself refuses to replace anything."""
    source, target = make_source().write(), tmp_path / "dst"
    original = os.replace

    def replace(src, dst):
        if str(dst) == str(target):
            if is_folder:
                target.mkdir()
            (target / "precious.txt" if is_folder else target).write_text("years")
        original(src, dst)

    monkeypatch.setattr("herald_jax.checkpoint.writer.os.replace", replace)
    with pytest.raises(ConversionError, match="not replaced"):
        convert(source, target)
    assert (target / "precious.txt" if is_folder else target).read_text() == "years"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dst", "src"]


def test_checkpoint_that_appears_during_the_write(make_source, tmp_path, monkeypatch):
    """Another conversion was faster: without force its result stays."""
    source = make_source().write()
    convert(source, tmp_path / "other")
    before = snapshot(tmp_path / "other")
    original = CheckpointWriter.seal

    def seal(self):
        (tmp_path / "other").rename(tmp_path / "dst")
        return original(self)

    monkeypatch.setattr(CheckpointWriter, "seal", seal)
    with pytest.raises(ConversionError, match="already holds a checkpoint"):
        convert(source, tmp_path / "dst")
    assert snapshot(tmp_path / "dst") == before


@pytest.mark.parametrize("where", ["file/dst", "file/deep/dst"])
def test_target_below_a_file(make_source, tmp_path, where):
    source = make_source().write()
    (tmp_path / "file").write_text("years")
    with pytest.raises(ConversionError, match="file is not a folder") as caught:
        convert(source, tmp_path / where)
    assert caught.value.faults[0].where == str(tmp_path / where)


def test_empty_folder_is_a_free_target(make_source, tmp_path):
    (tmp_path / "dst").mkdir()
    convert(make_source().write(), tmp_path / "dst")
    assert load_config(tmp_path / "dst").num_layers == 2


@pytest.mark.parametrize("where", ["src", "src/out", "."])
def test_target_apart_from_source(make_source, tmp_path, where):
    source = make_source().write()
    before = snapshot(source)
    with pytest.raises(ConversionError, match="source folder"):
        convert(source, tmp_path / where, force=True)
    assert snapshot(source) == before


KILLED = """
import sys, time
import convert.convert as module
original, calls = module.CheckpointWriter.write, iter(range(10**6))
def write(self, path, array):
    if next(calls) == 7:
        self._seal_pack()
        print("half", flush=True)
        time.sleep(60)
    original(self, path, array)
module.CheckpointWriter.write = write
from convert.__main__ import main
sys.exit(main([*sys.argv[1:], "--quiet"]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_between_files(make_source, tmp_path, number):
    """A killed conversion leaves no target, and what it leaves is refused by name.

    Kind of fault: an interrupted save leaves a checkpoint that is restored later.
    """
    source, target = make_source().write(), tmp_path / "dst"
    command = [sys.executable, "-c", KILLED, str(source), str(target)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "half\n"
        process.send_signal(number)
        process.wait(30)
    finally:
        process.kill()
        if process.stdout is not None:
            process.stdout.close()
        process.wait()
    assert not target.exists()
    left = [path for path in tmp_path.iterdir() if path != source]
    if number == signal.SIGTERM:
        assert not left
        return
    assert len(left) == 1 and left[0].name.startswith("dst.incomplete-")
    with pytest.raises(CheckpointError, match="interrupted"):
        load_params(left[0])
    with pytest.raises(CheckpointError, match="interrupted"):
        load_config(left[0])
    report = convert(source, target)  # the leftover is in nobody's way, and is mentioned
    assert any(left[0].name in remark for remark in report.remarks)
    assert load_config(target).num_layers == 2


@pytest.mark.parametrize("lost", ["pack", "index", "config", "byte"])
def test_copy_cut_short_is_refused(make_source, tmp_path, lost):
    """Kind of fault: a partial copy is restored as if it were whole."""
    target = tmp_path / "dst"
    convert(make_source().write(), target)
    if lost == "index":
        (target / "params" / "index.json").unlink()
    elif lost == "config":
        (target / "config.json").unlink()
    else:
        files = [path for path in (target / "params" / "0000").rglob("*") if path.is_file()]
        largest = max(files, key=lambda path: path.stat().st_size)
        if lost == "byte":
            largest.write_bytes(largest.read_bytes()[:-1])
        else:
            largest.unlink()
    with pytest.raises(CheckpointError, match="incomplete"):
        load_params(target)


def test_file_that_shrinks_while_it_is_read(make_source, tmp_path, monkeypatch):
    import convert.convert as module

    source = make_source().write()
    original = module.CheckpointWriter.__enter__

    def enter(self):
        path = source / "model.safetensors"
        os.truncate(path, path.stat().st_size - 1000)
        return original(self)

    monkeypatch.setattr(module.CheckpointWriter, "__enter__", enter)
    with pytest.raises(OSError, match="became shorter"):
        convert(source, tmp_path / "dst")
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_permissions_are_the_usual_ones(make_source, tmp_path):
    convert(make_source().write(), tmp_path / "dst")
    (tmp_path / "usual").mkdir()
    assert (tmp_path / "dst").stat().st_mode == (tmp_path / "usual").stat().st_mode
