"""Encoder, generator, and both together."""

import pytest
import torch
from tests.synthesis.toy import assert_unit, seeded, spec

from modelfence.errors import InputError
from modelfence.losses.memory import reconstruction, standard_normal
from modelfence.synthesis.memory import Encoder, Memory, MemoryGenerator


def memory_of(image, latent=8, width=16):
    return Memory(Encoder(image, latent, width), MemoryGenerator(image, latent, width))


@pytest.mark.parametrize(("channels", "side"), [(1, 28), (3, 32), (3, 33), (1, 8), (3, 96), (3, 224)])
def test_images_come_back_in_shape(channels, side):
    image = spec(channels, side)
    memory = memory_of(image)
    rebuilt = memory.rebuild(image.from_unit(torch.rand(2, *image.shape)))
    assert rebuilt.images.shape == (2, *image.shape)
    assert rebuilt.mean.shape == rebuilt.log_variance.shape == (2, 8)
    assert_unit(image.to_unit(rebuilt.images), slack=1e-5)


def test_the_code_is_drawn_only_where_a_generator_is_given():
    image = spec(1, 28, 20)
    memory, images = memory_of(image).eval(), torch.randn(3, 1, 28, 20)
    plain = memory.rebuild(images)
    assert torch.equal(plain.images, memory.rebuild(images).images)
    assert torch.equal(plain.images, memory.generator(plain.mean))
    drawn = memory.rebuild(images, seeded(1))
    assert torch.equal(drawn.mean, plain.mean)
    assert torch.equal(drawn.images, memory.rebuild(images, seeded(1)).images)
    assert not torch.equal(drawn.images, memory.rebuild(images, seeded(2)).images)
    assert not torch.equal(drawn.images, plain.images)


def test_samples_depend_on_the_seed_alone():
    memory = memory_of(spec()).eval()
    assert torch.equal(memory.sample(3, seeded(1)), memory.sample(3, seeded(1)))
    assert not torch.equal(memory.sample(3, seeded(1)), memory.sample(3, seeded(2)))


def test_the_log_variance_is_bounded_whatever_the_image():
    log_variance = Encoder(spec(1, 16), 4, 16)(1e6 * torch.randn(2, 1, 16, 16))[1]
    assert log_variance.abs().max() <= 10


def test_what_is_shown_is_remembered():
    image = spec(1, 16)
    memory, draws = memory_of(image, width=32), seeded()
    images = image.from_unit((torch.rand(1, 16, 1, 1) < 0.5).float().view(16, 1, 1, 1).expand(16, 1, 16, 16).clone())
    images[:, :, :8] = image.from_unit(torch.ones(1, 1, 16, 16))[:, :, :8]
    optimizer = torch.optim.Adam(memory.parameters(), lr=3e-3)
    errors = []
    for _ in range(30):
        rebuilt = memory.rebuild(images, draws)
        error = reconstruction(images, rebuilt.images, [], [])
        optimizer.zero_grad()
        (error + 1e-3 * standard_normal(rebuilt.mean, rebuilt.log_variance)).backward()
        optimizer.step()
        errors.append(error.item())
    assert errors[-1] < 0.4 * errors[0]


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(InputError, match="differ"):
        Memory(Encoder(spec(), 8), MemoryGenerator(spec(), 9))
    with pytest.raises(InputError, match="differ"):
        Memory(Encoder(spec(1), 8), MemoryGenerator(spec(3), 8))
    with pytest.raises(InputError, match="width 4"):
        Encoder(spec(), 8, width=4)
