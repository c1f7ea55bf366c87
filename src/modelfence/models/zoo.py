"""Networks by name: those of the paper, a small one for demos, and every timm architecture."""

import inspect
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn

from modelfence.data.image_spec import ImageSpec
from modelfence.errors import InputError, first_line, nearest
from modelfence.masking.unwrap import require_network
from modelfence.models.outputs import logits_of

SMALL_IMAGE = 64
"""Images with a side below this many pixels get a ResNet stem that keeps their resolution."""

_VGG_WIDTHS: dict[int, tuple[tuple[int, ...], ...]] = {
    11: ((64,), (128,), (256, 256), (512, 512), (512, 512)),
    13: ((64, 64), (128, 128), (256, 256), (512, 512), (512, 512)),
    19: ((64, 64), (128, 128), (256,) * 4, (512,) * 4, (512,) * 4),
}
_HEAD_WIDTH = 256
_SAID_OTHERWISE = {"num_classes": "classes=", "in_chans": "image=", "checkpoint_path": "weights="}
_NEVER_TAKEN = {"pretrained_cfg", "pretrained_cfg_overlay", "cache_dir", "scriptable", "exportable", "no_jit"}


def create_model(name: str, classes: int, image: ImageSpec, **args: Any) -> nn.Module:
    """Build a classifier by name, with random weights unless ``pretrained=True`` is asked for.

    The names of :func:`names` come first; any other name is an architecture of timm. The weights come from
    torch's global generator: call :func:`torch.manual_seed` first for a repeatable network.

    Args:
        name: For example ``"vgg11"``, ``"resnet18"`` or ``"vit_tiny_patch16_224"``.
        classes: Number of classes K, at least 2.
        image: What the network eats; its channels and, for VGG and ViT, its size shape the layers.
        **args: ``pretrained=True`` for ImageNet weights (needs the network); ``dropout`` for VGG; all that
            ``timm.create_model`` passes on for timm names.

    Returns:
        The network in eval mode; it maps (N, C, H, W) float images to (N, K) logits.

    Raises:
        InputError: Unknown name or argument, fewer than 2 classes, an image the network can't take, or
            pretrained weights that can't be had.

    Example:
        >>> spec = ImageSpec(channels=1, height=32, width=32, mean=(0.5,), std=(0.5,))
        >>> create_model("small_vgg_bn", 10, spec)(torch.zeros(2, 1, 32, 32)).shape
        torch.Size([2, 10])
    """
    if classes < 2:
        raise InputError(f"model {name!r}: classes is {classes}; a classifier needs at least 2")
    for key in sorted((_SAID_OTHERWISE.keys() | _NEVER_TAKEN) & args.keys()):
        instead = f"use {_SAID_OTHERWISE[key]} instead" if key in _SAID_OTHERWISE else "leave it out"
        raise InputError(f"model {name!r}: argument {key!r} isn't taken here; {instead}")
    build = _BUILDERS.get(name)
    if build is None:
        model = _timm_model(name, classes, image, args)
    else:
        known = list(inspect.signature(build).parameters)[3:]
        for key in sorted(args.keys() - set(known)):
            raise InputError(f"model {name!r}: unknown argument {key!r}; it takes {', '.join(known) or 'none'}")
        model = build(name, classes, image, **args)
    return check_model(model, name, classes=classes, image=image)


def names() -> list[str]:
    """Return the names that the zoo adds to those of timm.

    Example:
        >>> "vgg11_bn" in names()
        True
    """
    return sorted(_BUILDERS)


def require_known(name: str) -> None:
    """Refuse a name that neither the zoo nor timm has.

    Raises:
        InputError: There is no such network; the text names the nearest.
    """
    import timm

    if name not in _BUILDERS and (":" in name or not timm.is_model(name)):
        close = nearest(name, [*names(), *timm.list_models()])
        raise InputError(f"model {name!r} isn't in the zoo or timm.{close} See modelfence.models.zoo.names()")


def check_model(model: nn.Module, name: str, *, classes: int, image: ImageSpec) -> nn.Module:
    """Put a network in eval mode and check, on one black image, that it takes such images and gives K logits.

    Args:
        model: The network.
        name: How errors call it.
        classes: The number of classes K it must have.
        image: The images it must take.

    Returns:
        The network given.

    Raises:
        InputError: The network can't process such an image, or gives another number of logits.
    """
    require_network(model).eval()
    tensor = next(model.parameters(), torch.zeros(0))
    black = torch.zeros((1, *image.shape), dtype=tensor.dtype, device=tensor.device)
    try:
        with torch.no_grad():
            output = model(black)
    except Exception as error:
        reason = first_line(error)
        shape = "x".join(str(side) for side in image.shape)
        raise InputError(f"model {name!r} can't take {shape} images ({reason}); change image= or the model") from error
    found = logits_of(output).shape[1]
    if found != classes:
        raise InputError(f"model {name!r} gives {found} logits, not {classes}; set classes= to its number")
    return model


def _vgg(name: str, classes: int, image: ImageSpec, *, dropout: float = 0.5, pretrained: bool = False) -> nn.Module:
    """Build the VGG of the paper (MAP, CVPR 2024): convolutions as in torchvision, then a 256-256-K head."""
    if min(image.height, image.width) < 32:
        raise InputError(f"model {name!r}: image is {image.height}x{image.width}; VGG needs at least 32x32")
    if not 0 <= dropout < 1:
        raise InputError(f"model {name!r}: dropout is {dropout}; it must be in [0, 1)")
    depth, normalized = int(name[3:5]), name.endswith("_bn")
    layers: list[nn.Module] = []
    channels = image.channels
    for widths in _VGG_WIDTHS[depth]:
        for width in widths:
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            layers += [nn.BatchNorm2d(width)] if normalized else []
            layers.append(nn.ReLU(inplace=True))
            channels = width
        layers.append(nn.MaxPool2d(2))
    model = _Vgg(
        nn.Sequential(*layers),
        nn.Sequential(
            nn.Linear(channels * (image.height // 32) * (image.width // 32), _HEAD_WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(_HEAD_WIDTH, _HEAD_WIDTH),
            nn.ReLU(inplace=True),
            nn.Dropout(dropout),
            nn.Linear(_HEAD_WIDTH, classes),
        ),
    )
    _he_init(model)
    if pretrained:
        _load_imagenet(model, name, skip=("classifier.",))
    return model


def _small_vgg(name: str, classes: int, image: ImageSpec) -> nn.Module:
    """Build the demo's network: four convolutions with BatchNorm and pooling, then one linear layer."""
    if min(image.height, image.width) < 16:
        raise InputError(f"model {name!r}: image is {image.height}x{image.width}; at least 16x16 is needed")
    layers: list[nn.Module] = []
    channels = image.channels
    for width in (32, 64, 128, 128):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        layers.append(nn.MaxPool2d(2))
        channels = width
    layers.append(nn.AdaptiveAvgPool2d(1))
    model = _Vgg(nn.Sequential(*layers), nn.Sequential(nn.Linear(channels, classes)))
    _he_init(model)
    return model


def _resnet(name: str, classes: int, image: ImageSpec, *, pretrained: bool = False) -> nn.Module:
    """Build torchvision's ResNet; small images get a 3x3 stride-1 stem without max pooling."""
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    skip = ["fc."]
    if min(image.height, image.width) < SMALL_IMAGE:
        model.conv1 = nn.Conv2d(image.channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    elif image.channels != 3:
        model.conv1 = nn.Conv2d(image.channels, 64, 7, stride=2, padding=3, bias=False)
    if tuple(model.conv1.weight.shape[1:]) != (3, 7, 7):
        nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
        skip.append("conv1.")
    if pretrained:
        _load_imagenet(model, name, skip=tuple(skip))
    return cast(nn.Module, model)


def _swin(name: str, classes: int, image: ImageSpec, *, pretrained: bool = False) -> nn.Module:
    """Build torchvision's Swin Transformer, which takes any image size of at least 32 pixels."""
    import torchvision

    model = torchvision.models.get_model(name, weights=None, num_classes=classes)
    skip = ["head."]
    if image.channels != 3:
        old = model.features[0][0]
        model.features[0][0] = nn.Conv2d(image.channels, old.out_channels, old.kernel_size, stride=old.stride)
        skip.append("features.0.0.")
    if pretrained:
        _load_imagenet(model, name, skip=tuple(skip))
    return cast(nn.Module, model)


def _xception(name: str, classes: int, image: ImageSpec, *, pretrained: bool = False) -> nn.Module:  # noqa: ARG001 (every builder gets it)
    """Build timm's copy of the original Xception."""
    return _timm_model("legacy_xception", classes, image, {"pretrained": pretrained})


def _timm_model(name: str, classes: int, image: ImageSpec, args: dict[str, Any]) -> nn.Module:
    """Build a timm architecture; constructors that know ``img_size`` are told the image's."""
    import timm

    require_known(name)
    wanted = {"num_classes": classes, "in_chans": image.channels, **args}
    sizes = [{}] if "img_size" in args else [{"img_size": (image.height, image.width)}, {}]
    for size in sizes:
        try:
            return cast(nn.Module, timm.create_model(name, **wanted, **size))
        except TypeError as error:
            if size and "img_size" in str(error):
                continue
            raise InputError(f"model {name!r}: {first_line(error)}; correct the model's args") from error
        except OSError as error:
            raise InputError(_no_weights(name, error)) from error
        except (RuntimeError, ValueError, AssertionError) as error:
            if args.get("pretrained"):
                raise InputError(_no_weights(name, error)) from error
            raise InputError(f"model {name!r}: {first_line(error)}; correct image= or args") from error
    raise AssertionError("unreachable")


class _Vgg(nn.Module):
    """Convolutions, flatten, head; keys are named as in torchvision (``features``, ``classifier``)."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images (N, C, H, W) to logits (N, K)."""
        return cast(torch.Tensor, self.classifier(self.features(images).flatten(1)))


def _he_init(model: nn.Module) -> None:
    """Set He-normal weights (gain of ReLU) and zero biases; the last layer starts with small weights."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, nn.Linear):
            nn.init.kaiming_normal_(module.weight, mode="fan_in", nonlinearity="relu")
        if isinstance(module, nn.Conv2d | nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
    last = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
    nn.init.normal_(last.weight, std=0.01)


def _load_imagenet(model: nn.Module, name: str, *, skip: tuple[str, ...]) -> None:
    """Copy torchvision's ImageNet weights into all layers but those whose keys start with ``skip``."""
    import torchvision

    try:
        choice = torchvision.models.get_model_weights(name).DEFAULT
        weights = choice.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError) as error:
        raise InputError(_no_weights(name, error)) from error
    own = model.state_dict()
    taken = {key: value for key, value in weights.items() if not key.startswith(skip)}
    expected = {key for key in own if not key.startswith(skip)}
    wrong = sorted(expected ^ taken.keys()) or [key for key in taken if taken[key].shape != own[key].shape]
    if wrong:
        raise InputError(f"model {name!r}: ImageNet weights don't fit at {wrong[0]!r}; use 3-channel images")
    model.load_state_dict({**own, **taken})


def _no_weights(name: str, error: Exception) -> str:
    """Say that pretrained weights can't be had, and what to do."""
    return (
        f"model {name!r}: pretrained weights can't be loaded ({first_line(error)}); "
        "connect to the network, or download them elsewhere and give the file as weights="
    )


_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    **{f"vgg{depth}{norm}": _vgg for depth in _VGG_WIDTHS for norm in ("", "_bn")},
    "small_vgg_bn": _small_vgg,
    **{f"resnet{depth}": _resnet for depth in (18, 34, 50, 101)},
    "swin_t": _swin,
    "xception": _xception,
}
