"""Which cells the tables have, and their rows from results that cost nothing."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.bench.fakes import result

from modelfence.bench import methods
from modelfence.bench.cells import Cell, Cells
from modelfence.bench.figures import matrix_figure
from modelfence.bench.request import Request, Results, saved_requests
from modelfence.bench.tables.catalog import FOUR, KINDS, request
from modelfence.bench.tables.convergence import confined_at, curve_of
from modelfence.errors import InputError


def made(tmp_path: Path, asked: Request, numbers: object) -> Results:
    store = Cells(tmp_path)
    for cell in KINDS[asked.table].cells(asked):
        found = numbers(cell)
        if found is not None:
            store.save(cell, found)
    return Results(store)


def digits(cell: Cell) -> dict[str, object]:
    if cell.method == "SL":
        domains = {cell.source: (0.99, 0.99), **dict.fromkeys(cell.targets, (0.5, 0.5))}
        record = result(**domains)
        for score in record["evaluation"]["scores"]:
            score["before"] = None
        return record
    after = 0.97 - 0.01 * cell.seed
    return result(**{cell.source: (0.99, after), **dict.fromkeys(cell.targets, (0.5, 0.1 + 0.02 * cell.seed))})


def test_the_digit_tables_have_a_cell_for_each_pair_method_and_seed() -> None:
    for setting, pairs in (("sa", 12), ("sf", 12), ("df", 4)):
        asked = request("digits", budget="cpu", setting=setting)
        cells = KINDS["digits"].cells(asked)
        assert len(cells) == pairs * len(asked.methods) * len(asked.seeds)
        assert len({cell.name for cell in cells}) == len(cells)
        assert [cell.seed for cell in cells] == sorted(cell.seed for cell in cells)


def test_every_budget_has_the_same_cells_for_the_four_tables() -> None:
    for table, setting in FOUR:
        names = []
        for budget in ("smoke", "cpu", "full"):
            asked = request(table, budget=budget, setting=setting, seeds=[0])
            names.append({(one.method, one.source, one.targets) for one in KINDS[table].cells(asked)})
        assert names[0] == names[1] == names[2]


def learned(cell: Cell) -> dict[str, object]:
    """Like ``digits``, with a history: CUTI is where it ends when it is first measured."""
    rows = [(20, 0.3), (40, 0.3)] if cell.method == "CUTI" else [(10, 0.5), (20, 0.3), (30, 0.1)]
    history = [{"seconds": seconds, f"target_accuracy:{cell.targets[0]}": value} for seconds, value in rows]
    return digits(cell) if cell.method == "SL" else {**digits(cell), "history": history}


def test_a_digit_table_says_how_long_the_methods_took_to_the_same_target(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", chosen=["SL", "SAMap", "CUTI"], seeds=[0, 1])
    lacking = asked.what[0]

    def numbers(cell: Cell) -> dict[str, object] | None:
        missing = (cell.method, cell.seed) == ("CUTI", 1) and f"{cell.source}>{cell.targets[0]}" == lacking
        return None if missing else learned(cell)

    notes = KINDS["digits"].build(asked, made(tmp_path / "some", asked, numbers)).table.notes
    (note,) = (note for note in notes if note.startswith("Seconds of learning"))
    assert (
        "mean over 23 pairs and seeds: SA-MAP 20 (0 of 23 when first measured), CUTI 20 (23 of 23 when first measured)."
        in note
    )
    alone = request("digits", budget="cpu", chosen=["SAMap"], seeds=[0])
    notes = KINDS["digits"].build(alone, made(tmp_path / "alone", alone, learned)).table.notes
    assert not any(note.startswith("Seconds of learning") for note in notes)


def test_a_digit_table_shows_ours_beside_the_paper_s(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", chosen=["SL", "SAMap"], seeds=[0, 1])
    table = KINDS["digits"].build(asked, made(tmp_path, asked, digits)).table
    assert table.header[:7] == ["method", "source", "", "MT", "US", "SN", "MM"]
    assert table.rows[0] == ["SL", "MT", "ours", "99.0", "50.0", "50.0", "50.0", "-", "-", "-", "-"]
    after, drop = "99.0 => 96.5 ± 0.7", "50.0 => 11.0 ± 1.4"
    # drops 2/99 and 3/99 of the source, 80 and 76 % of the targets; ratios 0.0253 and 0.0399; closures 1 and 0.95
    numbers = ["2.5 ± 0.7", "78.0 ± 2.8", "0.033 ± 0.010", "0.975 ± 0.035"]
    assert table.rows[4] == ["SA-MAP", "MT", "ours", after, drop, drop, drop, *numbers]
    paper = ["98.9 => 99.0", "96.3 => 14.3", "36.3 => 18.9", "64.9 => 10.7", "-0.1", "77.8", "-0.001"]
    assert table.rows[5][:10] == ["SA-MAP", "MT", "paper", *paper]
    assert table.rows[-2] == ["SA-MAP", "mean", "ours", "", "", "", "", *numbers]
    assert table.rows[-1][:3] == ["SA-MAP", "mean", "paper"]
    assert table.rows[-1][7:10] == ["-0.3", "81.1", "-0.003"]
    ours = {"method": "SAMap", "source": "mnist", "who": "ours", "domain": "usps", "quantity": "accuracy after"}
    found = [one for one in table.records if ours.items() <= one.items()]
    assert [(one["mean"], one["seeds"]) for one in found] == [(0.11, 2)]


def test_an_unfinished_or_failed_cell_is_marked_and_its_row_has_no_drops(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", chosen=["SAMap"], seeds=[0])
    gone = ("usps", ("mnist",)), ("svhn", ("mnist",))
    results = made(tmp_path, asked, lambda cell: None if (cell.source, cell.targets) in gone else digits(cell))
    failed = next(cell for cell in KINDS["digits"].cells(asked) if (cell.source, cell.targets) == gone[1])
    results.store.fail(failed, InputError("no"))
    rows = {(row[1], row[2]): row for row in KINDS["digits"].build(asked, results).table.rows}
    assert rows["US", "ours (...)"][3] == "..."
    assert rows["SN", "ours (failed)"][3] == "failed"
    assert rows["SN", "ours (failed)"][7:] == ["-"] * 4
    assert rows["mean", "ours"][7:] == ["-"] * 4
    assert rows["MT", "ours"][7] == "2.0"


def test_the_data_free_table_takes_all_targets_of_one_mask(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", setting="df")
    table = KINDS["digits"].build(asked, made(tmp_path, asked, digits)).table
    assert table.rows[0][2:7] == ["ours", "99.0 => 97.0", *["50.0 => 10.0"] * 3]


def test_the_ownership_table(tmp_path: Path) -> None:
    asked = request("ownership", budget="cpu", chosen=["SL", "SAMap"], what=["mnist"])

    def verdict(cell: Cell) -> dict[str, object]:
        lost = 0.0 if cell.method == "SL" else 0.9
        facts = {"accuracy_clean": 0.98, "accuracy_marked": 0.98 - lost, "gap": lost}
        return {**result(), "verdict": {**facts, "p_value": 1 - lost, "holds": lost > 0.5}}

    table = KINDS["ownership"].build(asked, made(tmp_path, asked, verdict)).table
    assert table.rows == [
        ["SL", "MT", "98.0", "98.0", "0.0", "0 of 1", "1.0e+00", "99.4", "99.2", "0.2"],
        ["SL", "mean", "", "", "0.0", "", "", "", "", "0.2"],
        ["SA-MAP", "MT", "98.0", "8.0", "90.0", "1 of 1", "1.0e-01", "98.3", "9.7", "88.6"],
        ["SA-MAP", "mean", "", "", "90.0", "", "", "", "", "88.6"],
    ]


@pytest.mark.parametrize("why", ["...", "failed"])
@pytest.mark.parametrize("table", ["ownership", "objects", "losses", "convergence", "tsne", "digits"])
def test_a_row_that_lacks_a_seed_says_so(tmp_path: Path, table: str, why: str) -> None:
    chosen, what = (["SAMap"], ["mnist"]) if table == "ownership" else (["SFMap"], ["mnist>usps"])
    setting = "sa" if table == "ownership" else "sf"
    asked = request(table, setting=setting, budget="cpu", chosen=chosen, seeds=[0, 1], what=what)
    points = {"x": [0.0, 1.0], "y": [0.0, 1.0], "labels": [0, 0]}
    watched = {"watch:mnist": 0.9, "watch:usps": 0.1}
    record = {
        **result(mnist=(0.9, 0.8), usps=(0.5, 0.1)),
        "history": [{"step": 25, "seconds": 1.0, **watched}],
        "watched_before": watched,
        "points": dict.fromkeys(("mnist", "usps"), points),
        "verdict": {"accuracy_clean": 0.9, "accuracy_marked": 0.1, "gap": 0.8, "p_value": 0.0, "holds": True},
    }
    results = made(tmp_path, asked, lambda cell: record if cell.seed == 0 else None)
    if why == "failed":
        for cell in KINDS[table].cells(asked):
            if cell.seed:
                results.store.fail(cell, InputError("no"))
    rows = KINDS[table].build(asked, results).table.rows
    own = [row for row in rows if row[1] != "mean" and "paper" not in row[:3]]
    assert own
    assert all(any(word.endswith(f"({why})") for word in row[:3]) for row in own)
    assert not any("±" in text for row in own for text in row)
    assert [row[4] for row in rows if table == "ownership" and row[1] == "mean"] in ([], ["..."])


def test_the_source_model_has_a_cell_for_each_pair_whatever_is_asked_for_beside_it() -> None:
    both, one = (
        request("digits", budget="cpu", chosen=["SL"], what=what)
        for what in (["mnist>usps", "mnist>svhn"], ["mnist>usps"])
    )
    assert set(KINDS["digits"].cells(one)) < set(KINDS["digits"].cells(both))


def test_objects_show_the_degradation_beside_the_paper_s(tmp_path: Path) -> None:
    asked = request("objects", budget="cpu", setting="sf", chosen=["SFMap"], what=["cifar10>stl10"])
    results = made(tmp_path, asked, lambda _: result(cifar10=(0.8, 0.76), stl10=(0.6, 0.3)))
    table = KINDS["objects"].build(asked, results).table
    pair = ["SF-MAP", "CIFAR10 -> STL10"]
    assert table.rows == [[*pair, "80.0", "76.0", "60.0", "30.0", "46.0", "5.0", "50.0", "0.100", "38.0"]]


def test_the_ablation_has_the_source_model_and_three_losses(tmp_path: Path) -> None:
    asked = request("losses", budget="cpu", what=["mnist>usps"])
    cells = KINDS["losses"].cells(asked)
    assert [cell.options for cell in cells] == [(), (("terms", "source"),), (("terms", "target"),)]
    assert cells[0] in KINDS["digits"].cells(request("digits", budget="cpu", setting="sf"))
    results = made(tmp_path, asked, lambda _: result(mnist=(0.8, 0.76), usps=(0.6, 0.3)))
    table = KINDS["losses"].build(asked, results).table
    assert [row[2] for row in table.rows] == ["none: SL", "L1 alone: keep", "L2 alone: unlearn", "L1 + L2"]
    assert table.rows[0][4:] == ["80.0", "-", "60.0", "20.0", "-", "-", "-"]


def test_curves_and_shares_of_steps(tmp_path: Path) -> None:
    asked = request("convergence", budget="cpu", chosen=["SFMap"])
    history = [{"step": step, "watch:mnist": 0.9, "watch:usps": 1 - step / 200} for step in (25, 50, 75, 100)]
    watched = {"watch:mnist": 0.9, "watch:usps": 1.0}
    results = made(tmp_path, asked, lambda _: {**result(), "history": history, "watched_before": watched})
    built = KINDS["convergence"].build(asked, results)
    assert built.table.rows[0] == ["SF-MAP", "MT", "90.0", "90.0", "90.0", "90.0", "0 of 1", "-"]
    assert built.table.rows[1] == ["SF-MAP", "US", "87.5", "75.0", "62.5", "50.0", "", ""]
    assert curve_of(history, "usps")[0] == (25, 0.875)


@pytest.mark.parametrize(
    ("source", "usps", "svhn", "step"),
    [
        ((0.86, 0.86, 0.86), (0.16, 0.14, 0.1), (0.1, 0.1, 0.1), 50),  # 95 % of 0.9 is 0.855
        ((0.86, 0.85, 0.86), (0.16, 0.14, 0.1), (0.1, 0.1, 0.1), 75),  # the source must be kept at that moment
        ((0.86, 0.86, 0.86), (0.1, 0.1, 0.1), (0.16, 0.16, 0.15), 75),  # all targets must be closed
        ((0.85, 0.85, 0.85), (0.1, 0.1, 0.1), (0.1, 0.1, 0.1), None),
    ],
)
def test_when_a_method_first_confined_the_model(
    source: tuple[float, ...], usps: tuple[float, ...], svhn: tuple[float, ...], step: int | None
) -> None:
    rows = zip((25, 50, 75), source, usps, svhn, strict=True)
    history = [
        {"step": step, "seconds": step / 10, "watch:mnist": own, "watch:usps": one, "watch:svhn": other}
        for step, own, one, other in rows
    ]
    record = {"watched_before": {"watch:mnist": 0.9}, "history": history}
    found = confined_at(record, "mnist", ["usps", "svhn"], 0.1)
    assert found == (None if step is None else (step, step / 10))


def test_the_time_to_confine_is_a_mean_over_seeds_that_all_did(tmp_path: Path) -> None:
    asked = request("convergence", setting="sa", budget="cpu", chosen=["NTL", "SAMap"], seeds=[0, 1])

    def record(cell: Cell) -> dict[str, object]:
        lost = 0.5 if (cell.method, cell.seed) == ("NTL", 1) else 0.9
        history = [{"step": 25 + cell.seed, "seconds": 2.5 + cell.seed, "watch:mnist": lost, "watch:usps": 0.1}]
        return {**result(), "history": history, "watched_before": {"watch:mnist": 0.9}}

    table = KINDS["convergence"].build(asked, made(tmp_path, asked, record)).table
    assert [row[6:] for row in table.rows] == [["1 of 2", "-"], ["", ""], ["26 ± 1", "3.0 ± 0.7"], ["", ""]]
    times = {(one["method"], one["quantity"]): one["mean"] for one in table.records if "quantity" in one}
    assert times == {
        ("NTL", "confined"): 0.5,
        ("SAMap", "confined"): 1.0,
        ("SAMap", "confined at step"): 25.5,
        ("SAMap", "confined after seconds"): 3.0,
    }


def test_several_pairs_are_told_apart(tmp_path: Path) -> None:
    asked = request("convergence", setting="sa", budget="cpu", chosen=["SAMap"], what=["mnist>usps", "usps>mnist"])
    rows = [{"step": 25, "seconds": 2.0, "watch:mnist": 0.9, "watch:usps": 0.1}]
    record = {**result(), "history": rows, "watched_before": {"watch:mnist": 0.9, "watch:usps": 0.9}}
    built = KINDS["convergence"].build(asked, made(tmp_path, asked, lambda _: record))
    assert [row[1] for row in built.table.rows] == ["MT, MT -> US", "US, MT -> US", "US, US -> MT", "MT, US -> MT"]
    assert [row[6] for row in built.table.rows[::2]] == ["25 ± 0", "0 of 3"]


@pytest.mark.parametrize("table", ["digits", "losses", "convergence", "tsne"])
def test_a_pair_with_several_targets_has_rows_as_long_as_the_head(tmp_path: Path, table: str) -> None:
    asked = request(table, setting="sf", budget="smoke", chosen=["SFMap"], what=["mnist>usps+svhn"])
    points = {"x": [0.0, 1.0], "y": [0.0, 1.0], "labels": [0, 0]}

    def numbers(cell: Cell) -> dict[str, object]:
        watched = {f"watch:{name}": 0.5 for name in (cell.source, *cell.targets)}
        rest = {"history": [{"step": 5, **watched}], "watched_before": watched}
        return {**digits(cell), **rest, "points": dict.fromkeys((cell.source, *cell.targets), points)}

    built = KINDS[table].build(asked, made(tmp_path, asked, numbers))
    assert built.table.rows
    assert {len(row) for row in built.table.rows} == {len(built.table.header)}


def test_every_method_adds_what_the_panel_before_lacks() -> None:
    one = {"a": {"a": (0.5, 0.25), "b": (0.75, 0.5)}, "b": {"b": (0.5, 0.5)}}
    other = {"a": {"a": (0.5, 0.1)}, "b": {"a": (0.25, 0.0), "b": (0.5, 0.5)}}
    nothing: dict[str, dict[str, tuple[float, float]]] = {"a": {}, "b": {}}
    for first, second in ((one, other), (other, one), (one, nothing)):
        before = matrix_figure({"NTL": first, "CUTI": second}, ("a", "b")).axes[0]
        shown = {text.get_text() for text in before.texts}
        assert before.get_title("left").startswith("before")
        assert shown >= {"50.0", "75.0"}
        assert ("25.0" in shown) == (second is not nothing)


def test_closure_is_taken_from_the_chance_of_the_classes(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", chosen=["SAMap"], seeds=[0], what=["pacs_photo>pacs_sketch"])

    def numbers(cell: Cell) -> dict[str, object]:
        return result(**{cell.source: (0.9, 0.9), cell.targets[0]: (0.5, 0.3)})

    built = KINDS["digits"].build(asked, made(tmp_path, asked, numbers))
    row = next(row for row in built.table.rows if row[2] == "ours")
    assert float(row[-1]) == pytest.approx((0.5 - 0.3) / (0.5 - 1 / 7), abs=5e-4)


def test_closure_of_several_targets_is_that_of_their_sums(tmp_path: Path) -> None:
    asked = request("digits", budget="cpu", setting="df", seeds=[0], what=["mnist>usps+svhn+mnist_m"])
    numbers = result(mnist=(0.9, 0.9), usps=(0.9, 0.5), svhn=(0.2, 0.1), mnist_m=(0.14, 0.1))
    built = KINDS["digits"].build(asked, made(tmp_path, asked, lambda _: numbers))
    row = next(row for row in built.table.rows if row[2] == "ours")
    assert row[-1] == "0.556"  # (0.4 + 0.1) / (0.8 + 0.1); the third was near chance


@pytest.mark.parametrize("table", ["digits", "objects", "convergence", "tsne"])
def test_figures_can_be_drawn(tmp_path: Path, table: str) -> None:
    asked = request(table, budget="smoke", setting="sa" if table in ("digits", "objects") else "sf")
    points = {"x": [0.0, 1.0, 2.0], "y": [0.0, 1.0, 0.0], "labels": [0, 0, 1]}

    def numbers(cell: Cell) -> dict[str, object]:
        names = (cell.source, *cell.targets)
        watched = {f"watch:{name}": 0.5 for name in names}
        history = [{"step": step, **watched} for step in (5, 10)]
        return {**digits(cell), "history": history, "watched_before": watched, "points": dict.fromkeys(names, points)}

    figures = KINDS[table].build(asked, made(tmp_path, asked, numbers)).figures
    assert len(figures) == 1
    for draw in figures.values():
        assert draw().axes
    empty = KINDS[table].build(asked, Results(Cells(tmp_path / "none")))
    assert all(draw().axes for draw in empty.figures.values())


@pytest.mark.parametrize(
    ("given", "fragments"),
    [
        ({"table": "digits", "budget": "huge"}, ["budget: unknown 'huge'", "smoke, cpu, full"]),
        ({"table": "digits", "budget": "cpu", "setting": "xx"}, ["no setting 'xx'", "sa, sf, df"]),
        ({"table": "digits", "budget": "cpu", "chosen": ["SAMapp"]}, ["unknown 'SAMapp'", "'SAMap'"]),
        ({"table": "digits", "budget": "cpu", "chosen": ["SAMap:best"]}, ["SAMap:best", "recipe"]),
        ({"table": "digits", "budget": "cpu", "chosen": ["SFMap"]}, ["SFMap doesn't work in setting 'sa'"]),
        ({"table": "digits", "budget": "cpu", "setting": "df", "chosen": ["SAMap"]}, ["SAMap doesn't work"]),
        ({"table": "digits", "budget": "cpu", "what": ["mnist"]}, ["'mnist'", "source>target"]),
        *(
            ({"table": table, "budget": "cpu", "network": name}, [f"model '{name}'", "isn't in the zoo"])
            for table in ("digits", "ownership", "objects", "losses", "convergence", "tsne")
            for name in ("vgg99", "a/b")
        ),
        ({"table": "digits", "budget": "cpu", "what": ["mnist>cifar10"]}, ["cifar10 can't be a target of mnist"]),
        ({"table": "digits", "budget": "cpu", "what": ["mnist>usps+usps"]}, ["a target is there twice"]),
        (
            {"table": "digits", "budget": "cpu", "setting": "df", "what": ["mnist>usps+svhn", "mnist>usps"]},
            ["usps is a target of mnist in 2 pairs"],
        ),
        ({"table": "digits", "budget": "cpu", "what": ["mnits>usps"]}, ["unknown domain 'mnits'", "'mnist'"]),
        ({"table": "digits", "budget": "cpu", "seeds": [-1]}, ["--seeds: -1"]),
        ({"table": "backbones", "budget": "cpu", "what": ["vgg12"]}, ["vgg12"]),
        ({"table": "backbones", "budget": "cpu", "network": "vgg11"}, ["--network has no effect", "--networks"]),
        ({"table": "losses", "budget": "cpu", "chosen": ["SFMap", "NTL"]}, ["NTL has no setting 'terms'"]),
        ({"table": "losses", "budget": "cpu", "chosen": ["SL"]}, ["SL has no setting 'terms'"]),
        ({"table": "convergence", "budget": "cpu", "chosen": ["SL"]}, ["SL learns nothing"]),
    ],
)
def test_wrong_requests_are_one_line(given: dict[str, object], fragments: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        request(**given)
    for fragment in fragments:
        assert fragment in str(caught.value)
    assert "\n" not in str(caught.value)


def test_rivals_may_be_asked_for_without_a_source() -> None:
    assert request("digits", budget="cpu", setting="sf", chosen=["SAMap"]).methods == ("SAMap",)


def test_requests_of_one_table_are_joined_and_kept(tmp_path: Path) -> None:
    request("digits", budget="cpu", chosen=["SL"], seeds=[1]).save(tmp_path)
    whole = request("digits", budget="cpu", chosen=["SAMap", "SL"], seeds=[0, 1]).save(tmp_path)
    assert (whole.methods, whole.seeds) == (("SL", "SAMap"), (1, 0))
    assert saved_requests(tmp_path) == [whole]
    assert request("digits", budget="cpu", chosen=["SL"], seeds=[1]).save(tmp_path) == whole
    first, second = sorted(tmp_path.iterdir())
    first.write_text("{")
    assert [found.seeds for found in saved_requests(tmp_path)] == [(0, 1)]
    second.write_text("{")
    assert saved_requests(tmp_path) == []


def test_requests_made_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    """The tasks of a job array start together, each with its own seed."""
    asked = [request("digits", budget="cpu", chosen=["SL"], seeds=[seed]) for seed in range(16)]
    with ThreadPoolExecutor(len(asked)) as pool:
        list(pool.map(lambda one: one.save(tmp_path), asked))
    assert [sorted(found.seeds) for found in saved_requests(tmp_path)] == [list(range(16))]


def test_the_methods_of_the_tables_are_known() -> None:
    assert {name for names in methods.DEFAULTS.values() for name in names} <= set(methods.known())
