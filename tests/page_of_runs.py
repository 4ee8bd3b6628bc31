"""A page of the report: parsed and validated, or served."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import contextmanager
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from mpisparse.runtime.report.serve import PageServer, make_server

SCRIPT = re.compile(r"<script[^>]*>(.*?)</script>", re.DOTALL)
UPLOT = "/*! https://github.com/leeoniya/uPlot (v1.6.32) */"
LOADED = r"""(?:src|href)=["'](?!data:)|url\(|@import|https?://(?!www\.w3\.org/2000/svg)"""


class Balanced(HTMLParser):
    """Fails on a tag that is closed but was not opened, or the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.ids += [value for name, value in attrs if name == "id" and value]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


class Page:
    """A parsed and validated page: self-contained, balanced, with a whole block of JSON behind its figures."""

    def __init__(self, path: Path) -> None:
        self.html = path.read_text(encoding="utf-8")
        parser = Balanced()
        parser.feed(self.html)
        parser.close()
        assert parser.open == []
        assert len(parser.ids) == len(set(parser.ids))
        self.ids, self.text = parser.ids, parser.text
        self.root = ET.fromstring(SCRIPT.sub("", self.html.removeprefix("<!DOCTYPE html>\n")))
        assert not re.search(LOADED, self.html.replace(UPLOT, ""))
        block, script = SCRIPT.findall(self.html)
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src &#x27;sha256-{digest}&#x27;" in self.html
        self.data = json.loads(block, parse_constant=refuse)
        self.charts: dict[str, Any] = self.data["charts"]
        self.figures = {figure.get("data-chart", ""): figure for figure in self.root.iter("figure")}
        assert set(self.figures) - {"phases"} == set(self.charts)
        for mark in self.charts:
            self.check(mark)

    def check(self, mark: str) -> None:
        """Assert that a chart has a title, a description, and values for every place."""
        chart, figure = self.charts[mark], self.figures[mark]
        assert figure.findtext("figcaption/b") == chart["title"]
        assert figure.findtext("p")
        assert chart["lines"]
        for line in chart["lines"]:
            table = self.table_of(line)
            assert len(table[f"x.{chart['along']}"]) == len(table[line["y"]]) > 0

    def table_of(self, line: dict[str, Any]) -> dict[str, list[Any]]:
        """Return the table that a line is in."""
        table: dict[str, list[Any]] = self.data["runs"][line["run"]]["tables"][line["table"]]
        return table

    def table(self, section: str = "summary") -> dict[str, list[float | str]]:
        """Return a table of the headline: values if present, else the text shown."""
        rows = self.root.findall(f".//section[@id='{section}']//tbody/tr")
        return {row.findtext("th", ""): [_value(cell) for cell in row.findall("td")] for row in rows}

    def shown(self, label: str, section: str = "summary") -> list[str]:
        """Return the text of a row of the headline."""
        rows = self.root.findall(f".//section[@id='{section}']//tbody/tr")
        row = next(row for row in rows if row.findtext("th") == label)
        return ["".join(cell.itertext()) for cell in row.findall("td")]

    def lines(self, mark: str) -> list[str]:
        """Return the names of a chart's lines, with their style if it is not that of a run."""
        lines = self.charts[mark]["lines"]
        return [line["name"] + (f", {line['style']}" if line["style"] != "run" else "") for line in lines]

    def values(self, mark: str, at: int = 0, what: str = "") -> list[Any]:
        """Return the values of a chart's line; `what`: of .low, .high or .bad."""
        line = self.charts[mark]["lines"][at]
        return self.table_of(line)[line["y"] + what]


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


def _value(cell: ET.Element) -> float | str:
    data = cell.find("data")
    return "".join(cell.itertext()) if data is None else float(data.get("value", ""))


@contextmanager
def serving(*runs: Path) -> Iterator[PageServer]:
    """Serve runs in a thread, at any free port."""
    with make_server(runs, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
