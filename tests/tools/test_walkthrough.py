"""The drawings of one sentence, and of newer variants: SVG whose parts lie inside, with the numbers that were given."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
from attnpack.tools.plot import colours, newest, schematic, walkthrough

SVG = "{http://www.w3.org/2000/svg}"
WORDS, ROW = ["The", " cat", "\n", " it", " was"], 3
torch.manual_seed(0)
X, Q, K, V = torch.randn(5, 12), *torch.randn(3, 5, 10).unbind(0)
SCORES = K[: ROW + 1] @ Q[ROW]
WEIGHTS = SCORES.softmax(0)
HEADS = torch.tensor([[0.7, 0.28, 0.02, 0.0], [0.0, 0.0, 0.0, 1.0]])
DRAWINGS = {
    "embedding": walkthrough.embedding(WORDS, [3, 14, 15, 92, 6], X),
    "projections": walkthrough.projections(WORDS, X, Q, K, V, ROW),
    "one query": walkthrough.one_query(WORDS[: ROW + 1], Q[ROW], K[: ROW + 1], V[: ROW + 1], SCORES, WEIGHTS),
    "heads": walkthrough.heads(WORDS[: ROW + 1], HEADS, torch.randn(2, 10)),
    **{
        name: getattr(newest, name)()
        for name in (
            "gate",
            "keys_as_values",
            "shared_keys",
            "low_rank_queries",
            "differential",
            "indexer",
            "tied",
            "latents_in_groups",
            "merged_latents",
            "tensor_products",
            "delta_rule",
        )
    },
}


def texts(drawing):
    return [each.text for each in ElementTree.fromstring(str(drawing)).iter(f"{SVG}text")]


def boxes(drawing):
    return list(ElementTree.fromstring(str(drawing)).iter(f"{SVG}rect"))[1:]


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_all_parts_lie_inside(drawing):
    assert boxes(drawing)
    for each in boxes(drawing):
        assert 0 <= float(each.get("x")) and float(each.get("x")) + float(each.get("width")) <= drawing.width
        assert 0 <= float(each.get("y")) and float(each.get("y")) + float(each.get("height")) <= drawing.height
    for each in ElementTree.fromstring(str(drawing)).iter(f"{SVG}text"):
        assert 0 < float(each.get("x")) < drawing.width and 0 < float(each.get("y")) < drawing.height


def test_tokens_have_their_numbers_and_vectors():
    said = texts(DRAWINGS["embedding"])
    assert [word for word in said if word in ("The", "cat", r"'\n'", "it", "was")] == [
        "The",
        "cat",
        r"'\n'",
        "it",
        "was",
    ]
    assert {"3", "14", "15", "92", "6", "12 numbers each"} <= set(said)
    for vector in X.tolist():
        assert {f"{number:+.2f}" for number in vector[:4]} <= set(said)


def test_a_query_has_its_scores_and_weights_and_lines_as_wide():
    drawing = DRAWINGS["one query"]
    assert {f"{score:.2f}" for score in SCORES.tolist()} <= set(texts(drawing))
    assert {f"{weight:.2f}" for weight in WEIGHTS.tolist()} <= set(texts(drawing))
    widths = [float(w) for w in re.findall(rf'stroke="{colours.GREEN}" stroke-width="([\d.]+)"', str(drawing))]
    assert widths == pytest.approx([8 * weight for weight in WEIGHTS.tolist() if weight >= walkthrough.FAINT])


def test_heads_have_a_line_for_each_weight_that_counts():
    found = re.findall(
        r'd="M ([\d.]+) 148 L ([\d.]+) 42" fill="none" stroke="(#\w+)" stroke-width="([\d.]+)"', str(DRAWINGS["heads"])
    )
    assert [(colour, float(width)) for *_, colour, width in found] == [
        (colours.GROUPS[0], pytest.approx(7 * 0.7)),
        (colours.GROUPS[0], pytest.approx(7 * 0.28)),
        (colours.GROUPS[1], pytest.approx(7)),
    ]


def test_what_is_not_read_is_faint():
    """The tokens after the row, and the queries of all tokens but the row."""
    strips = [each for each in boxes(DRAWINGS["projections"]) if each.get("fill-opacity")]
    strong = {colour: 0 for colour in (colours.QUERY, colours.KEY, colours.VALUE)}
    for each in strips:
        if each.get("fill") in strong and each.get("stroke") == colours.INK:
            strong[each.get("fill")] += 1
    shown = walkthrough.SHOWN
    assert strong == {colours.QUERY: shown, colours.KEY: 4 * shown, colours.VALUE: 4 * shown}


@pytest.mark.parametrize("name, cached", [("gate", 2), ("indexer", 3), ("tied", 2), ("merged_latents", 3)])
def test_frames_stand_around_what_is_cached(name, cached):
    frames = [each for each in boxes(DRAWINGS[name]) if each.get("stroke") == colours.AMBER]
    assert len(frames) == cached + 1, "and one in the legend"
    assert "cached" in texts(DRAWINGS[name])


def test_a_flow_leads_from_right_sides_to_left_sides():
    drawing = newest.flow({"a": (10, 20, "ab", "#fff"), "b": (90, 50, "c", "#fff")}, [("a", "b")])
    assert re.search(r'd="M 38.8 20 L 89 50"', str(drawing)) and "cached" not in texts(drawing)


def test_arrows_of_a_flow_end_at_frames_and_stand_apart():
    nodes = {"a": (10, 20, "ab", "#fff"), "b": (10, 80, "ab", "#fff"), "c": (90, 50, "c", "#fff")}
    drawing = str(newest.flow(nodes, [("b", "c"), ("a", "c")], cached=["a", "c"]))
    assert 'd="M 38.8 80 L 83 54"' in drawing and 'd="M 44.8 20 L 83 46"' in drawing


@pytest.mark.parametrize("name", [name for name in DRAWINGS if hasattr(newest, name)])
def test_no_arrow_crosses_a_box(name):
    """But those that it joins: an arrow's inner points are in no box."""
    root = ElementTree.fromstring(str(DRAWINGS[name]))
    areas = [[float(each.get(key)) for key in ("x", "y", "width", "height")] for each in boxes(DRAWINGS[name])]
    ways = [each.get("d") for each in root.iter(f"{SVG}path") if each.get("marker-end")]
    assert ways
    for way in ways:
        x1, y1, x2, y2 = map(float, re.findall(r"-?[\d.]+", way))
        for step in range(1, 40):
            x, y = x1 + (x2 - x1) * step / 40, y1 + (y2 - y1) * step / 40
            assert not any(a < x < a + w and b < y < b + h for a, b, w, h in areas), way


def test_a_cache_of_words():
    said = texts(schematic.cache_growth(2, 1, [" The", " cat", " sat"]))
    assert said.count("The") == said.count("cat") == 2 and said.count("sat") == 1
