"""Pages and pictures from the records of benchmarks."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path

import pytest

from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report import write
from mpisparse.runtime.report.scatter import Dot, frontier

DOCS = Path(__file__).parents[2] / "docs"
CURVE = {"validation_by_step": [5.0, 2.4], "evaluated_by_step": [0, 9]}
RECORDS: dict[str, list[dict[str, object]]] = {
    "sync": [{"what": "exdyna, step", "ranks": 2, "ms": 3.5, "times_faster": 3.2, "build_up": 1.0}],
    "scaling": [
        {"ranks": 2, "scheme": "topk", "how": "real", "build_up": 1.9, "received_MB": 1.5, "imbalance": 0.0, "ms": 9.0},
        {"ranks": 4, "scheme": "topk", "how": "real", "build_up": 3.7, "received_MB": 2.5, "imbalance": 0.0, "ms": 19.0},
    ],
    "ablation": [
        {"group": "threshold", "case": "exdyna", "density_by_step": [0.1, 0.1], "of_whole": 1.0},
        {"group": "threshold", "case": "exdyna:controller=<b>", "density_by_step": [0.1, 0.9], "of_whole": 2.0},
    ],
    "converge": [
        {"case": "alone", "bytes": 0.0, "test": 2.4, "captured": 0.0, **CURVE},
        {"case": "dense", "bytes": 6.0, "test": 2.1, "captured": 1.0, **CURVE},
        {"case": "<few>", "bytes": 0.1, "test": 2.2, "captured": 0.6, **CURVE},
        {"case": "beaten", "bytes": 0.1, "test": 2.2, "captured": 0.5},
        {"case": "lost", "edge": "diverged", "captured": None},
    ],
    "ddp": [{"what": "DDP", "ms": 3.0, "times_ddp": 1.0, "loss_by_step": [3.0, 2.0, float("nan")]}],
}  # fmt: skip


def write_records(path: Path, benches: Sequence[str]) -> Path:
    lines = [json.dumps({"bench": bench, **record}) for bench in benches for record in RECORDS[bench]]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.mark.parametrize("bench", list(RECORDS))
def test_records_of_benchmarks_become_pictures(tmp_path: Path, bench: str) -> None:
    records = write_records(tmp_path / "records.jsonl", [bench])
    page = write([records], None, tmp_path / "pictures")
    assert page == tmp_path / "records.html"
    tree = ET.fromstring(page.read_text().removeprefix("<!DOCTYPE html>"))
    drawn = [t.text for t in tree.iter("{http://www.w3.org/2000/svg}title")]
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert len(drawn) == len(pictures) > 0
    for picture in pictures:
        root = ET.parse(picture).getroot()
        assert root.tag == "{http://www.w3.org/2000/svg}svg"
        left, top, width, height = map(float, root.attrib["viewBox"].split())
        texts = [t for t in root.iter("{http://www.w3.org/2000/svg}text") if t.get("x")]
        assert all(left <= float(t.attrib["x"]) <= width and top <= float(t.attrib["y"]) <= height for t in texts)


@pytest.mark.parametrize("records", sorted((DOCS / "results").glob("*.jsonl")), ids=lambda path: path.stem)
def test_records_in_docs_have_a_page(tmp_path: Path, records: Path) -> None:
    page = write([records], tmp_path / "page.html")
    cells = [cell.text or "" for cell in ET.fromstring(page.read_text().removeprefix("<!DOCTYPE html>")).iter("td")]
    assert {json.loads(line)["case"] for line in records.read_text().splitlines()} <= set(cells)
    assert not [cell for cell in cells if "{" in cell]


def test_the_picture_in_docs_is_that_of_its_records(tmp_path: Path) -> None:
    write([DOCS / "results" / "gpt-nano.jsonl"], tmp_path / "page.html", tmp_path)
    assert (tmp_path / "converge-frontier.svg").read_text() == (DOCS / "pictures" / "converge-frontier.svg").read_text()


def test_values_of_records_are_drawn_to_scale(tmp_path: Path) -> None:
    write([write_records(tmp_path / "records.jsonl", ["ablation"])], None, tmp_path)
    root = ET.parse(tmp_path / "ablation-time-of-a-step.svg").getroot()
    first, second = (float(r.attrib["width"]) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("class"))
    assert second == pytest.approx(2 * first, rel=0.01)
    names = [t.text for t in root.iter("{http://www.w3.org/2000/svg}text")]
    assert names[::2] == ["threshold: whole", "threshold: controller=<b>"]


def test_a_frontier_is_of_those_that_none_beats() -> None:
    dots = [Dot("a", 1.0, 3.0), Dot("b", 2.0, 3.5), Dot("c", 2.0, 2.0), Dot("d", 6.0, 2.0), Dot("e", 7.0, 1.0)]
    assert [dot.name for dot in frontier(dots[::-1])] == ["a", "c", "e"]


def test_what_is_no_record_is_told(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    for text in ('{"bench": "sync"}\n{"bench": "other"}\n', "no JSON\n", "[]\n"):
        bad.write_text(text)
        with pytest.raises(ConfigurationError, match=r"expected a record of mpisparse bench in line \d of"):
            write([bad])
    bad.write_text("")
    with pytest.raises(ConfigurationError, match="got an empty file"):
        write([bad])
    with pytest.raises(ConfigurationError, match="expected run directories or files of records, got both"):
        write([bad, tmp_path])
    with pytest.raises(ConfigurationError, match="--pictures needs files that mpisparse bench --out wrote"):
        write([tmp_path], None, tmp_path)
