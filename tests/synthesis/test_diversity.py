"""The diversity generator and its directions."""

import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded, spec
from torch import nn

from modelfence.errors import InputError
from modelfence.synthesis.diversity import DiversityGenerator, drop_direction_gradients, kernel_sizes


@pytest.mark.parametrize(
    ("channels", "height", "width"), [(1, 28, 28), (3, 32, 40), (3, 33, 33), (1, 8, 8), (3, 96, 96)]
)
def test_images_keep_shape_and_range(channels, height, width):
    image = spec(channels, height, width)
    images = image.from_unit(torch.rand(2, *image.shape))
    styled = DiversityGenerator(image)(images, seeded())
    assert styled.shape == images.shape
    assert_unit(image.to_unit(styled), slack=1e-5)
    assert (styled - images).abs().mean() > 0.05


@pytest.mark.parametrize("side", range(8, 64))
def test_kernels_are_odd_and_smaller_than_the_image(side):
    assert all(size % 2 == 1 and 3 <= size < side for size in kernel_sizes(side))


def test_convolutions_are_drawn_anew_from_the_generator():
    image = spec()
    diversity, images = DiversityGenerator(image), torch.randn(2, 3, 32, 32)
    draws = seeded(1)
    first, second = diversity(images, draws), diversity(images, draws)
    assert not torch.equal(first, second)
    assert torch.equal(first, diversity(images, seeded(1)))


def test_many_draws_stay_finite_and_in_range():
    image, draws = spec(1, 16), seeded()
    diversity, images = DiversityGenerator(image, keep=0), image.from_unit(torch.rand(1, 1, 16, 16))
    with torch.no_grad():
        for _ in range(200):
            assert_unit(image.to_unit(diversity(images, draws)), slack=1e-5)


def test_keep_blends_the_original_in():
    image = spec(1, 16)
    images = image.from_unit(torch.rand(2, 1, 16, 16))
    diversity = DiversityGenerator(image)
    made = {}
    for diversity.keep in (0.0, 0.4, 1.0):
        made[diversity.keep] = diversity(images, seeded())
    assert torch.equal(made[1.0], images)
    torch.testing.assert_close(made[0.4], 0.4 * images + 0.6 * made[0.0])


def test_only_shifts_and_noise_are_learned_and_all_of_them_are():
    diversity = DiversityGenerator(spec())
    diversity(torch.randn(2, 3, 32, 32), seeded()).square().sum().backward()
    assert {name.rpartition(".")[2] for name, _ in diversity.named_parameters()} == {"mean", "deviation", "noise"}
    assert all(parameter.grad.abs().sum() > 0 for parameter in diversity.parameters())


def test_a_few_steps_lower_a_loss_of_the_styles():
    image = spec(1, 16)
    diversity, images = DiversityGenerator(image), image.from_unit(torch.rand(4, 1, 16, 16))
    optimizer = torch.optim.Adam(diversity.parameters(), lr=0.1)

    def loss() -> torch.Tensor:
        return image.to_unit(diversity(images, seeded())).mean()

    before = loss().item()
    for _ in range(10):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
    assert loss().item() < before - 0.02


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("direction", range(4))
def test_a_direction_drops_the_first_channels_of_every_shift(channels, direction):
    diversity = DiversityGenerator(spec(channels, 16), directions=4)
    diversity(torch.randn(2, channels, 16, 16), seeded()).square().sum().backward()
    before = {name: parameter.grad.clone() for name, parameter in diversity.named_parameters()}
    drop_direction_gradients(diversity, direction, 4)
    for name, parameter in diversity.named_parameters():
        if name == "noise":
            assert torch.equal(parameter.grad, before[name])
            continue
        assert len(parameter) == 4
        assert torch.equal(parameter.grad[:direction], torch.zeros_like(parameter.grad[:direction]))
        assert torch.equal(parameter.grad[direction:], before[name][direction:])
        assert before[name].flatten(1).abs().sum(dim=1).min() > 0


def test_directions_of_any_convolution_and_of_a_frozen_one():
    layers = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 3, 3))
    layers[1].bias.requires_grad_(False)
    layers(torch.randn(2, 1, 8, 8)).square().sum().backward()
    drop_direction_gradients(layers, 1, 3)
    dropped = [(one.grad.flatten(1).abs().sum(dim=1) == 0).tolist() for one in (layers[0].weight, layers[1].weight)]
    assert dropped == [[True, True, False, False, False, False], [True, False, False]]
    assert (layers[0].bias.grad == 0).tolist() == dropped[0]
    assert layers[1].bias.grad is None


def test_bad_settings_are_refused():
    with pytest.raises(InputError, match="8 x 8"):
        DiversityGenerator(spec(1, 7))
    with pytest.raises(InputError, match="directions is 0"):
        DiversityGenerator(spec(), directions=0)
    with pytest.raises(InputError, match=r"keep 1\.5"):
        DiversityGenerator(spec(), keep=1.5)
    for direction in (-1, 4):
        with pytest.raises(InputError, match="direction is"):
            drop_direction_gradients(nn.Linear(1, 1), direction, 4)
