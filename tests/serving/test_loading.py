"""Files are whole or not there, and reading one runs nothing but operations on tensors."""

from __future__ import annotations

import errno
import io
import json
import pickle
import zipfile

import pytest
import torch
from torch._export.serde.schema import SCHEMA_VERSION

from net2gp import serving
from net2gp.errors import FileFormatError, InputError
from net2gp.serving import files
from serving.programs import fitted, table


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("programs") / "a.pt2"
    serving.export(fitted("numbers LastLayer()"), path, table()[0], novelty=False)
    return path


class Bomb:
    """What must not be unpickled."""

    def __reduce__(self):
        return (pytest.fail, ("something was unpickled",))


def changed(path, where, change):
    """A copy of the file with one of its parts changed, or added."""
    target = path.with_name("changed.pt2")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(target, "w") as new:
        names = {name.partition("/")[2]: name for name in old.namelist()}
        for inner, name in names.items():
            body = old.read(name)
            new.writestr(name, change(body) if inner == where else body)
        if where not in names:
            new.writestr(f"archive/{where}", change(b""))
    return target


def edited(key, value):
    """A change of the first value of that key, at any depth, of a JSON part."""

    def walk(content):
        if isinstance(content, dict):
            for name in content:
                if name == key:
                    content[name] = value
                    return True
                if walk(content[name]):
                    return True
        return isinstance(content, list) and any(walk(item) for item in content)

    def change(body):
        content = json.loads(body)
        assert walk(content)
        return json.dumps(content).encode()

    return change


def bomb(body):
    whole = io.BytesIO()
    torch.save({"x": Bomb()}, whole)
    return whole.getvalue()


WEIGHTS = "data/weights/model_weights_config.json"


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("data/sample_inputs/model.pt", bomb),
        ("data/weights/model.pt", bomb),
        ("data/constants/model.pt", lambda body: pickle.dumps(Bomb())),
        (WEIGHTS, edited("use_pickle", True)),
        (WEIGHTS, edited("path_name", "opaque_obj_0")),
        ("data/constants/a\nb.pt", lambda body: pickle.dumps(Bomb())),
        ("models/model.json", edited("target", "torch.load")),
        ("models/model.json", edited("target", "torch.ops.aten.from_file.default")),
        ("models/model.json", edited("target", "torch.ops.aten.save.default")),
        ("models/model.json", edited("expr_str", "1" * 60 + "!")),
        ("models/model.json", edited("target", "torch.ops.higher_order.cond")),
        ("models/model.json", edited("expr_str", "__import__('os').getpid()")),
        ("models/model.json", edited("guards_code", ["__import__('os').getpid()"])),
    ],
)
def test_a_file_that_would_run_code_is_refused(written, where, change):
    with pytest.raises(FileFormatError, match="more than operations on tensors"):
        serving.load(changed(written, where, change))


@pytest.mark.parametrize(
    ("where", "change"),
    [
        ("extra/net2gp.json", lambda body: b'{"kind": "other"}'),
        ("extra/net2gp.json", lambda body: b"{"),
        ("extra/net2gp.json", lambda body: b"[" * 100_000),
        ("extra/net2gp.json", lambda body: b'{"kind": "net2gp program"}'),
        ("extra/net2gp.json", edited("x", ["load", ["N", 4]])),
        ("models/model.json", lambda body: body[: len(body) // 2]),
    ],
)
def test_a_file_of_another_kind_is_refused(written, where, change):
    with pytest.raises(FileFormatError, match="no program of net2gp"):
        serving.load(changed(written, where, change))


def older_format(archive, target):
    """The files that torch 2.6 wrote, whose parts later versions still unpickle."""
    unpickled = ("serialized_state_dict", "serialized_constants", "serialized_example_inputs")
    target.writestr("x/extra/net2gp.json", archive.read("archive/extra/net2gp.json"))
    target.writestr("version", ".".join(map(str, SCHEMA_VERSION)))
    target.writestr("serialized_exported_program.json", archive.read("archive/models/model.json"))
    for name in unpickled:
        target.writestr(f"{name}.pt", bomb(b""))


def with_second(name):
    """Two programs, of which readers may take either."""

    def write(archive, target):
        for part in archive.namelist():
            target.writestr(part, archive.read(part))
        other = archive.read("archive/models/model.json").replace(b"ops.aten", b"ops.other")
        target.writestr(zipfile.ZipInfo(name), other)

    return write


def compressed(archive, target):
    """Parts whose size in memory has nothing to do with that of the file."""
    for part in archive.namelist():
        target.writestr(part, archive.read(part), zipfile.ZIP_DEFLATED)


@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    "write",
    [
        older_format,
        with_second("archive/models/model.JSON"),
        with_second("archive/models/model.json"),
        with_second("other/models/model.json"),
        compressed,
    ],
)
def test_an_archive_that_torch_does_not_write_is_refused(write, written, tmp_path):
    path = tmp_path / "odd.pt2"
    with zipfile.ZipFile(written) as archive, zipfile.ZipFile(path, "w") as target:
        write(archive, target)
    with pytest.raises(FileFormatError, match="no program of net2gp"):
        serving.load(path)


def test_a_program_may_have_any_name(written, tmp_path):
    path = tmp_path / "program"
    path.write_bytes(written.read_bytes())
    assert serving.load(path)(torch.zeros(2, 4))["mean"].shape == (2, 1)


def test_missing_and_corrupted_files_are_named(written, tmp_path):
    with pytest.raises(FileFormatError, match="there is no file"):
        serving.load(tmp_path / "no.pt2")
    half = tmp_path / "half.pt2"
    half.write_bytes(written.read_bytes()[:1000])
    with pytest.raises(FileFormatError, match="corrupted"):
        serving.load(half)


@pytest.mark.parametrize("stage", ["write", "replace"])
def test_a_full_disk_leaves_the_older_file_and_nothing_beside_it(stage, tmp_path, monkeypatch):
    path = tmp_path / "a.bin"
    path.write_bytes(b"older")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    if stage == "replace":
        monkeypatch.setattr(files.os, "replace", full)

    def write():
        with files.written(path) as partial:
            partial.write_bytes(b"new")
            if stage == "write":
                full()

    with pytest.raises(OSError, match="No space"):
        write()
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_points_of_another_form_are_refused(written):
    program = serving.load(written)
    assert program(torch.zeros(2, 4))["mean"].shape == (2, 1)
    for x, message in (
        (torch.zeros(2, 5), r"shape \(N, 4\), but has \(2, 5\)"),
        (torch.zeros(4), r"shape \(N, 4\)"),
        (torch.zeros(2, 4, dtype=torch.float64), "must be float32"),
        (torch.zeros(0, 4), "one point or more"),
        ({"y": torch.zeros(2, 4)}, "must have the inputs x"),
        ((torch.zeros(2, 4), torch.zeros(2, 4)), "must have the inputs x"),
    ):
        with pytest.raises(InputError, match=message):
            program(x)


def test_points_that_are_no_tensors_are_told_to_become_some(written):
    with pytest.raises(InputError, match=r"must be a tensor.*torch\.as_tensor"):
        serving.load(written)(table()[0].numpy())
