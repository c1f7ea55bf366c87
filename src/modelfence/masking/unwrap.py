"""The user's own network inside the wrappers that training tools put around it."""

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from modelfence.errors import InputError


def require_network(model: object, name: str = "model") -> nn.Module:
    """Refuse what isn't a network.

    Args:
        model: What was given for one.
        name: The argument that it was given for.

    Returns:
        The same object.

    Raises:
        InputError: It isn't a ``torch.nn.Module``.

    Example:
        >>> require_network(nn.Linear)
        Traceback (most recent call last):
        modelfence.errors.InputError: model= is the class Linear; a torch.nn.Module is needed, so call it first
    """
    if isinstance(model, nn.Module):
        return model
    if isinstance(model, type):
        raise InputError(f"{name}= is the class {model.__name__}; a torch.nn.Module is needed, so call it first")
    raise InputError(f"{name}= is {type(model).__name__}; a torch.nn.Module is needed")


def unwrap(model: nn.Module) -> nn.Module:
    """Take off ``torch.compile``, DataParallel, DistributedDataParallel and Fabric wrappers, however nested.

    Args:
        model: A network, wrapped or not; it isn't changed.

    Returns:
        The innermost network, the same object that was wrapped.

    Raises:
        InputError: It isn't a network.

    Example:
        >>> inner = nn.Linear(2, 2)
        >>> unwrap(DataParallel(inner)) is inner
        True
    """
    require_network(model)
    while True:
        if isinstance(model, DataParallel | DistributedDataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model.get_submodule("_orig_mod")
        elif "_forward_module" in model._modules:
            model = model.get_submodule("_forward_module")
        else:
            return model
