"""The mask as a thing to keep: whose it is, applying, combining, counting."""

import copy
import json

import pytest
import torch
from tests.masking import zoo
from tests.masking.test_model_matrix import masked_at_random
from torch import nn

from modelfence.errors import InputError, MaskMismatchError
from modelfence.masking.digest import digest_of
from modelfence.masking.mask import LayerSparsity, Mask
from modelfence.masking.masked_model import MaskedModel
from modelfence.masking.unwrap import unwrap


def random_mask(model: nn.Module, seed: int = 0, share: float = 0.3) -> Mask:
    generator = torch.Generator().manual_seed(seed)
    kept = MaskedModel(model).kept()
    return Mask.of(
        model,
        {name: torch.rand(bits.shape, generator=generator) >= share for name, bits in kept.items()},
        {"seed": seed},
    )


def flipped_bit(model: nn.Module) -> nn.Module:
    model[10].bias.data[0] = torch.nextafter(model[10].bias[0], torch.tensor(9.0))
    return model


def another_buffer(model: nn.Module) -> nn.Module:
    model[1].running_mean[0] += 1e-3
    return model


def another_dtype(model: nn.Module) -> nn.Module:
    return model.double()


def another_shape(model: nn.Module) -> nn.Module:
    model[10] = nn.Linear(8, 7)
    return model


def other_names(model: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Sequential(*model))


OTHERS = {
    flipped_bit: "learned for another network or another state .* load the exact base",
    another_buffer: "learned for another network or another state",
    another_dtype: "learned for another network or another state",
    another_shape: r"'10.weight' has shape \(7, 8\), the mask \(5, 8\)",
    other_names: r"no parameter '0.weight' \(nor 2 more of the mask\)",
}


@pytest.mark.parametrize("change", OTHERS)
def test_another_base_is_refused_and_left_alone(change):
    mask = random_mask(zoo.small_cnn())
    other = change(zoo.small_cnn())
    before = digest_of(other)
    for apply in (mask.apply, mask.apply_):
        with pytest.raises(MaskMismatchError, match=OTHERS[change]) as caught:
            apply(other)
        assert "\n" not in str(caught.value)
    assert digest_of(other) == before


def test_bits_for_another_network_are_refused():
    model = zoo.small_cnn()
    with pytest.raises(MaskMismatchError, match="no parameter 'head.weight'"):
        Mask.of(model, {"head.weight": torch.ones(2, 2, dtype=torch.bool)})
    with pytest.raises(MaskMismatchError, match="'0.weight' has shape"):
        Mask.of(model, {"0.weight": torch.ones(2, 2, dtype=torch.bool)})


@pytest.mark.parametrize("wrap", [nn.DataParallel, zoo.compiled, lambda model: zoo.compiled(nn.DataParallel(model))])
def test_wrappers_make_no_difference(wrap):
    mask = random_mask(zoo.small_cnn())
    wrapped = wrap(zoo.small_cnn())
    assert Mask.of(wrapped, mask.kept).base_digest == mask.base_digest
    assert digest_of(mask.apply(wrapped)) == mask.folded_digest
    inner = unwrap(wrapped)
    assert mask.apply_(wrapped) is wrapped
    assert unwrap(wrapped) is inner
    assert digest_of(inner) == mask.folded_digest


@pytest.mark.parametrize("build", [zoo.small_cnn, lambda: zoo.small_cnn().to(memory_format=torch.channels_last)])
def test_in_place_keeps_storage_strides_and_optimizers(build):
    model = build()
    mask = random_mask(model)
    facts = [(value.data_ptr(), value.stride(), value.dtype) for value in model.state_dict().values()]
    parameters = list(map(id, model.parameters()))
    assert mask.apply_(model) is model
    assert [(value.data_ptr(), value.stride(), value.dtype) for value in model.state_dict().values()] == facts
    assert list(map(id, model.parameters())) == parameters
    assert digest_of(model) == mask.folded_digest
    mask.apply_(model)
    assert digest_of(model) == mask.folded_digest


def test_in_place_on_parameters_made_in_inference_mode():
    model = zoo.made_in_inference_mode().model
    mask = random_mask(model)
    mask.apply_(model)
    assert digest_of(model) == mask.folded_digest


def test_combination_keeps_what_every_mask_keeps():
    model = zoo.small_cnn()
    masks = [random_mask(model, seed) for seed in (1, 2, 3)]
    both = Mask.combine(masks, model)
    for name in both.kept:
        expected = masks[0].kept[name] & masks[1].kept[name] & masks[2].kept[name]
        assert torch.equal(both.kept[name], expected)
    assert both.base_digest == digest_of(model)
    assert both.metadata == {"combined": [{"seed": 1}, {"seed": 2}, {"seed": 3}]}
    assert digest_of(Mask.combine(masks[:1], model).apply(model)) == masks[0].folded_digest
    one_by_one = copy.deepcopy(model)
    for mask in masks:
        for name, bits in mask.kept.items():
            one_by_one.get_parameter(name).data.masked_fill_(~bits, 0)
    assert digest_of(one_by_one) == both.folded_digest


def test_combination_of_masks_that_name_different_layers():
    model = zoo.small_cnn()
    first = Mask.of(model, {"0.weight": torch.zeros(6, 3, 3, 3, dtype=torch.bool)})
    second = Mask.of(model, {"10.weight": torch.zeros(5, 8, dtype=torch.bool)})
    both = Mask.combine([first, second], model)
    assert both.sparsity() == [LayerSparsity("0.weight", 0, 162), LayerSparsity("10.weight", 0, 40)]


def test_combination_refuses_masks_of_other_bases_and_none():
    model = zoo.small_cnn()
    other = random_mask(flipped_bit(zoo.small_cnn()))
    with pytest.raises(MaskMismatchError, match="another network"):
        Mask.combine([random_mask(model), other], model)
    with pytest.raises(InputError, match="no mask to combine"):
        Mask.combine([], model)


def test_sparsity_counts():
    model = zoo.small_cnn()
    kept = MaskedModel(model).kept()
    kept["10.weight"][0, :3] = False
    kept["0.weight"][:] = False
    mask = Mask.of(model, kept)
    assert mask.sparsity() == [("0.weight", 0, 162), ("10.weight", 37, 40), ("4.weight", 432, 432)]
    assert mask.cut_share() == pytest.approx(165 / 634)
    assert Mask.of(model, {}).cut_share() == 0.0


def test_tied_weights_are_kept_once_and_cut_everywhere():
    model = zoo.tied_weights().model
    mask = Mask.of(model, masked_at_random(model).kept())
    assert sorted(mask.kept) == ["first.weight", "head.weight", "stem.weight"]
    assert mask.aliases == {"second.weight": "first.weight"}
    folded = mask.apply(model)
    assert folded.second.weight is folded.first.weight
    assert not folded.second.weight[~mask.kept["first.weight"]].any()


def test_metadata_is_added_and_the_mask_can_be_compared_and_hashed():
    mask = random_mask(zoo.small_cnn())
    more = mask.with_metadata(method="SAMap")
    assert more.metadata == {"seed": 0, "method": "SAMap"}
    assert mask.metadata == {"seed": 0}
    assert mask == mask  # noqa: PLR0124 (by identity: tensors have no truth value)
    assert mask != more
    assert len({mask, more}) == 2


def test_the_digest_is_what_its_docstring_says():
    """Written out a second time, on a model small enough to see through."""
    import hashlib

    model = nn.Linear(2, 1)
    model.weight.data, model.bias.data = torch.tensor([[1.0, -2.0]]), torch.tensor([0.5])
    text = hashlib.sha256()
    text.update(b"bias\0torch.float32\0(1,)\0" + bytes.fromhex("0000003f"))
    text.update(b"weight\0torch.float32\0(1, 2)\0" + bytes.fromhex("0000803f000000c0"))
    assert digest_of(model) == text.hexdigest()


def test_the_digest_ignores_order_and_layout_and_nothing_else():
    model = zoo.small_cnn()
    digest = digest_of(model)
    assert digest_of(zoo.small_cnn().to(memory_format=torch.channels_last)) == digest
    turned = zoo.small_cnn()
    turned._modules = dict(reversed(turned._modules.items()))
    assert digest_of(turned) == digest
    assert digest_of(zoo.small_cnn().train()) == digest_of(zoo.small_cnn().requires_grad_(False)) == digest
    seen = {digest} | {digest_of(change(zoo.small_cnn())) for change in OTHERS}
    assert len(seen) == 1 + len(OTHERS)
    minus = zoo.small_cnn()
    minus[10].bias.data[0] = 0.0
    plus = copy.deepcopy(minus)
    plus[10].bias.data[0] = -0.0
    assert digest_of(plus) != digest_of(minus)


def test_metadata_must_be_json(tmp_path):
    mask = random_mask(zoo.small_cnn())
    for bad in ({"x": torch.zeros(1)}, {"x": float("nan")}, {("a",): 1}):
        with pytest.raises(InputError, match="metadata can't be saved"):
            mask.with_metadata(bad=bad).save(tmp_path)
    assert not any(tmp_path.iterdir())
    odd = mask.with_metadata(ranks={2: "two", 10: "ten"}, pair=(1, 2), name="Zoë \u2028 \x00")
    loaded = Mask.load(odd.save(tmp_path)).metadata
    assert loaded == json.loads(json.dumps(odd.metadata))
