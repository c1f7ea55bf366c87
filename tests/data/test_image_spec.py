import pytest
import torch
from torchvision import transforms

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError

SPEC = ImageSpec(channels=3, height=5, width=4, mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def random_images(count: int = 6) -> torch.Tensor:
    return torch.randint(0, 256, (count, 3, 5, 4), dtype=torch.uint8)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_normalize_equals_torchvision_bit_for_bit(memory_format):
    images = random_images().to(memory_format=memory_format)
    reference = transforms.Compose([transforms.ToTensor(), transforms.Normalize(SPEC.mean, SPEC.std)])
    expected = torch.stack([reference(image.permute(1, 2, 0).numpy()) for image in images])
    result = SPEC.normalize(images)
    assert torch.equal(result, expected)
    assert result.is_contiguous(memory_format=memory_format)


def test_normalize_leaves_its_input_alone():
    images = random_images()
    before = images.clone()
    SPEC.normalize(images)
    assert torch.equal(images, before)


def test_denormalize_inverts_normalize():
    images = random_images()
    assert torch.equal(SPEC.denormalize(SPEC.normalize(images)), images)


def test_from_unit_agrees_with_normalize_and_to_unit_inverts_it():
    pixels = random_images()
    unit = pixels.double() / 255
    assert torch.allclose(SPEC.from_unit(unit).float(), SPEC.normalize(pixels), atol=1e-6)
    assert torch.allclose(SPEC.to_unit(SPEC.from_unit(unit)), unit)


def test_unit_images_keep_their_gradient():
    unit = torch.rand(2, 3, 5, 4, requires_grad=True)
    SPEC.from_unit(unit).sum().backward()
    expected = (1 / torch.tensor(SPEC.std)).view(3, 1, 1).expand(2, 3, 5, 4)
    assert torch.allclose(unit.grad, expected)


def test_denormalize_clips():
    assert SPEC.denormalize(torch.full((1, 3, 5, 4), 99.0)).min() == 255
    assert SPEC.denormalize(torch.full((1, 3, 5, 4), -99.0)).max() == 0


def test_lists_become_tuples_so_that_specs_compare_and_hash():
    spec = ImageSpec(channels=1, height=2, width=2, mean=[0], std=[1])  # type: ignore[arg-type]
    assert spec == ImageSpec(channels=1, height=2, width=2, mean=(0.0,), std=(1.0,))
    assert len({spec, spec}) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"height": 0}, "height is 0"),
        ({"channels": 2.5}, "channels is 2.5"),
        ({"width": True}, "width is True"),
        ({"mean": (0.5,)}, "mean has 1 values for 3 channels"),
        ({"std": (0.5, 0.0, 0.5)}, "std is .*positive"),
        ({"mean": (float("nan"),) * 3}, "finite"),
        ({"std": 0.5}, "list of finite numbers"),
    ],
)
def test_wrong_fields_are_named(change, text):
    fields = {"channels": 3, "height": 5, "width": 4, "mean": (0.5,) * 3, "std": (0.5,) * 3}
    with pytest.raises(InputError, match=text):
        ImageSpec(**(fields | change))


def test_normalize_refuses_floats_and_other_shapes():
    with pytest.raises(InputError, match="uint8"):
        SPEC.normalize(torch.zeros(1, 3, 5, 4))
    with pytest.raises(InputError, match=r"\(1, 1, 5, 4\).*\(N, 3, 5, 4\)"):
        SPEC.normalize(torch.zeros(1, 1, 5, 4, dtype=torch.uint8))
