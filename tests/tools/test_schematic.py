"""The schematics: one line for each query head to the head that it reads, and SVG that parses."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from attnpack.tools.plot import schematic

SVG = "{http://www.w3.org/2000/svg}"
DRAWINGS = {
    "variants": schematic.variants(),
    "uneven": schematic.grouping([0, 0, 1, 0], title="a <b>"),
    "latent": schematic.latent(3),
    "block": schematic.block(),
    "cross block": schematic.block(cross=True),
    "cache": schematic.cache_growth(2, 4),
}


def texts(drawing):
    return [each.text for each in ElementTree.fromstring(str(drawing)).iter(f"{SVG}text")]


@pytest.mark.parametrize("drawing", DRAWINGS.values(), ids=DRAWINGS)
def test_is_an_svg_whose_parts_lie_inside(drawing):
    root = ElementTree.fromstring(str(drawing))
    assert root.tag == f"{SVG}svg" and drawing._repr_svg_() == str(drawing)
    boxes = list(root.iter(f"{SVG}rect"))[1:]
    assert boxes
    for box in boxes:
        assert 0 <= float(box.get("x")) and float(box.get("x")) + float(box.get("width")) <= drawing.width
        assert 0 <= float(box.get("y")) and float(box.get("y")) + float(box.get("height")) <= drawing.height


@pytest.mark.parametrize("head_map", [[0, 0, 0, 0, 0, 1, 1, 2], [1, 0, 1, 0], [0]])
def test_each_query_head_has_a_line_to_the_head_that_it_reads(head_map):
    drawing = schematic.grouping(head_map)
    kv_boxes = re.findall(r'<rect x="([\d.]+)" y="142".*?>kv(\d)<', str(drawing))
    middles = {float(x) + 13: int(kv) for x, kv in kv_boxes}
    ends = re.findall(r"M ([\d.]+) 58 L ([\d.]+) 142", str(drawing))
    assert [middles[float(end)] for _, end in ends] == head_map
    assert [float(start) for start, _ in ends] == [21 + 30 * h for h in range(len(head_map))]


def test_what_each_variant_caches_is_said():
    said = texts(schematic.variants(8, 2))
    for words in ("8 keys, values", "2 keys, values", "1 key, value", "1 latent, 1 rotated key"):
        assert f"cached: {words}" in said


@pytest.mark.parametrize("num_heads", [1, 8])
def test_the_heads_of_mla_read_a_latent_and_a_rotated_key(num_heads):
    drawing = str(schematic.latent(num_heads))
    boxes = re.findall(r'<rect x="([\d.]+)" y="142" width="([\d.]+)".*?>(latent c|rotated key)<', drawing)
    middles = {name: float(x) + float(width) / 2 for x, width, name in boxes}
    ends = [float(end) for end in re.findall(r"112 L ([\d.]+) 142", drawing)]
    assert ends == [middles["latent c"], middles["rotated key"]] * num_heads


def test_a_step_projects_one_token_and_reads_the_others():
    drawing = str(schematic.cache_growth(2, 3))
    for row, (new, old) in enumerate([(2, 0), (1, 2), (1, 3), (1, 4)]):
        fills = re.findall(rf'y="{26 + 44 * row}" width="30" height="30" rx="3" fill="(#\w+)"', drawing)
        assert fills == [schematic.KEY] * old + [schematic.NEW] * new


def test_a_block_with_cross_attention_reads_the_encoder():
    assert "cross-attention" not in texts(schematic.block())
    assert texts(schematic.block(cross=True)).index("cross-attention") < texts(schematic.block(cross=True)).index(
        "feed-forward"
    )


def test_saves_itself(tmp_path):
    schematic.block().save(tmp_path / "block.svg")
    assert (tmp_path / "block.svg").read_text() == str(schematic.block())
