"""The user's own network inside the wrappers that training tools put around it."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

_PREFIXES = ("module.", "_orig_mod.", "_forward_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """Take off ``torch.compile``, DataParallel, DistributedDataParallel and Fabric wrappers, however nested.

    Args:
        model: A network, wrapped or not; it isn't changed.

    Returns:
        The innermost network, the same object that was wrapped.

    Example:
        >>> inner = nn.Linear(2, 2)
        >>> unwrap(DataParallel(inner)) is inner
        True
    """
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif "_forward_module" in model._modules:
            model = model.get_submodule("_forward_module")
        else:
            return model


def plain_name(name: str) -> str:
    """Strip wrapper prefixes from a parameter's name.

    Example:
        >>> plain_name("module._orig_mod.conv.weight")
        'conv.weight'
    """
    while name.startswith(_PREFIXES):
        name = name.split(".", 1)[1]
    return name
