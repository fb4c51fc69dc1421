"""Files of weights: any safetensors reader takes them, damage is named, what is old goes, what is needed stays."""

import os
import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from headrace.delivery.plan import PackingPlan, make_plan, plan_weights
from headrace.delivery.transports.file import FileSender, FileSource, layout_of
from headrace.delivery.transports.storage import sweep_storage
from headrace.errors import DeliveryError


def weights_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "b": torch.randn(5, 3, generator=generator).to(torch.bfloat16),
        "a.weight": torch.randn(7, generator=generator),
        "flag": torch.tensor([True, False, True]),
        "steps": torch.tensor(seed),
        "nothing": torch.empty(0, 4),
    }


def written(sender: FileSender, version: int) -> tuple[Path, PackingPlan]:
    weights = weights_of(version)
    plan = make_plan((n, str(w.dtype).removeprefix("torch."), w.shape) for n, w in weights.items())
    location = sender.write(version, plan, weights)
    sender.finish(location)
    return Path(location), plan


@pytest.fixture
def sender(tmp_path: Path):
    made = FileSender(tmp_path / "weights")
    yield made
    made.close()


def test_the_library_reads_what_we_write(sender: FileSender):
    path, _ = written(sender, 3)
    found = load_file(path)
    assert found.keys() == weights_of(3).keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in weights_of(3).items())
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "headrace_version": "3"}


def test_a_file_that_is_not_ours_is_refused(sender: FileSender, tmp_path: Path):
    _, plan = written(sender, 1)
    save_file(weights_of(1), tmp_path / "foreign.safetensors")
    with pytest.raises(DeliveryError, match="was not published by a run"):
        FileSource().open(str(tmp_path / "foreign.safetensors"), 1, plan.entries)


shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=9), st.tuples(st.sampled_from(["float64", "bool", "bfloat16"]), shapes)
)


@given(tensors.filter(lambda found: any(0 not in shape for _, shape in found.values())))
def test_every_tensor_is_aligned_and_none_overlaps(found):
    plan = make_plan((name, dtype, shape) for name, (dtype, shape) in found.items())
    layout = layout_of(1, plan.entries)
    widths = {"float64": 8, "bool": 1, "bfloat16": 2}
    end = len(layout.header)
    assert int.from_bytes(layout.header[:8], "little") == end - 8
    for entry in layout.entries:
        assert entry.offset == end
        assert entry.offset % widths[entry.dtype] == 0
        end += entry.nbytes
    assert layout.nbytes == end


def test_damage_is_named(sender: FileSender):
    path, plan = written(sender, 1)
    good = path.read_bytes()
    source = FileSource()

    def refused(content: bytes) -> str:
        path.write_bytes(content)
        with pytest.raises(DeliveryError) as caught:
            source.open(str(path), 1, plan.entries)
        with pytest.raises(DeliveryError):
            source.verify(str(path), 1)
        return str(caught.value)

    assert f"has {len(good) - 1} bytes, not {len(good)}" in refused(good[:-1])
    assert f"has {len(good) + 1} bytes, not {len(good)}" in refused(good + b"x")
    assert "truncated in its header" in refused(good[:100])
    assert "not a safetensors file" in refused(b"")
    assert "not a safetensors file" in refused(b"\xff" * 200)
    assert "damaged header" in refused(good[:8] + b"[" + good[9:])
    other = layout_of(2, plan.entries)
    assert "holds version 2, not 1" in refused(other.header + good[len(other.header) :])
    shapes = good.replace(b'"shape":[7]', b'"shape":[6]')
    assert "in another layout" in refused(shapes)
    path.write_bytes(good)
    assert torch.equal(source.open(str(path), 1, plan.entries)["b"], weights_of(1)["b"])
    source.verify(str(path), 1)


def test_a_file_that_is_replaced_or_removed_while_it_is_read(sender: FileSender):
    path, plan = written(sender, 1)
    source = FileSource()
    found = source.open(str(path), 1, plan.entries)
    path.with_suffix(".new").write_bytes(path.read_bytes())
    path.with_suffix(".new").rename(path)
    with pytest.raises(DeliveryError, match="was changed while it was read"):
        source.verify(str(path), 1)
    source.open(str(path), 1, plan.entries)
    os.truncate(path, 0)
    assert torch.equal(found["a.weight"], weights_of(1)["a.weight"])
    path.unlink()
    with pytest.raises(DeliveryError, match="removed while it was read"):
        source.verify(str(path), 1)
    with pytest.raises(DeliveryError, match="cannot be read: No such file"):
        source.open(str(path), 1, plan.entries)


def test_the_newest_files_stay_and_so_does_what_is_not_acknowledged(tmp_path: Path):
    sender = FileSender(tmp_path / "weights", keep=2)
    held, _ = written(sender, 1)
    for version in range(2, 7):
        path, _ = written(sender, version)
        sender.release(str(path))
    names = sorted(path.name for path in (tmp_path / "weights").glob("*.safetensors"))
    assert names == ["version-00000001.safetensors", "version-00000005.safetensors", "version-00000006.safetensors"]
    sender.release(str(held))
    assert not held.exists()
    sender.close()
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_there_before_it_is_whole(sender: FileSender, tmp_path: Path):
    weights = weights_of(1)
    plan = plan_weights(weights, "float32")
    location = sender.write(1, plan, weights)
    assert not Path(location).exists()
    with pytest.raises(DeliveryError, match="holds nothing"):
        sender.snapshot(location, plan)
    for tensor in weights.values():
        tensor.zero_()
    sender.finish(location)
    assert torch.equal(sender.snapshot(location, plan)["a.weight"], weights_of(1)["a.weight"])
    assert not list(tmp_path.rglob("*.partial"))


def test_a_directory_that_cannot_be_written_is_one_line(sender: FileSender, tmp_path: Path):
    weights = weights_of(1)
    location = sender.write(1, plan_weights(weights, "float32"), weights)
    partial = Path(location + ".partial")
    partial.mkdir()
    with pytest.raises(DeliveryError, match=r"version-00000001\.safetensors cannot be written: Is a directory"):
        sender.finish(location)
    partial.rmdir()
    (tmp_path / "file").write_text("")
    with pytest.raises(DeliveryError, match=r"cannot be published in .*: File exists"):
        FileSender(tmp_path / "file")


def test_one_writer_and_a_sweep_that_spares_it_and_strangers(sender: FileSender, tmp_path: Path):
    directory = tmp_path / "weights"
    path, _ = written(sender, 1)
    with pytest.raises(DeliveryError, match="another trainer publishes weights in"):
        FileSender(directory)
    assert not sweep_storage(directory, "")
    assert path.exists()
    (directory / "notes.txt").write_text("mine")
    sender.close()
    assert [path.name for path in directory.iterdir()] == ["notes.txt"]
    assert not sweep_storage(directory, "")
    assert not sweep_storage(tmp_path / "nowhere", "")


def test_the_lock_is_private(sender: FileSender, tmp_path: Path):
    assert stat.S_IMODE((tmp_path / "weights" / "writer.lock").stat().st_mode) == 0o600
