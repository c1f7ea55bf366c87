"""The mask on disk: packing against numpy, sizes, and every way in which a file can be damaged."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save as save_tensors
from torch import Tensor, nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import ArtifactError, InputError
from modelfence.files import sha256
from modelfence.masking.mask import Mask
from modelfence.masking.mask_file import BITS, RECORD, _written
from modelfence.masking.packing import pack_bits, unpack_bits
from modelfence.masking.selection import maskable
from modelfence.models.zoo import create_model

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


class Holder(nn.Module):
    """Parameters of any shapes, 0-d and empty ones included."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        for index, shape in enumerate(shapes):
            self.register_parameter(f"p{index}", nn.Parameter(torch.full(shape, 1.5)))


def tiny() -> tuple[nn.Module, Mask]:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 1, bias=False))
    for value in model.parameters():
        value.data.fill_(0.5)
    kept = {"0.weight": torch.tensor([[1, 0, 1], [1, 1, 1], [0, 0, 1]]) > 0, "1.weight": torch.ones(1, 3) > 0}
    return model, Mask.of(model, kept, {"seed": 7})


def random_bits(shape: tuple[int, ...], seed: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5


# Packing


def test_packing_by_hand():
    assert pack_bits(torch.tensor([True] + [False] * 7 + [False, True])).tolist() == [1, 2]
    assert pack_bits(torch.tensor([[True, False], [False, True]])).tolist() == [0b1001]
    assert pack_bits(torch.tensor(True)).tolist() == [1]
    assert pack_bits(torch.zeros(0, dtype=torch.bool)).tolist() == []


@settings(deadline=None)
@given(SHAPES, st.integers(0, 99))
def test_packing_equals_a_loop_over_the_elements_and_comes_back(shape, seed):
    bits = random_bits(shape, seed)
    packed = pack_bits(bits)
    expected = np.zeros(-(-bits.numel() // 8), dtype=np.uint8)
    for index, bit in enumerate(bits.flatten().tolist()):
        expected[index // 8] += int(bit) << (index % 8)
    np.testing.assert_array_equal(packed.numpy(), expected)
    back = unpack_bits(packed, shape)
    assert torch.equal(back, bits)
    assert back.is_contiguous()


def test_packing_is_in_logical_order_whatever_the_strides():
    bits = random_bits((2, 3, 5, 7), 0)
    for other in (
        bits.contiguous(memory_format=torch.channels_last),
        bits.transpose(0, 3).contiguous().transpose(0, 3),
    ):
        assert other.stride() != bits.stride()
        assert torch.equal(pack_bits(other), pack_bits(bits))


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_bytes_is_refused(count):
    with pytest.raises(ArtifactError, match="needs 2 bytes"):
        unpack_bits(torch.zeros(count, dtype=torch.uint8), (3, 3))


@pytest.mark.parametrize("bit", range(3, 8))
def test_a_set_bit_beyond_the_end_is_refused(bit):
    with pytest.raises(ArtifactError, match="bits set beyond its end"):
        unpack_bits(torch.tensor([1 << bit], dtype=torch.uint8), (3,))


# Round trip


@settings(deadline=None, max_examples=40)
@given(st.lists(SHAPES, max_size=4), st.integers(0, 99))
def test_save_and_load_give_the_same_mask(tmp_path_factory, shapes, seed):
    model = Holder(shapes)
    kept = {f"p{index}": random_bits(shape, seed + index) for index, shape in enumerate(shapes)}
    mask = Mask.of(model, kept, {"seeds": [seed], "nested": {"a": None}})
    loaded = Mask.load(mask.save(tmp_path_factory.mktemp("mask")))
    assert loaded.kept.keys() == kept.keys()
    for name, bits in kept.items():
        assert torch.equal(loaded.kept[name], bits)
    for field in ("base_digest", "folded_digest", "aliases", "metadata"):
        assert getattr(loaded, field) == getattr(mask, field), field
    assert loaded.sparsity() == mask.sparsity()
    for name, value in loaded.apply(model).named_parameters():
        np.testing.assert_array_equal(value.detach().numpy(), np.where(kept[name].numpy(), np.float32(1.5), 0))


def test_saving_twice_writes_the_same_bytes(tmp_path):
    mask = tiny()[1]
    one, two = mask.save(tmp_path / "one"), Mask.load(tmp_path / "one").save(tmp_path / "two")
    for name in (BITS, RECORD):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    assert sorted(path.name for path in one.iterdir()) == sorted([BITS, RECORD])


def bits_allowed(mask: Mask) -> float:
    return sum(layer.total for layer in mask.sparsity()) / 8 + 4096


def test_one_bit_a_weight_and_four_kib(tmp_path):
    spec = ImageSpec(channels=3, height=32, width=32, mean=(0.5,) * 3, std=(0.5,) * 3)
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(300)))
    for model in (create_model("vgg11", 10, spec), deep):
        mask = Mask.of(model, {name: weight > 0 for name, weight in maskable(model).items()})
        folder = mask.save(tmp_path / str(len(mask.kept)))
        assert (folder / BITS).stat().st_size <= bits_allowed(mask)
        loaded = Mask.load(folder).kept
        assert all(torch.equal(loaded[name], bits) for name, bits in mask.kept.items())


# Damage


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return tiny()[1].save(tmp_path / "mask")


def damaged(content: bytes) -> Iterator[bytes]:
    """Every single flipped bit, every byte turned over, every truncation, some additions."""
    for position in range(len(content)):
        for flip in (1, 2, 4, 8, 16, 32, 64, 128, 255):
            yield content[:position] + bytes([content[position] ^ flip]) + content[position + 1 :]
        yield content[:position]
        yield content[:position] + content[position + 1 :]
    yield from (content + b"\0", content + b"\n", content + b" ", b" " + content, content + content)


@pytest.mark.parametrize("name", [BITS, RECORD])
def test_every_flipped_bit_and_every_truncation_is_detected(saved, name):
    path = saved / name
    content = path.read_bytes()
    undetected, attempts = [], 0
    with path.open("r+b", buffering=0) as file:
        for wrong in damaged(content):
            attempts += 1
            file.seek(0)
            file.write(wrong)
            file.truncate()
            try:
                Mask.load(saved)
            except ArtifactError as error:
                assert str(saved) in str(error)
            else:
                undetected.append(wrong)
    assert attempts > 10 * len(content)
    assert [wrong for wrong in undetected if wrong != content] == []
    path.write_bytes(content)
    Mask.load(saved)


@pytest.mark.parametrize("name", [BITS, RECORD])
def test_a_missing_file_is_named(saved, name):
    (saved / name).unlink()
    with pytest.raises(ArtifactError, match=f"{name}: can't be read .* a mask folder has it"):
        Mask.load(saved)


def test_a_missing_folder_and_a_file_in_its_place(tmp_path):
    with pytest.raises(ArtifactError, match="nowhere"):
        Mask.load(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ArtifactError, match="can't be read"):
        Mask.load(tmp_path / "file")
    with pytest.raises(ArtifactError, match="can't be written"):
        tiny()[1].save(tmp_path / "file")


def test_the_record_of_one_mask_does_not_open_the_bits_of_another(saved, tmp_path):
    model, mask = tiny()
    other = Mask.of(model, {name: ~bits for name, bits in mask.kept.items()}).save(tmp_path / "other")
    shutil.copy(other / BITS, saved / BITS)
    with pytest.raises(ArtifactError, match=r"mask.safetensors: truncated or altered"):
        Mask.load(saved)


def rewritten(folder: Path, **changes: object) -> None:
    """Write a record with right checksums and wrong content, as only a bug of ours could."""
    record = json.loads((folder / RECORD).read_bytes())
    del record["record_sha256"]
    (folder / RECORD).write_bytes(_written(record | changes))


def test_a_newer_format_asks_for_an_upgrade(saved):
    rewritten(saved, format=2, something_new=True)
    with pytest.raises(ArtifactError, match=r"format 2 is newer than this modelfence reads \(1\); upgrade"):
        Mask.load(saved)


def test_counts_and_sizes_in_the_record_are_checked_against_the_bits(saved):
    table = json.loads((saved / RECORD).read_bytes())["parameters"]
    rewritten(saved, parameters=[table[0] | {"kept": 5}, table[1]])
    with pytest.raises(ArtifactError, match="count of '0.weight' doesn't fit"):
        Mask.load(saved)
    rewritten(saved, parameters=table[:1])
    with pytest.raises(ArtifactError, match="1 bytes more than the record names"):
        Mask.load(saved)
    bits = save_tensors({"other": torch.zeros(3, dtype=torch.uint8)})
    (saved / BITS).write_bytes(bits)
    rewritten(saved, parameters=table, bits_sha256=sha256(bits))
    with pytest.raises(ArtifactError, match="not a mask file"):
        Mask.load(saved)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"format": 1, "metadata": ' + b"[" * 600 + b"]" * 600 + b"}",
        b"\xff\xfe{",
        b"{",
        b"",
        b"[]",
        b"3",
        b'{"format": 1e999}',
        b'{"format": null}',
        b'{"format": "x"}',
    ],
    ids=lambda content: content[:12].decode(errors="replace"),
)
def test_a_record_that_is_none_is_refused_in_one_line(saved, content):
    (saved / RECORD).write_bytes(content)
    with pytest.raises(ArtifactError, match=r"mask\.json: truncated or altered") as caught:
        Mask.load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("shape", [[10**30], [-1], ["a"], "ab", None, [2**62, 2**62]], ids=str)
def test_a_record_with_shapes_that_are_none(saved, shape):
    table = json.loads((saved / RECORD).read_bytes())["parameters"]
    rewritten(saved, parameters=[table[0] | {"shape": shape}, table[1]])
    with pytest.raises(ArtifactError, match="mask") as caught:
        Mask.load(saved)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["a\0b", "a" * 5000])
def test_a_text_that_can_be_no_path(name):
    for use in (Mask.load, tiny()[1].save):
        with pytest.raises(InputError, match="path") as caught:
            use(name)
        assert "\n" not in str(caught.value)


def test_metadata_nested_without_end_is_not_saved(tmp_path):
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(InputError, match="metadata can't be saved"):
        tiny()[1].with_metadata(deep=nested).save(tmp_path)
    assert list(tmp_path.iterdir()) == []
