"""How well what can be measured without labels followed what labels tell."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from modelfence.evaluation.text import percent, shorten
from modelfence.report import style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SOURCE, _TARGET, _WATCH = "source_agreement", "target_agreement:", "watch:"


class Pair(NamedTuple):
    """A proxy and an accuracy that it stands for, at the steps that have both.

    Attributes:
        proxy: Its key in the history.
        domain: Name of the domain watched.
        steps: Steps of the run.
        agreement: Share of the proxy's images on which the model agreed with the original one, 0..1.
        accuracy: Share of the watched images that it was right on, 0..1.
    """

    proxy: str
    domain: str
    steps: list[int]
    agreement: list[float]
    accuracy: list[float]

    @property
    def widest(self) -> int:
        """Index of the step with the largest difference."""
        apart = [abs(one - other) for one, other in zip(self.agreement, self.accuracy, strict=True)]
        return apart.index(max(apart))

    @property
    def apart(self) -> float:
        """The largest difference, 0..1."""
        return abs(self.agreement[self.widest] - self.accuracy[self.widest])


def pairs_of(history: Sequence[Mapping[str, Any]], authorized: Sequence[str]) -> list[Pair]:
    """Pair proxies with the accuracies on watched domains.

    A watched domain that counts as authorized goes with the agreement on images near the source; any other with the
    agreement on the unauthorized images of its name, or, without such, on all there are.

    Args:
        history: Records of the run.
        authorized: Names of the domains that count as authorized.

    Example:
        >>> row = {"step": 50, "source_agreement": 0.9, "target_agreement:usps": 0.5}
        >>> [found] = pairs_of([{**row, "watch:usps": 0.25}], ["mnist"])
        >>> found.proxy, found.domain, found.apart
        ('target_agreement:usps', 'usps', 0.25)
    """
    keys = list(dict.fromkeys(key for row in history for key in row))
    found = []
    for name in (key.removeprefix(_WATCH) for key in keys if key.startswith(_WATCH)):
        targets = [key for key in keys if key.startswith(_TARGET)]
        own = [key for key in targets if key == f"{_TARGET}{name}"]
        for proxy in [key for key in keys if key == _SOURCE] if name in authorized else own or targets:
            rows = _first_run([row for row in history if proxy in row and f"{_WATCH}{name}" in row])
            if rows:
                columns = [[float(row[key]) for row in rows] for key in ("step", proxy, f"{_WATCH}{name}")]
                found.append(Pair(proxy, name, [int(step) for step in columns[0]], columns[1], columns[2]))
    return found


def _first_run(rows: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Leave out what comes after the steps begin anew, with the next of several masks."""
    again = (at for at in range(1, len(rows)) if rows[at]["step"] <= rows[at - 1]["step"])
    return rows[: next(again, len(rows))]


def agreements(agreement: Mapping[str, float]) -> list[str]:
    """Say how far a model agrees with the original, which needs no labels.

    Args:
        agreement: What :func:`agreement_of` returned.

    Example:
        >>> agreements({"source_agreement": 0.9})
        ['It agrees with the original model on 90.0 % of the images near the source.']
    """
    return [
        f"It agrees with the original model on {percent(value)} % of {images_of(key)}."
        for key, value in agreement.items()
    ]


def agreement_of(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the agreements with the original model in a record of a run by their keys, 0..1; empty without any.

    Example:
        >>> agreement_of({"step": 2, "source_agreement": 0.9, "gap": 0.9})
        {'source_agreement': 0.9}
    """
    return {key: float(value) for key, value in row.items() if key == _SOURCE or key.startswith(_TARGET)}


def sentence(pairs: Sequence[Pair]) -> str:
    """Say where a proxy was farthest from the truth.

    Args:
        pairs: At least one.

    Example:
        >>> sentence([Pair("source_agreement", "mnist", [50, 100], [0.9, 0.8], [0.9, 0.7])])[:85]
        'The widest difference: at step 100 the model agreed with the original on 80.0 % of th'
    """
    worst = max(pairs, key=lambda pair: pair.apart)
    at = worst.widest
    return (
        f"The widest difference: at step {worst.steps[at]} the model agreed with the original on "
        f"{percent(worst.agreement[at])} % of {images_of(worst.proxy)}, and was right on "
        f"{percent(worst.accuracy[at])} % of {worst.domain}, {percent(worst.apart)} points apart. Agreement counts "
        "what the original model got wrong too."
    )


def images_of(proxy: str) -> str:
    """Say which images a proxy is measured on.

    Example:
        >>> images_of("source_agreement"), images_of("target_agreement:usps")
        ('the images near the source', 'the unlabelled images of usps')
    """
    name = proxy.removeprefix(_TARGET)
    if proxy == _SOURCE:
        return "the images near the source"
    return "the images in random styles" if name == "neighbours" else f"the unlabelled images of {name}"


@style.styled()
def proxy_figure(pairs: Sequence[Pair]) -> "Figure":
    """Draw every proxy and the accuracy that it stands for over the steps, a panel each.

    Args:
        pairs: At least one.

    Returns:
        Panels one below the other: the accuracy is a full line, the proxy a dashed one.
    """
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(style.WIDTH, 1.5 * len(pairs) + 0.75), layout="constrained")
    grid = figure.subplots(len(pairs), 1, sharex=True, squeeze=False)[:, 0]
    for axes, pair in zip(grid, pairs, strict=True):
        colour = style.AUTHORIZED if pair.proxy == _SOURCE else style.UNAUTHORIZED
        dot = "." if len(pair.steps) == 1 else None
        axes.plot(pair.steps, [100 * one for one in pair.accuracy], color=colour, linewidth=1.6, marker=dot)
        proxy = [100 * one for one in pair.agreement]
        axes.plot(pair.steps, proxy, color=style.MUTED, linewidth=1.4, linestyle="--", marker=dot)
        axes.set_title(f"{shorten(pair.domain)}, and {shorten(images_of(pair.proxy), 48)}")
        axes.set_ylim(0, 101)
        axes.grid(axis="y")
        axes.set_axisbelow(True)
        axes.tick_params(length=0)
    grid[-1].xaxis.set_major_locator(MaxNLocator(integer=True))
    grid[-1].tick_params(axis="x", pad=8)  # clear of the lowest label of the other axis
    grid[-1].set_xlabel("step")
    handles = [
        Line2D([], [], color=style.INK, label="accuracy (percent)"),
        Line2D([], [], color=style.MUTED, linestyle="--", label="agreement with the original model"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=2)
    return figure
