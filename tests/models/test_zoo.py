import math

import pytest
import timm
import torch
import torchvision
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError
from modelfence.models.zoo import check_model, create_model, names


def spec(channels=3, height=32, width=None):
    return ImageSpec(channels, height, width or height, (0.5,) * channels, (0.5,) * channels)


def test_names_are_those_of_the_paper_and_the_demo():
    assert set(names()) == {
        *(
            "vgg11",
            "vgg11_bn",
            "vgg13",
            "vgg13_bn",
            "vgg19",
            "vgg19_bn",
            "small_vgg_bn",
            "swin_t",
            "xception",
        ),
        *("resnet18", "resnet34", "resnet50", "resnet101"),
    }


@pytest.mark.parametrize("name", ["vgg11", "vgg11_bn", "vgg13", "vgg19_bn"])
def test_vgg_features_have_the_keys_and_shapes_of_torchvision(name):
    ours = create_model(name, 10, spec()).state_dict()
    with torch.device("meta"):
        theirs = torchvision.models.get_model(name).features.state_dict(prefix="features.")
    assert {key: value.shape for key, value in ours.items() if key.startswith("features.")} == {
        key: value.shape for key, value in theirs.items()
    }


@pytest.mark.parametrize(("size", "flat"), [((32, 32), 512), ((64, 64), 2048), ((70, 32), 1024)])
def test_vgg_head_is_256_256_k_on_the_flattened_features(size, flat):
    model = create_model("vgg11", 7, spec(1, *size))
    linear = [(m.in_features, m.out_features) for m in model.modules() if isinstance(m, nn.Linear)]
    assert linear == [(flat, 256), (256, 256), (256, 7)]
    assert [m.p for m in model.modules() if isinstance(m, nn.Dropout)] == [0.5, 0.5]
    assert model(torch.zeros(2, 1, *size)).shape == (2, 7)


def test_vgg_starts_with_he_weights_and_carries_the_signal():
    model = create_model("vgg11", 10, spec())
    conv = model.features[6]
    assert isinstance(conv, nn.Conv2d)
    expected = math.sqrt(2 / (conv.out_channels * 9))
    assert float(conv.weight.detach().std()) == pytest.approx(expected, rel=0.02)
    assert not conv.bias.any()
    features = model.features(torch.randn(8, 3, 32, 32))
    assert 0.02 < float(features.detach().std()) < 5


@pytest.mark.parametrize("name", ["small_vgg_bn", "resnet18", "swin_t", "xception"])
@pytest.mark.parametrize("channels", [1, 3])
def test_networks_take_small_images_of_any_channels(name, channels):
    model = create_model(name, 5, spec(channels))
    assert not model.training
    assert model(torch.zeros(2, channels, 32, 32)).shape == (2, 5)


@pytest.mark.parametrize(("side", "kernel", "pooled"), [(63, (3, 3), False), (64, (7, 7), True)])
def test_resnet_keeps_the_resolution_of_small_images(side, kernel, pooled):
    model = create_model("resnet18", 3, spec(2, side))
    assert model.conv1.kernel_size == kernel
    assert model.conv1.in_channels == 2
    assert isinstance(model.maxpool, nn.MaxPool2d) == pooled


def test_a_timm_vit_is_built_for_the_image_size():
    model = create_model("vit_tiny_patch16_224", 4, spec(1), img_size=32, patch_size=4)
    assert model.pos_embed.shape == (1, 65, 192)
    assert create_model("vit_tiny_patch16_224", 4, spec(3, 48)).pos_embed.shape == (1, 10, 192)


def test_a_timm_network_without_an_image_size_is_built_too():
    model = create_model("test_resnet", 4, spec(1, 64), drop_rate=0.25)
    assert model(torch.zeros(1, 1, 64, 64)).shape == (1, 4)
    assert model.drop_rate == 0.25


@pytest.mark.parametrize(
    ("name", "args", "text"),
    [
        ("vgg12", {}, r"model 'vgg12' isn't in the zoo or timm\. Did you mean 'vgg1"),
        ("hf-hub:timm/resnet18", {}, "isn't in the zoo or timm"),
        ("vgg11", {"droput": 0.1}, "unknown argument 'droput'; it takes dropout, pretrained"),
        ("vgg11", {"dropout": 1.0}, r"dropout is 1\.0"),
        ("small_vgg_bn", {"pretrained": True}, "unknown argument 'pretrained'; it takes none"),
        ("test_resnet", {"widht": 3}, "model 'test_resnet': .*'widht'"),
        (
            "test_resnet",
            {"checkpoint_path": "x.pt"},
            "'checkpoint_path' isn't taken here; use weights= instead",
        ),
        ("test_resnet", {"pretrained_cfg": {}}, "'pretrained_cfg' isn't taken here; leave it out"),
        ("vit_tiny_patch16_224", {"img_size": 64}, r"can't take 3x32x32 images \(Input height"),
    ],
)
def test_wrong_names_and_arguments_are_one_line(name, args, text):
    with pytest.raises(InputError, match=text) as caught:
        create_model(name, 10, spec(), **args)
    assert "\n" not in str(caught.value)


def test_too_small_images_and_too_few_classes_are_refused():
    with pytest.raises(InputError, match="image is 28x28; VGG needs at least 32x32"):
        create_model("vgg11", 10, spec(1, 28))
    with pytest.raises(InputError, match="image is 8x8; at least 16x16"):
        create_model("small_vgg_bn", 10, spec(1, 8))
    with pytest.raises(InputError, match="classes is 1; a classifier needs at least 2"):
        create_model("small_vgg_bn", 1, spec())


def test_checking_a_model_leaves_its_buffers_alone():
    model = create_model("small_vgg_bn", 10, spec()).train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    check_model(model, "mine", classes=10, image=spec())
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    with pytest.raises(InputError, match="model 'mine' gives 10 logits, not 7"):
        check_model(model, "mine", classes=7, image=spec())


class _Weights:
    """Stands in for torchvision's registry of downloads."""

    def __init__(self, state):
        self.DEFAULT = self
        self.state = state

    def get_state_dict(self, *, progress, check_hash, weights_only):
        assert check_hash
        assert weights_only
        if self.state is None:
            raise OSError("no route to host")
        return self.state


def test_pretrained_vgg_takes_the_convolutions_and_keeps_its_own_head(monkeypatch):
    source = create_model("vgg11", 10, spec()).state_dict()
    state = {key: torch.full_like(value, 0.01) for key, value in source.items() if key.startswith("features.")}
    state["classifier.0.weight"] = torch.zeros(4096, 25088)
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: _Weights(state))
    model = create_model("vgg11", 10, spec(), pretrained=True)
    assert all(torch.equal(value, state[f"features.{key}"]) for key, value in model.features.state_dict().items())
    assert float(model.classifier[0].weight.detach().std()) == pytest.approx(math.sqrt(2 / 512), rel=0.05)
    with pytest.raises(InputError, match=r"ImageNet weights don't fit at 'features\.0\.weight'; use 3-channel"):
        create_model("vgg11", 10, spec(1), pretrained=True)


def test_pretrained_resnet_for_small_images_keeps_its_own_stem(monkeypatch):
    state = {key: value + 1 for key, value in torchvision.models.resnet18().state_dict().items()}
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: _Weights(state))
    model = create_model("resnet18", 4, spec(), pretrained=True)
    assert model.conv1.weight.shape == (64, 3, 3, 3)
    assert torch.equal(model.layer1[0].conv1.weight, state["layer1.0.conv1.weight"])


def test_pretrained_weights_that_cannot_be_had_are_one_line(monkeypatch):
    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: _Weights(None))
    with pytest.raises(InputError, match=r"'vgg11': pretrained weights can't be loaded \(no route to host\); connect"):
        create_model("vgg11", 10, spec(), pretrained=True)

    def unreachable(*_, **__):
        raise OSError("We couldn't connect to the hub\nand more")

    monkeypatch.setattr(timm, "create_model", unreachable)
    with pytest.raises(InputError, match=r"pretrained weights can't be loaded \(We couldn't connect to the hub\);"):
        create_model("vit_tiny_patch16_224", 10, spec(), pretrained=True)
