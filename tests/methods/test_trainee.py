"""Small networks with their optimizer: one step, and a state from which the next step is the same."""

import torch
from tests.methods.generating import fabric
from torch import Tensor, nn

from modelfence.methods.state import load_state, save_state
from modelfence.methods.trainee import Companions, Trainee

IMAGES = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def trainee() -> Trainee[nn.Module]:
    return Trainee(network(), lambda some: torch.optim.Adam(some, lr=0.1), fabric())


def loss(one: Trainee[nn.Module], step: int) -> Tensor:
    return one.network(IMAGES + step).square().mean()


def test_a_step_is_the_optimizers():
    plain, one = network(), trainee()
    adam = torch.optim.Adam(plain.parameters(), lr=0.1)
    for step in range(3):
        adam.zero_grad()
        plain(IMAGES + step).square().mean().backward()
        adam.step()
        one.descend(loss(one, step))
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(one.network.state_dict()[name], value)
    assert all(value.grad is None for value in one.network.parameters())


def test_gradients_reach_the_network_alone_and_can_be_adjusted():
    one, other = trainee(), nn.Linear(1, 1)
    before = [value.detach().clone() for value in one.network.parameters()]

    def stop() -> None:
        one.network[0].weight.grad.zero_()

    one.descend(other(one.network(IMAGES)).square().mean(), adjust=stop)
    assert all(value.grad is None for value in other.parameters())
    changed = [not torch.equal(old, new) for old, new in zip(before, one.network.parameters(), strict=True)]
    assert changed[0] is False
    assert changed[-1] is True


def test_a_restored_one_goes_on_bit_by_bit(tmp_path):
    whole, cut, rest = (Companions(a=one, b=trainee()) for one in (trainee(), trainee(), trainee()))
    for step in range(4):
        for name in "ab":
            whole._parts[name].descend(loss(whole._parts[name], step))
    cut._parts["a"].descend(loss(cut._parts["a"], 0))  # b has no moments yet
    save_state(tmp_path / "file", cut.state(), {})
    rest.load(load_state(tmp_path / "file")[0])
    for step in range(4):
        for name in "ab" if step else "b":
            rest._parts[name].descend(loss(rest._parts[name], step))
    assert whole.state().keys() == rest.state().keys()
    assert all(torch.equal(rest.state()[name], value) for name, value in whole.state().items())
