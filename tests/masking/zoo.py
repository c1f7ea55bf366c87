"""Tiny networks with random weights, one for each way in which users' classifiers differ.

``ZOO`` maps a name to a function that builds a :class:`Case`. Every normalization, scale and bias is random, so that
no layer is silent: zeroing any selected weight changes the output.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

CLASSES = 5


class Case(NamedTuple):
    """A network as a user gives it, and images that it takes."""

    model: nn.Module
    images: Tensor


ZOO: dict[str, Callable[[], Case]] = {}


def case(build: Callable[[], Case]) -> Callable[[], Case]:
    ZOO[build.__name__] = build
    return build


def images(channels: int = 3, side: int = 16, count: int = 2) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, channels, side, side, generator=generator)


@torch.no_grad()
def lively(model: nn.Module) -> nn.Module:
    """Give every parameter and running statistic a random value of a size that keeps all layers heard."""
    generator = torch.Generator().manual_seed(11)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim > 1:
            fan_in = value[0].numel()
            value.copy_(noise * (1.5 / fan_in) ** 0.5)
        else:
            value.copy_(0.2 * noise + (1.0 if name.endswith(("weight", "gamma")) else 0.0))
    for name, value in model.named_buffers():
        if name.endswith("running_mean"):
            value.copy_(0.3 * torch.randn(value.shape, generator=generator))
        elif name.endswith("running_var"):
            value.copy_(0.5 + torch.rand(value.shape, generator=generator))
    return model


def small_cnn() -> nn.Module:
    return lively(
        nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(6, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(0.5),
            nn.Linear(8, CLASSES),
        )
    )


@case
def resnet() -> Case:
    from torchvision.models.resnet import BasicBlock, ResNet

    model = ResNet(BasicBlock, [1, 1, 0, 0], num_classes=CLASSES)
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, CLASSES)
    return Case(lively(model), images())


@case
def bottleneck_with_groups() -> Case:
    from torchvision.models.resnet import Bottleneck, ResNet

    model = ResNet(Bottleneck, [1, 0, 0, 0], num_classes=CLASSES, groups=4, width_per_group=4)
    model.layer2, model.layer3, model.layer4 = nn.Identity(), nn.Identity(), nn.Identity()
    model.fc = nn.Linear(256, CLASSES)
    return Case(lively(model), images())


@case
def depthwise() -> Case:
    return Case(
        lively(
            nn.Sequential(
                nn.Conv2d(3, 8, 1),
                nn.Conv2d(8, 8, 3, groups=8, bias=False),
                nn.BatchNorm2d(8),
                nn.Hardswish(),
                nn.Conv2d(8, 12, 3, groups=2, stride=2),
                nn.SiLU(),
                nn.AdaptiveAvgPool2d(1),
                nn.Flatten(),
                nn.Linear(12, CLASSES),
            )
        ),
        images(),
    )


@case
def vgg_without_batchnorm() -> Case:
    features = [nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2)]
    features += [nn.Conv2d(6, 8, 3, padding=1), nn.ReLU(True), nn.MaxPool2d(2), nn.Flatten()]
    head = [nn.Linear(8 * 16, 16), nn.ReLU(True), nn.Dropout(0.5), nn.Linear(16, CLASSES)]
    return Case(lively(nn.Sequential(*features, *head)), images())


@case
def transposed_and_3d() -> Case:
    model = nn.Sequential(
        nn.ConvTranspose2d(3, 4, 3, stride=2),
        nn.Unflatten(1, (2, 2)),
        nn.Conv3d(2, 4, (2, 3, 3), stride=(1, 4, 4)),
        nn.GELU(),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(4, CLASSES),
    )
    return Case(lively(model), images())


@case
def one_dimensional() -> Case:
    model = nn.Sequential(nn.Flatten(2), nn.Conv1d(3, 6, 9, stride=8), nn.ReLU(), nn.Flatten(), nn.LazyLinear(CLASSES))
    model(images())
    return Case(lively(model), images())


@case
def vit_timm() -> Case:
    import timm

    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=16, depth=2, num_heads=2, num_classes=CLASSES
    )
    return Case(lively(model), images())


@case
def vit_torchvision() -> Case:
    from torchvision.models import VisionTransformer

    model = VisionTransformer(
        image_size=16, patch_size=8, num_layers=2, num_heads=2, hidden_dim=16, mlp_dim=24, num_classes=CLASSES
    )
    return Case(lively(model), images())


@case
def swin_torchvision() -> Case:
    from torchvision.models import SwinTransformer

    model = SwinTransformer([2, 2], 8, [2, 1], [2, 2], [4, 4], stochastic_depth_prob=0.2, num_classes=CLASSES)
    return Case(lively(model), images(side=32))


@case
def swin_timm() -> Case:
    import timm

    model = timm.create_model(
        "swin_tiny_patch4_window7_224",
        img_size=32,
        patch_size=2,
        window_size=4,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(1, 2),
        num_classes=CLASSES,
    )
    return Case(lively(model), images(side=32))


@case
def convnext() -> Case:
    import timm

    model = timm.create_model(
        "convnext_atto", depths=(1, 1, 1, 1), dims=(4, 6, 8, 10), ls_init_value=1.0, num_classes=CLASSES
    )
    return Case(lively(model), images(side=32))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 24, batch_first=True)
        self.patches = nn.Conv2d(3, 16, 8, stride=8)
        self.encoder = nn.TransformerEncoder(layer, 1)
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.patches(x).flatten(2).mT).mean(1))


@case
def transformer_encoder() -> Case:
    return Case(lively(Encoder()), images())


class CrossAttention(nn.Module):
    """Attention whose keys and values are of another width than its queries: three separate projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(12, 8)
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=6, batch_first=True)
        self.values = nn.Conv2d(3, 6, 8, stride=8)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        values = self.values(x).flatten(2).mT
        query = self.query(F.adaptive_avg_pool2d(x, 2).flatten(1))[:, None]
        return self.head(self.attention(query, values, values)[0][:, 0])


@case
def cross_attention() -> Case:
    return Case(lively(CrossAttention()), images())


class Tied(nn.Module):
    """Two linear layers share one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(3 * 16 * 16, 8)
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.stem(x.flatten(1))).relu()))


@case
def tied_weights() -> Case:
    return Case(lively(Tied()), images())


class TiedEmbedding(nn.Module):
    """Pixels become tokens; the embedding is the transposed output layer, so it is masked with it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, 8)
        self.mix = nn.Linear(8, 8)
        self.head = nn.Linear(8, CLASSES, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        tokens = ((x.mean(1).flatten(1) + 2).clamp(0, 3.99)).long()
        return self.head(self.mix(self.embedding(tokens)).relu().mean(1))


@case
def tied_embedding() -> Case:
    return Case(lively(TiedEmbedding()), images())


class EmbeddingFront(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding((x.flatten(1) * 2 + 4).clamp(0, 7.99).long()).mean(1))


@case
def embedding_front() -> Case:
    return Case(lively(EmbeddingFront()), images())


class Shared(nn.Module):
    """One block is called twice and registered under two names."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU())
        self.again = self.block
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.block(self.stem(x))).mean((2, 3)))


@case
def shared_submodule() -> Case:
    return Case(lively(Shared()), images())


class Recurrent(nn.Module):
    """Rows of the image are a sequence for an LSTM."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **more: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 4, stride=4)
        self.recurrent = kind(16, 6, num_layers=2, batch_first=True, bidirectional=True, **more)
        self.head = nn.Linear(2 * more.get("proj_size", 6), CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.recurrent(self.stem(x).permute(0, 2, 1, 3).flatten(2))[0].mean(1))


@case
def lstm_head() -> Case:
    return Case(lively(Recurrent(nn.LSTM, proj_size=4)), images())


@case
def gru_head() -> Case:
    return Case(lively(Recurrent(nn.GRU)), images())


@case
def weight_norm_head() -> Case:
    model = small_cnn()
    model[10] = parametrizations.weight_norm(model[10])
    return Case(model, images())


@case
def spectral_norm_head() -> Case:
    model = small_cnn()
    model[10] = parametrizations.spectral_norm(model[10])
    return Case(model, images())


@case
def pruned_and_made_permanent() -> Case:
    from torch.nn.utils import prune

    model = small_cnn()
    prune.random_unstructured(model[4], "weight", 0.5)
    prune.remove(model[4], "weight")
    return Case(model, images())


class Wrapped(nn.Module):
    """A network whose output isn't the bare logits."""

    def __init__(self, inner: nn.Module, kind: str) -> None:
        super().__init__()
        self.inner = inner
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        logits = self.inner(x)
        if self.kind == "mapping":
            return {"features": x, "logits": logits}
        if self.kind == "object":
            return SimpleNamespace(loss=None, logits=logits)
        return logits, logits * 2


@case
def partly_in_train_mode() -> Case:
    model = small_cnn().eval()
    model[1].train()
    return Case(model, images())


@case
def made_in_inference_mode() -> Case:
    with torch.inference_mode():
        model = small_cnn()
    return Case(model, images())


@case
def bfloat16_base() -> Case:
    return Case(vit_timm().model.bfloat16(), images().bfloat16())


@case
def compiled_in_place() -> Case:
    model = small_cnn()
    model.compile(backend="eager")
    return Case(model, images())


def compiled(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")


VARIANTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "mapping_output": lambda model: Wrapped(model, "mapping"),
    "object_output": lambda model: Wrapped(model, "object"),
    "tuple_output": lambda model: Wrapped(model, "tuple"),
    "frozen_parameters": lambda model: model.requires_grad_(False),
    "channels_last_base": lambda model: model.to(memory_format=torch.channels_last),
    "compiled_base": compiled,
    "data_parallel_base": nn.DataParallel,
    "distributed_base": nn.parallel.DistributedDataParallel,
    "distributed_and_compiled": lambda model: compiled(nn.parallel.DistributedDataParallel(model)),
}
ZOO |= {name: lambda change=change: Case(change(small_cnn()), images()) for name, change in VARIANTS.items()}
DTYPES = {"float64_base": torch.float64, "bfloat16_cnn": torch.bfloat16, "float16_base": torch.float16}
ZOO |= {name: lambda dtype=dtype: Case(small_cnn().to(dtype), images().to(dtype)) for name, dtype in DTYPES.items()}
NEEDS_PROCESS_GROUP = frozenset({"distributed_base", "distributed_and_compiled"})


def parametrized(model: nn.Module) -> bool:
    """Whether a network has parametrizations, which torch itself refuses to pickle."""
    return any(torch.nn.utils.parametrize.is_parametrized(module) for module in model.modules())
