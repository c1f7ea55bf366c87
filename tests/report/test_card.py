"""The model card: front matter a hub can read, numbers, limits."""

import yaml

from modelfence.report.card import model_card


def test_front_matter_and_numbers(make_evaluation):
    card = model_card(make_evaluation(), {"method": {"name": "SAMap"}}, title="vgg11")
    _, front, body = card.split("---\n", 2)
    data = yaml.safe_load(front)
    assert data["library_name"] == "modelfence"
    assert data["pipeline_tag"] == "image-classification"
    assert (data["authorized_domains"], data["unauthorized_domains"]) == (["mnist"], ["usps"])
    results = data["model-index"][0]["results"]
    assert [(r["dataset"]["name"], r["metrics"][0]["value"]) for r in results] == [("mnist", 0.971), ("usps", 0.112)]
    assert "| usps | unauthorized | 1,234 | 78.4 | 11.2 |" in body
    assert "A mask is no lock" in body
    assert "| method.name | SAMap |" in body


def test_hostile_names_break_neither_yaml_nor_tables(make_evaluation):
    name = 'a | b"\n---\ntags: [x] <script>'
    card = model_card(make_evaluation(["mnist", name]), {name: name}, title=name)
    data = yaml.safe_load(card.split("---\n", 2)[1])
    assert data["unauthorized_domains"] == [name]
    lines = card.splitlines()
    assert lines.count("---") == 2
    widths = {
        len(line.replace("\\|", "").split("|")) for line in lines if line.startswith("| ") and "authorized" in line
    }
    assert len(widths) == 1
    assert "\\<script\\>" in card
    assert " <script>" not in card.split("---\n", 2)[2]


def test_without_the_model_before_no_ratio_is_claimed(make_evaluation):
    card = model_card(make_evaluation(compared=False, refresh=False), {}, title="plain")
    assert "ST-D" not in card
    assert "BatchNorm" not in card


def test_a_retrained_model_has_limits_of_its_own_and_no_word_of_a_mask(make_evaluation):
    card = model_card(make_evaluation(), {"method": "NTL"}, title="vgg11", masked=False)
    assert "all its weights were retrained" in card
    assert "Retraining is no lock" in card
    assert "The numbers hold for the domains listed here." in card
    assert "mask" not in card
