"""The masked model: its private copy, its precision and layout, checkpointing, compilation."""

import copy

import pytest
import timm
import torch
import torchvision
from tests.masking import zoo
from tests.masking.test_model_matrix import masked_at_random
from torch import Tensor, nn

from modelfence.masking.mask import Mask
from modelfence.masking.masked_model import MaskedModel

BF16 = torch.bfloat16


def densenet() -> nn.Module:
    return zoo.lively(torchvision.models.DenseNet(4, (2, 2), 8, num_classes=zoo.CLASSES, memory_efficient=True))


def checkpointed_timm(name: str, **arguments: object) -> nn.Module:
    model = zoo.lively(timm.create_model(name, num_classes=zoo.CLASSES, **arguments))
    model.set_grad_checkpointing(True)
    return model


CHECKPOINTED = {
    "timm ViT": lambda: checkpointed_timm("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=2, num_heads=2),
    "timm ConvNeXt": lambda: checkpointed_timm("convnext_atto", depths=(1, 1, 1, 1), dims=(4, 6, 8, 10)),
    "torchvision DenseNet": densenet,
}


def flags(model: nn.Module) -> list[bool]:
    names = ("grad_checkpointing", "memory_efficient")
    return [vars(module)[name] for module in model.modules() for name in names if name in vars(module)]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_gradients_are_those_without_activation_checkpointing(name):
    model = CHECKPOINTED[name]()
    plain = copy.deepcopy(model)
    for module in plain.modules():
        for flag in ("grad_checkpointing", "memory_efficient"):
            if getattr(module, flag, None) is True:
                setattr(module, flag, False)
    assert any(flags(model))
    assert not any(flags(plain))
    one, other = masked_at_random(model), masked_at_random(plain)
    images = zoo.images(side=32)
    for masked in (one, other):
        masked(images).square().sum().backward()
    for name_, score, expected in zip(one.names, one.scores, other.scores, strict=True):
        assert score.grad is not None, name_
        assert torch.equal(score.grad, expected.grad), name_
    assert any(flags(model))  # the user's own keeps it


def test_at_the_start_nothing_is_cut():
    model, images = zoo.resnet()
    masked = MaskedModel(model)
    assert torch.equal(masked(images), masked.teacher(images))
    assert masked.kept_share() == 1.0


def test_train_mode_does_not_reach_the_base_nor_its_dropout():
    model, images = zoo.small_cnn().train(), zoo.images()
    masked = MaskedModel(model)
    for mode in (True, False):
        assert masked.train(mode) is masked
        assert masked.training is mode
        assert not any(module.training for module in masked.base.modules())
        assert torch.equal(masked(images), masked(images))
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize("dtype", [None, BF16])
def test_layout_and_dtype_of_the_copy_do_not_reach_the_mask(dtype):
    model = zoo.small_cnn()
    masked = MaskedModel(model, dtype=dtype, channels_last=True)
    weight = masked.base[4].weight
    assert weight.is_contiguous(memory_format=torch.channels_last)
    assert weight.dtype == (dtype or torch.float32)
    assert masked.base[1].weight.dtype == torch.float32
    assert model[4].weight.is_contiguous()
    chosen = torch.randn(8, 6, 3, 3) > 0
    with torch.no_grad():
        masked.scores[1].copy_(chosen)
    kept = masked.kept()["4.weight"]
    assert kept.is_contiguous()
    assert torch.equal(kept, chosen)
    assert masked.scores[1].dtype == torch.float32
    assert masked.kept_share() == pytest.approx(1 - int((~chosen).sum()) / sum(s.numel() for s in masked.scores))


@pytest.mark.parametrize("name", sorted(zoo.ZOO.keys() - zoo.NEEDS_PROCESS_GROUP))
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
def test_every_network_learns_in_bfloat16_from_float32_images(name):
    model, images = zoo.ZOO[name]()
    masked = MaskedModel(model, dtype=BF16, channels_last=True)
    images = images.float()
    with torch.autocast("cpu", dtype=BF16):
        passes = masked(images, batch_mode=[torch.cat([images, images.flip(3), 2 * images])])
        teacher = masked.teacher(images)
    reference = MaskedModel(model)(images).detach().float()
    error = (passes[0].detach().float() - reference).abs().max() / reference.abs().max()
    assert error < 0.1
    assert torch.allclose(teacher.float(), passes[0].float(), atol=0.05 * float(reference.abs().max()))
    torch.cat(passes).float().square().sum().backward()
    assert all(score.grad is not None and score.grad.isfinite().all() for score in masked.scores)


@pytest.mark.parametrize("dtype", [torch.float64, BF16, torch.float16])
def test_a_base_of_another_dtype_takes_the_float32_images_of_a_domain(dtype):
    model = zoo.small_cnn().to(dtype)
    masked = MaskedModel(model)
    logits = masked(zoo.images(), batch_mode=[zoo.images()])
    assert all(part.dtype == dtype for part in (*logits, masked.teacher(zoo.images())))


def test_a_layer_that_the_logits_do_not_depend_on_gets_no_gradient():
    model = zoo.small_cnn()
    model.add_module("auxiliary", nn.Identity())
    model.auxiliary.unused = nn.Linear(3, 2)
    masked = MaskedModel(model)
    masked(zoo.images()).sum().backward()
    assert "auxiliary.unused.weight" in masked.names
    without = [name for name, score in zip(masked.names, masked.scores, strict=True) if score.grad is None]
    assert without == ["auxiliary.unused.weight"]


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_a_layer_without_values_is_no_hindrance_in_several_processes():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2))
    model.add_module("empty", nn.Identity())
    model.empty.weights = nn.Linear(0, 3)
    masked = MaskedModel(model)
    alone = masked(torch.ones(2, 1, 2, 2))
    masked.world = 2
    logits = masked(torch.ones(2, 1, 2, 2))
    assert torch.equal(alone, logits)
    logits.sum().backward()
    assert all(score.grad is not None for score in masked.scores)


def test_the_whole_student_compiles_into_one_graph():
    torch._dynamo.reset()
    masked = masked_at_random(zoo.small_cnn())
    images = zoo.images()
    expected = masked(images)
    expected.square().sum().backward()
    gradients = [score.grad.clone() for score in masked.scores]
    masked.zero_grad()
    compiled: Tensor = torch.compile(masked, backend="aot_eager", fullgraph=True)(images)
    torch.testing.assert_close(compiled, expected)
    compiled.square().sum().backward()
    for score, gradient in zip(masked.scores, gradients, strict=True):
        torch.testing.assert_close(score.grad, gradient)


def test_in_place_application_reaches_a_compiled_model_without_moving_its_storage():
    torch._dynamo.reset()
    compiled = torch.compile(zoo.small_cnn().eval(), backend="eager", fullgraph=True)
    inner, images = compiled._orig_mod, zoo.images()
    whole = compiled(images)
    mask = Mask.of(compiled, masked_at_random(compiled).kept())
    folded = mask.apply(compiled)
    storage = [value.data_ptr() for value in inner.state_dict().values()]
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert mask.apply_(compiled) is compiled
        after = compiled(images)
    assert [value.data_ptr() for value in inner.state_dict().values()] == storage
    assert torch.equal(after, folded(images))
    assert not torch.equal(after, whole)
